"""The plan: tables, thresholds, settings and model fingerprint in one safetensors file."""

from .entries import Phase, Threshold, Workload
from .record import Plan, missing_table, structure_difference

__all__ = ["Phase", "Plan", "Threshold", "Workload", "missing_table", "structure_difference"]
