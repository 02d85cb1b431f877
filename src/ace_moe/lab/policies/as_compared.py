"""What the ACE paper's release ran under the names of other methods, where that is not what their papers describe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ... import rule
from ...errors import PolicyError
from ...policies import Decision, Routing, TokenPolicy
from ...policies.forms import Relative
from ...policies.learned import Modes, Naee, squash
from ...rule import Form, Gain
from .base import reroute
from .batch import XShare


@dataclass(frozen=True, kw_only=True)
class ScoreAsCompared(Relative):
    """What the ACE paper's release ran as "Score": c_i = g_i / max_j g_j, kept gates renormalised."""

    name = "score:ace-paper"


@dataclass(frozen=True, kw_only=True)
class ExpertSparsityAsCompared(Relative):
    """What the ACE paper's release ran as ExpertSparsity: c_i = g_i / max_j g_j, no pruning at all."""

    name = "expert_sparsity:ace-paper"


@dataclass(frozen=True, kw_only=True)
class NaeeAsCompared(TokenPolicy):
    """What the ACE paper's release ran as NAEE: c_i = s_i / max_j s_j with s_i = g_i A_GSP(e_i), ACE's own table.

    One threshold for all layers, no medians.
    """

    name = "naee:ace-paper"
    needs = ("gsp",)
    form = Form(needs, norm="max")

    gain: Gain = "kept"


@dataclass(frozen=True, kw_only=True)
class DiepAsCompared(Naee):
    """What the ACE paper's release ran as DiEP: NAEE's rule for k = 2 on tokens, all or nothing.

    If g_(2) / g_(1) < κ β_l, only the top slot is kept, else all k: every slot of a token has the contribution
    c = x / (1 + x), x = g_(2) / (β_l g_(1)), β_l the layer's median of that ratio.
    """

    name = "diep:ace-paper"

    def contribution(self, routing: Routing) -> Tensor:
        top = routing.gates.float().abs().topk(min(2, routing.gates.shape[-1]), dim=-1).values
        ratio = top[:, -1:] / (top[:, :1] * routing.tables["naee_median"]).clamp(min=1e-30)
        return squash(ratio).expand_as(routing.gates)


@dataclass(frozen=True, kw_only=True)
class SereAsCompared(TokenPolicy):
    """What the ACE paper's release ran as SERE: c_i = 1 − cos(s(e_1), s(e_i)), [T, k]; the gates of skipped slots go to
    the top slot. s(e) are norms of weight rows and columns (table `sere_weights`): no text, no batch.
    """

    name = "sere:ace-paper"
    needs = ("sere_weights",)

    gain: Gain = "none"

    def contribution(self, routing: Routing) -> Tensor:
        top = rule.top_slot(routing.gates, routing.ids)
        first = torch.where(top, routing.ids, 0).sum(-1, keepdim=True)
        return (1 - routing.tables["sere_weights"][first, routing.ids]).clamp(0, 1)

    def settle(self, routing: Routing, protected: Tensor) -> Decision:
        keep, gates = rule.kept(protected, routing.threshold), routing.gates.float()
        lost = torch.where(keep, 0.0, gates).sum(-1, keepdim=True)
        moved = gates + torch.where(rule.top_slot(routing.gates, routing.ids), lost, 0.0)
        return reroute(self, routing, routing.ids, moved, keep)


@dataclass(frozen=True, kw_only=True)
class XShareAsCompared(XShare):
    """What the ACE paper's release ran as XShare: keep a slot iff its expert is among the ⌈E (1 − τ)⌉ of most demand in
    the pass, or it is the top slot; no re-selection, kept gates renormalised.
    """

    name = "xshare:ace-paper"
    with_top: ClassVar[bool] = False
    limits = "experts of the pass go one by one, and a pass of few tokens has few of them"

    refill: bool = False


@dataclass(frozen=True, kw_only=True)
class ModesAsCompared(Modes):
    """What the ACE paper's release ran as MoDES: the same score, and a token may lose its top slot and all others."""

    name = "modes:ace-paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_active != 1 or self.min_mass != 0:
            raise PolicyError(f"Policy {self.name!r} has no safeguards. Use 'modes', which has them.")

    def protected(self, routing: Routing) -> Tensor:
        return self.contribution(routing)


AS_COMPARED = (
    *(ScoreAsCompared, NaeeAsCompared, ExpertSparsityAsCompared, DiepAsCompared, SereAsCompared, XShareAsCompared),
    ModesAsCompared,
)
