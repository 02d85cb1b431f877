"""The command `ace`. Commands read arguments, call the package and print; what they do lives elsewhere."""

from . import bench, comparison, generating, looking, plans, serving, tasks  # each registers its commands
from .common import app, main, parse_budgets

__all__ = ["app", "bench", "comparison", "generating", "looking", "main", "parse_budgets", "plans", "serving", "tasks"]
