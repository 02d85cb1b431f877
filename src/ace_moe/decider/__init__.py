"""One decision for every engine: what a token is, which of its slots run, what was counted."""

from .decider import Decider
from .deciders import Deciders
from .executors import Chosen, Executor, choose
from .report import Part, merge
from .rows import PADDING, row_of
from .thresholds import Thresholds, thresholds_for

__all__ = [
    "PADDING", "Chosen", "Decider", "Deciders", "Executor", "Part", "Thresholds", "choose", "merge", "row_of",
    "thresholds_for",
]  # fmt: skip
