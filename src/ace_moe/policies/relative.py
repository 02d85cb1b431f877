"""Gates relative to the token's largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..rule import Form, Gain
from .base import TokenPolicy


@dataclass(frozen=True, kw_only=True)
class Relative(TokenPolicy):
    """c_i = g_i / max_j g_j, [T, k] (ik_llama.cpp's `-ser Kmin,t`: min_active = Kmin, threshold = t).

    The engine divides kept weights by their sum where the model normalises its gates.
    """

    name: ClassVar[str] = "relative"

    gain: Gain = "kept"

    @property
    def form(self) -> Form:
        return Form(norm="max")
