"""The plan: tables, thresholds, settings and model fingerprint in one safetensors file."""

from .answers import Answer
from .curves import Curve
from .entries import OWN, Phase, Threshold, Workload, typed
from .fingerprint import Fingerprint, Routers, Sample, structure_difference
from .record import Plan, missing_table
from .update import update
from .workloads import labels

__all__ = [
    "OWN", "Answer", "Curve", "Fingerprint", "Phase", "Plan", "Routers", "Sample", "Threshold", "Workload", "labels",
    "missing_table", "structure_difference", "typed", "update",
]  # fmt: skip
