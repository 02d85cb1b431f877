"""LExI: each layer's number of experts from random inputs alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .. import rule
from ..errors import StructureError
from ..rule import Gain
from .allocation import LayerwisePolicy, allocate
from .base import Tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..checkpoint import Site
    from ..text import Windows
    from .calibration import Call


@dataclass(frozen=True, kw_only=True)
class Lexi(LayerwisePolicy):
    """K_l slots in layer l with Σ K_l fixed, minimising Σ_l D_l(K_l) (Chitty-Venkata et al., LExI, 2025). Data-free.

    D_l(j) = mean over X ~ N(0, I) [n, d] of ‖F_l^j(X) − F_l^k(X)‖_F, F_l^j the layer with top-j. The sum has one term a
    layer, so dynamic programming finds the optimum that LExI's evolutionary search looks for. Gates are renormalised,
    as by a smaller top-k.
    """

    name: ClassVar[str] = "lexi"
    needs: ClassVar[tuple[str, ...]] = ("lexi_slots",)
    calibrated: ClassVar[bool] = True

    gain: Gain = "kept"
    samples: int = 256
    seed: int = 0

    @property
    def table(self) -> str:
        return "lexi_slots"

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, windows: Windows | None = None) -> Tables:
        from .calibration import sites, watch

        places = sites(model)
        with ExitStack() as stack:
            for number, site in enumerate(places):
                noise = torch.Generator().manual_seed(self.seed + number)
                norm = model.get_submodule(_norm_path(site))
                stack.callback(norm.register_forward_hook(_gaussian(site, noise)).remove)
            seen = watch(model, torch.ones(1, self.samples, dtype=torch.long), places)
        shares = allocate([self.distances(model.get_submodule(s.path), seen[s.key]) for s in places])
        return {site.key: {"lexi_slots": shares[:, n].float()} for n, site in enumerate(places)}

    def distances(self, experts: nn.Module, call: Call) -> Tensor:
        """D(1) … D(k), [k]."""
        from .calibration import answers

        outputs = answers(experts, call.hidden, call.ids)
        order = rule.rank(call.gates.float().abs(), call.ids)
        found = []
        for j in range(1, call.ids.shape[-1] + 1):
            gates = rule.rescale(call.gates.float(), order < j, self.gain)
            found.append(((gates - call.gates.float()).unsqueeze(-1) * outputs).sum(1).norm())
        return torch.stack(found).double().cpu()


def _norm_path(site: Site) -> str:
    if site.norm_path is None or site.router_input != "same":
        raise StructureError(_undefined(site))
    return site.norm_path


def _undefined(site: Site) -> str:
    return (
        f"LExI is undefined: layer {site.key}: router and experts of {site.path} do not read one normalised tensor that "
        "random numbers could stand for. Policy 'alloc_l' shares slots out by a text instead."
    )


def _gaussian(site: Site, noise: torch.Generator) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if not isinstance(output, Tensor):
            raise StructureError(_undefined(site))
        return torch.randn(output.shape, generator=noise).to(output)

    return hook
