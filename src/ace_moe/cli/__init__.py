"""The command `ace`. Commands read arguments, call the package and print; what they do lives elsewhere."""

# each registers its commands
from . import bench, comparison, generating, looking, plans, reproduce, serving, sharing, tasks, traffic, tune  # noqa: F401
from .app import app, main
from .common import parse_budgets

__all__ = ["app", "main", "parse_budgets"]
