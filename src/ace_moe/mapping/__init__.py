"""From a model and a text to thresholds in a plan."""

from .bounds import least_reading, most_within
from .fit import Fit, Histogram
from .own_text import own_windows, text_for, texts_for
from .recipe import Mapped, Passes, fit_budgets, map_budgets

__all__ = [
    "Fit", "Histogram", "Mapped", "Passes", "fit_budgets",
    "least_reading", "map_budgets", "most_within", "own_windows", "text_for", "texts_for",
]  # fmt: skip
