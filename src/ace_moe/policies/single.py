"""One view at a time: GSP or RCR alone (the paper's ablations), and the plain gate share they must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..rule import Form
from .base import TokenPolicy


@dataclass(frozen=True, kw_only=True)
class Gsp(TokenPolicy):
    """c_i = g_i A_GSP(e_i) / Σ_j g_j A_GSP(e_j)."""

    name: ClassVar[str] = "gsp"
    needs: ClassVar[tuple[str, ...]] = ("gsp",)

    @property
    def form(self) -> Form:
        return Form(self.needs)


@dataclass(frozen=True, kw_only=True)
class Rcr(Gsp):
    """c_i = g_i A_RCR(e_i) / Σ_j g_j A_RCR(e_j). `centred=False`: router rows as they are, as in the authors' release."""

    name: ClassVar[str] = "rcr"

    centred: bool = True

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("rcr" if self.centred else "rcr_uncentred",)


@dataclass(frozen=True, kw_only=True)
class Share(TokenPolicy):
    """c_i = g_i / Σ_j g_j: no table at all. `squared`: of g², the share of the power where outputs are orthogonal."""

    name: ClassVar[str] = "share"

    squared: bool = False

    @property
    def form(self) -> Form:
        return Form(power=2 if self.squared else 1)
