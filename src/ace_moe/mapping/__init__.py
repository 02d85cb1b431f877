"""From a model and a text to thresholds in a plan."""

from .bounds import most_within
from .fit import Fit, Histogram
from .own_text import own_windows, text_for, texts_for
from .recipe import Mapped, Passes, calibrate, calibration_part, fit_budgets, map_budgets, prepare

__all__ = [
    "Fit", "Histogram", "Mapped", "Passes", "calibrate", "calibration_part", "fit_budgets",
    "map_budgets", "most_within", "own_windows", "prepare", "text_for", "texts_for",
]  # fmt: skip
