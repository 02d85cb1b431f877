"""All methods of the lab by name."""

from __future__ import annotations

from ...policies import Policy
from .allocation import AllocL, AllocT, Lexi
from .as_compared import AS_COMPARED
from .batch import Oea, XShare
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
