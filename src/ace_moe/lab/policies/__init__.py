"""Methods that look at a batch, a sequence or a running model: to compare with, and to calibrate tables for.

They are found by name like all others (`--policy xshare`), because the package declares them as entry points; each is imported
when one of them is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calibration import CALIBRATIONS as CALIBRATIONS
    from .calibration import calibrate as calibrate
    from .calibration import calibrated as calibrated
    from .calibration import prepare as prepare
    from .calls import calibration_part as calibration_part
    from .methods import LAB_POLICIES as LAB_POLICIES

HOMES = {
    **dict.fromkeys(("CALIBRATIONS", "calibrate", "calibrated", "prepare"), "calibration"),
    "calibration_part": "calls",
    "LAB_POLICIES": "methods",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)
