"""The plan: tables, thresholds, settings and model fingerprint in one safetensors file."""

from .entries import OWN, Phase, Threshold, Workload, labels, pick, typed
from .fingerprint import Fingerprint, Routers, Sample, structure_difference
from .lookup import Answer, Curve, Lookup
from .record import Plan, missing_table
from .update import update

__all__ = [
    "OWN", "Answer", "Curve", "Fingerprint", "Lookup", "Phase", "Plan", "Routers", "Sample", "Threshold", "Workload", "labels",
    "missing_table", "pick", "structure_difference", "typed", "update",
]  # fmt: skip
