"""Scores that gates and tables give at once: each is a `Form`, which the kernels run too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import PolicyError
from ..rule import FUSIONS, Form, Fusion, Gain
from .base import TokenPolicy


@dataclass(frozen=True, kw_only=True)
class Ace(TokenPolicy):
    """c = max(p_GSP, p_RCR) with p_i = g_i A(e_i) / Σ_j g_j A(e_j), all [T, k] (Xu et al., ACE, 2026).

    Its ablations fuse by `min` or `mean`.
    """

    name = "ace"
    needs = ("gsp", "rcr")

    fusion: Fusion = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fusion not in FUSIONS:
            raise PolicyError(f"fusion must be max, min or mean, not {self.fusion!r}.")

    @property
    def form(self) -> Form:
        return Form(self.needs, self.fusion)


@dataclass(frozen=True, kw_only=True)
class Gsp(TokenPolicy):
    """c_i = g_i A_GSP(e_i) / Σ_j g_j A_GSP(e_j)."""

    name = "gsp"
    needs = ("gsp",)

    @property
    def form(self) -> Form:
        return Form(self.needs)


@dataclass(frozen=True, kw_only=True)
class Rcr(Gsp):
    """c_i = g_i A_RCR(e_i) / Σ_j g_j A_RCR(e_j). `centred=False`: router rows as they are, as in the authors' release."""

    name = "rcr"

    centred: bool = True

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("rcr" if self.centred else "rcr_uncentred",)


@dataclass(frozen=True, kw_only=True)
class Aimer(Gsp):
    """c_i = g_i K(e_i) / Σ_j g_j K(e_j), [T, k], with K(e) ∝ rms(W_e) / mean|W_e| (AIMER, 2026, as slot score).

    This is how the ACE paper's release uses AIMER, with kept gates renormalised; the cited method prunes: `aimer:prune`.
    """

    name = "aimer"
    needs = ("aimer",)

    gain: Gain = "kept"


@dataclass(frozen=True, kw_only=True)
class Share(TokenPolicy):
    """c_i = g_i / Σ_j g_j: no table at all. `squared`: of g², the share of the power where outputs are orthogonal."""

    name = "share"
    cumulative: ClassVar[bool] = False

    squared: bool = False

    @property
    def form(self) -> Form:
        return Form(power=2 if self.squared else 1, cumulative=self.cumulative)


@dataclass(frozen=True, kw_only=True)
class TopP(Share):
    """c_i = 1 − Σ_{j before i} g_j / Σ_j g_j in descending gates, [T, k] (Huang et al., Dynamic MoE, 2024; τ = 1 − P).

    The slot that crosses P is kept, and kept probabilities stay as they are. Their model is trained for it and applies
    the rule to all E experts; here it is applied to the routed k. The ACE paper's comparison renormalised (gain kept).
    `squared`: the mass of g² instead, our variant.
    """

    name = "top_p"
    cumulative = True

    gain: Gain = "none"


@dataclass(frozen=True, kw_only=True)
class Relative(TokenPolicy):
    """c_i = g_i / max_j g_j, [T, k] (ik_llama.cpp's `-ser Kmin,t`: min_active = Kmin, threshold = t).

    The engine divides kept weights by their sum where the model normalises its gates.
    """

    name = "relative"
    form = Form(norm="max")

    gain: Gain = "kept"


@dataclass(frozen=True, kw_only=True)
class Fixed(TokenPolicy):
    """Keep the top-k1 gates, divided by the mass of the router's top-k2 = k: c_i = 1 − rank_i / k, [T, k].

    ("Training-free halving of activated experts", 2026.) k1 follows from the threshold, and k2 is the model's k: gates stay
    as they are. `halving` has another k2.
    """

    name = "fixed"
    form = Form(norm="rank")
    stepwise = True
    limits = "every token keeps the same number of slots, so ratios come in steps of 1/k"

    gain: Gain = "none"
