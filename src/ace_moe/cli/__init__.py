"""The command `ace`. Commands read arguments, call the package and print; what they do lives elsewhere."""

from . import bench, comparison, plans, serving, sharing, tasks  # each registers its commands
from .common import app, main, parse_budgets

__all__ = ["app", "bench", "comparison", "main", "parse_budgets", "plans", "serving", "sharing", "tasks"]
