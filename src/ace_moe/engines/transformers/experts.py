"""The experts implementation `ace`: what transformers calls in place of its own, and the ways it runs the slots that are left.

transformers looks the implementation up at every call. Skipped slots carry the id one past the last expert: they sort
behind every group of the grouped product and are never computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface, fp8_grouped_mm_experts_forward
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from ...checkpoint.structure import is_registered
from ...decider.executors import Chosen, Offer, choose, kept_alone
from ...kernels import foreign, without_triton

if TYPE_CHECKING:
    from ...kernels.layout import Layout, Near

IMPLEMENTATION = "ace"
UNRULED = "ace_unruled"  # our executors behind the stock router: what the rule itself costs
CHILD = "ace"  # the layer's name on an experts module
SENTINELS = "_is_expert_parallel"  # transformers ≥ 5.18 masks sentinel rows only under this flag; older ones always do
HOST = "_ace_host"  # on an experts module whose weights are in host memory
Choice = Literal["auto", "torch", "kernels"]
CHOICES: tuple[Choice, ...] = ("auto", "torch", "kernels")
Stock = Callable[..., Tensor]


class Hosted(NamedTuple):
    """Where an experts module runs whose weights are in host memory, and what copies it has there."""

    device: torch.device
    near: Near | None


def _implementation(stock: Stock, ruled: bool) -> Stock:
    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        decider = getattr(self, CHILD, None)
        if decider is None:
            return stock(self, hidden_states, top_k_index, top_k_weights)
        ids, gates = top_k_index, top_k_weights
        if ruled and decider.place == "experts":
            ids, gates = decider.decide(ids, gates, hidden_states)
        return decider.chosen.executor(stock, self, hidden_states, ids, gates)

    return forward


for name, ruled in ((IMPLEMENTATION, True), (UNRULED, False)):
    ExpertsInterface.register(name, _implementation(grouped_mm_experts_forward, ruled))
    FP8ExpertsInterface.register(name, _implementation(fp8_grouped_mm_experts_forward, ruled))


# ---- executors ------------------------------------------------------------------------------------------------------


class Whole:
    """transformers' own grouped product, with skipped slots behind its last group."""

    name = "stock"

    def __call__(self, stock: Stock, module: nn.Module, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        return stock(module, hidden, ids, gates)


class Compact:
    """Kept slots alone through the stock function: on a CPU. With nothing skipped it is that function, to the last bit."""

    name = "compact"

    def __call__(self, stock: Stock, module: nn.Module, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        if hidden.device.type != "cpu" or torch.compiler.is_compiling():  # a compiler cannot know the number of slots
            return stock(module, hidden, ids, gates)
        skipped = int(module.num_experts)  # type: ignore[arg-type]
        kept = ids != skipped
        masks = getattr(module, SENTINELS, None)
        if masks is not None:  # no slot is left that would have to be masked
            setattr(module, SENTINELS, False)
        try:
            if bool(kept.all()):
                return stock(module, hidden, ids, gates)
            return kept_alone(partial(stock, module), hidden, ids, gates, kept)
        finally:
            if masks is not None:
                setattr(module, SENTINELS, masks)


class Kernels:
    """Our kernels, for layouts they know. Weights are read off the module at each call: it may have moved."""

    name = "kernels"

    def __init__(self, layout: Layout):
        self.layout = layout

    def __call__(self, stock: Stock, module: nn.Module, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        from ...kernels.ops import run_experts

        layout, up = self.layout, "gate_up_proj" if self.layout.gated else "up_proj"
        further: dict[str, Any] = {}
        if layout.block is not None:  # what FP8 weights are multiplied by
            further.update(s_in=getattr(module, f"{up}_scale_inv"), s_out=module.down_proj_scale_inv)
            further.update(block_rows=layout.block[0], block_columns=layout.block[1])
        near = vars(module)[HOST].near if HOST in vars(module) else None
        if near is not None:  # copies beside the GPU of experts whose weights are in host memory
            further.update(near_row=near.row, near_in=near.w_in, near_out=near.w_out)
        return run_experts(
            hidden, ids, gates, getattr(module, up), module.down_proj, getattr(module, f"{up}_bias", None),
            getattr(module, "down_proj_bias", None), layout.gated, layout.interleaved, layout.transposed,
            *layout.activation, **further,
        )  # fmt: skip


def choose_executor(module: nn.Module, device: torch.device, dispatch: Choice, path: str) -> Chosen:
    """Choose how one experts module runs: by kernels where a GPU and Triton are there and its structure is one they know."""
    why = "" if is_registered(module) else "its class is outside transformers' experts registry"
    offers: dict[str, Offer] = {}
    if dispatch != "torch" or HOST in vars(module):
        offers["kernels"] = why or kernels_for(module, device, forced=dispatch == "kernels")
    if HOST in vars(module):  # no other executor reads host memory
        return choose(offers, wanted="kernels", where=path)
    offers["compact"] = why or ("the layer is not on a CPU" if device.type != "cpu" else Compact())
    offers["stock"] = Whole()
    return choose(offers, wanted="auto" if dispatch == "torch" else dispatch, where=path)


def kernels_for(module: nn.Module, device: torch.device, forced: bool = False) -> Kernels | str:
    """Return the kernels for this module on this device, or why they cannot run it."""
    interpreted = forced and os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs kernels on the CPU
    if device.type != "cuda" and not interpreted:
        return f"the layer is on {device.type}"
    if why := foreign(device):
        return why
    layout = layout_of(module)
    if isinstance(layout, str):
        return layout
    if layout.block and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU has no FP8"
    return Kernels(layout)


def layout_of(module: nn.Module) -> Layout | str:
    """Return how the kernels see the module's weights, or why they cannot run it."""
    if why := without_triton():
        return why
    packed = [type(p).__name__ for p in module.parameters() if type(p) is not nn.Parameter]
    if packed:  # such a tensor says it is bf16 and is not
        return f"its weights are of type {packed[0]}"
    from ...kernels.layout import Layout

    return Layout.of(module)


def on_gpu(module: nn.Module) -> str:
    """Name the executor an experts module gets on a GPU, and why; for modules without weights too."""
    if not is_registered(module):
        return "own loop: outside transformers' experts registry"
    layout = layout_of(module)
    return f"stock: {layout}" if isinstance(layout, str) else "kernels"
