"""The command `ace`. Commands read arguments, call the package and print; what they do lives elsewhere."""

from . import bench, comparison, plans, reproduce, serving, tasks, traffic, tune  # each registers its commands
from .common import app, main, parse_budgets

__all__ = [
    "app",
    "bench",
    "comparison",
    "main",
    "parse_budgets",
    "plans",
    "reproduce",
    "serving",
    "tasks",
    "traffic",
    "tune",
]
