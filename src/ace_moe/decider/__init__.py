"""The middle every engine shares: rows, state, the decider of a layer, executors, one report."""

from .executors import Chosen, Executor, choose
from .layer import Layer
from .report import Part, merge
from .rows import PADDING, PHASES, row_of
from .runtime import Runtime

__all__ = ["PADDING", "PHASES", "Chosen", "Executor", "Layer", "Part", "Runtime", "choose", "merge", "row_of"]
