"""ACE: skip a slot only when both views, global (GSP) and router-conditioned (RCR), call it low."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import PolicyError
from ..rule import FUSIONS, Form, Fusion
from .base import TokenPolicy


@dataclass(frozen=True, kw_only=True)
class Ace(TokenPolicy):
    """c = max(p_GSP, p_RCR) with p_i = g_i A(e_i) / Σ_j g_j A(e_j), all [T, k] (Xu et al., ACE, 2026).

    Its ablations fuse by `min` or `mean`.
    """

    name: ClassVar[str] = "ace"
    needs: ClassVar[tuple[str, ...]] = ("gsp", "rcr")

    fusion: Fusion = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fusion not in FUSIONS:
            raise PolicyError(f"fusion must be max, min or mean, not {self.fusion!r}.")

    @property
    def form(self) -> Form:
        return Form(self.needs, self.fusion)
