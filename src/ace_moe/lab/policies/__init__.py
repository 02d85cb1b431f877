"""Methods that look at a batch, a sequence or a running model: to compare with, and to calibrate tables for.

They are found by name like all others (`--policy xshare`), because the package declares them as entry points.
"""

from ...policies import Policy
from .allocation import AllocL, AllocT, Lexi
from .as_compared import AS_COMPARED
from .batch import Oea, XShare
from .calibration import CALIBRATIONS, calibrate, calibrated, calibration_part, prepare
from .diep import Diep
from .expert_sparsity import ExpertSparsity
from .oracle import Oracle, RawOracle
from .pesf import Pesf
from .router import Halving, Score
from .sere import Sere
from .subset import AimerPruning, ReapPruning

LAB: tuple[type[Policy], ...] = (
    *(Score, Halving, Pesf, Oracle, RawOracle, AllocT, AllocL, Lexi, Sere, XShare, Oea),
    *(ExpertSparsity, Diep, ReapPruning, AimerPruning, *AS_COMPARED),
)
LAB_POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in LAB}

__all__ = [
    "CALIBRATIONS", "LAB_POLICIES", "calibrate", "calibrated", "calibration_part", "prepare",
]  # fmt: skip
