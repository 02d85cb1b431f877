"""The command `ace`. Commands read arguments, call the package and print; what they do lives elsewhere."""

from . import comparison, plans, tasks  # each registers its commands
from .common import app, main, parse_budgets

__all__ = ["app", "comparison", "main", "parse_budgets", "plans", "tasks"]
