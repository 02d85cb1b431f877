"""The oracle: what a slot really adds, known only after running it. Not a method to use, but a mark to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .. import rule
from ..rule import EPSILON, Gain
from .base import Routing, Tables, TokenPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..text import Windows


def output_norms(routing: Routing) -> Tensor:
    """g_i ‖f_{e_i}(x)‖, [T, k]: every slot's expert is run."""
    assert routing.norms is not None
    return routing.gates.float().abs() * routing.norms()


@dataclass(frozen=True, kw_only=True)
class Oracle(TokenPolicy):
    """c_i = g_i ‖f_i(x)‖ / Σ_j g_j ‖f_j(x)‖, [T, k]."""

    name: ClassVar[str] = "oracle"
    needs_norms: ClassVar[bool] = True

    gain: Gain = "none"

    def contribution(self, routing: Routing) -> Tensor:
        assert routing.norms is not None
        return rule.share(routing.gates, routing.norms())


@dataclass(frozen=True, kw_only=True)
class RawOracle(TokenPolicy):
    """c_i = min(1, g_i ‖f_i(x)‖ / s), [T, k], with s the largest g ‖f(x)‖ of the whole model on a text.

    Not normalised per token: layers and tokens with small outputs lose more slots.
    """

    name: ClassVar[str] = "oracle:raw"
    needs: ClassVar[tuple[str, ...]] = ("oracle_scale",)
    needs_norms: ClassVar[bool] = True
    calibrated: ClassVar[bool] = True

    gain: Gain = "none"

    def contribution(self, routing: Routing) -> Tensor:
        return (output_norms(routing) / routing.tables["oracle_scale"].clamp(min=EPSILON)).clamp(max=1)

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, windows: Windows | None) -> Tables:
        from .calibration import answers, needed, sites, walk

        places, largest = sites(model), torch.zeros(())
        for _, experts, call in walk(model, needed(windows).ids, places):
            norm = answers(experts, call.hidden, call.ids).norm(dim=-1)
            largest = torch.maximum(largest, (call.gates.float().abs() * norm).max().cpu())
        return {site.key: {"oracle_scale": largest.clone()} for site in places}
