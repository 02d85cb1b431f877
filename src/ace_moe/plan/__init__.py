"""The plan: tables, thresholds, settings and model fingerprint in one safetensors file."""

from .entries import Phase, Threshold, Workload
from .fingerprint import Fingerprint, Routers, Sample, structure_difference
from .record import Plan, missing_table
from .update import update

__all__ = [
    "Fingerprint", "Phase", "Plan", "Routers", "Sample", "Threshold", "Workload", "missing_table", "structure_difference",
    "update",
]  # fmt: skip
