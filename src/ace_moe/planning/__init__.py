"""From a model and a text to thresholds in a plan."""

from .bounds import least_reading, most_within
from .mapping import Fit, Histogram
from .own_text import own_windows, text_for, texts_for
from .recipe import Mapped, Passes, calibrate, calibration_part, fit_budgets, map_budgets, prepare
from .tuning import Tuned, tune

__all__ = [
    "Fit", "Histogram", "Mapped", "Passes", "Tuned", "calibrate", "calibration_part", "fit_budgets",
    "least_reading", "map_budgets", "most_within", "own_windows", "prepare", "text_for", "texts_for", "tune",
]  # fmt: skip
