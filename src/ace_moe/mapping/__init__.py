"""From a model and a text to thresholds in a plan."""

from .bounds import most_within
from .fit import Fit, Histogram
from .recipe import Mapped, Passes, ensure, fit_budgets, map_budgets, missing
from .texts import TextSource, own_windows, windows_by_text

__all__ = [
    "Fit", "Histogram", "Mapped", "Passes", "TextSource", "ensure", "fit_budgets", "map_budgets", "missing",
    "most_within", "own_windows", "windows_by_text",
]  # fmt: skip
