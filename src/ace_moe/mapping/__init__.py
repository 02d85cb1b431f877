"""From a model and a text to thresholds in a plan."""

from .bounds import least_reading, most_within
from .ensure import ensure, missing
from .fit import Fit, Histogram
from .own_text import own_windows
from .recipe import Mapped, Passes, calibrate, calibration_part, fit_budgets, map_budgets, prepare

from .text_source import TextSource, windows_by_text

__all__ = [
    "Fit", "Histogram", "Mapped", "Passes", "calibrate", "calibration_part", "fit_budgets",
    "least_reading", "map_budgets", "most_within", "own_windows", "prepare", "TextSource", "ensure", "missing", "windows_by_text",
]  # fmt: skip
