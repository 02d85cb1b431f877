"""The command `ace`. Commands read arguments, call the package and print; what they do lives elsewhere."""

from . import (  # each registers its commands
    bench,
    comparison,
    generating,
    looking,
    plans,
    reproduce,
    serving,
    sharing,
    tasks,
    traffic,
    tune,
)
from .common import app, main, parse_budgets

__all__ = [
    "app",
    "bench",
    "comparison",
    "generating",
    "looking",
    "main",
    "parse_budgets",
    "plans",
    "reproduce",
    "serving",
    "sharing",
    "tasks",
    "traffic",
    "tune",
]
