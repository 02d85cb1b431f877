"""Running only the kept slots: which path a layer takes, and why.

The torch path is transformers' own grouped product with skipped slots behind its last group. Where a GPU and Triton are
there and the layer's structure is one the kernels know, `FastPath` takes its place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ..checkpoint.structure import is_registered
from ..errors import IntegrationError
from ..policies import Ace, Gsp, Policy, Rcr, Routing, Share

if TYPE_CHECKING:
    from ..kernels.experts import Layout
    from ..kernels.routing import TopK

Choice = Literal["auto", "torch", "kernels"]
RULED = (Ace, Gsp, Rcr, Share)  # policies the rule kernel decides


class FastPath:
    """One layer's kernels: the rule for policies they know, and the experts."""

    def __init__(self, layout: Layout, policy: Policy):
        self.layout, self.policy = layout, policy
        self.top_k: TopK | None = None  # set where the router is a plain top-k that the kernel can take over

    def _tables(self, tables: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        first, second, *_ = [tables[name] for name in self.policy.needs] + [None, None]
        return first, second

    def rule(self, routing: Routing, counts: Tensor, sentinel: int) -> tuple[Tensor, Tensor]:
        """ids, gates [T, k] for the dispatch from the router's."""
        from ..kernels import ops

        given = (routing.ids, routing.gates, *self._tables(routing.tables), routing.threshold, routing.token_mask)
        return ops.rule(*given, counts, sentinel, *ops.settings(self.policy))

    def routes(self, tokens: int) -> bool:
        """Whether the router's own top-k is left to `route` for this many tokens."""
        return self.top_k is not None and tokens > 0

    def route(
        self, logits: Tensor, tables: Mapping[str, Tensor], threshold: Tensor, token_mask: Tensor | None, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same as the router's top-k and `rule`, straight from the router's logits [T, E]."""
        from ..kernels import ops

        assert self.top_k is not None
        given = (logits, *self._tables(tables), threshold, token_mask, counts)
        return ops.route(*given, *self.top_k, logits.dtype, *ops.settings(self.policy))

    def experts(self, module: nn.Module, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        from ..kernels import ops

        layout, gated = self.layout, self.layout.gated
        return ops.run_experts(
            hidden, ids, gates, module.gate_up_proj if gated else module.up_proj, module.down_proj,
            getattr(module, "gate_up_proj_bias" if gated else "up_proj_bias", None),
            getattr(module, "down_proj_bias", None), gated, layout.interleaved, layout.transposed,
            *layout.activation, *self._factors(module),
        )  # fmt: skip

    def _factors(self, module: nn.Module) -> tuple[Tensor, Tensor, int, int] | tuple[()]:
        """What FP8 weights are multiplied by."""
        if self.layout.block is None:
            return ()
        up = module.gate_up_proj_scale_inv if self.layout.gated else module.up_proj_scale_inv
        return up, module.down_proj_scale_inv, *self.layout.block  # type: ignore[return-value]


def fast_path(module: nn.Module, policy: Policy, choice: Choice = "auto") -> FastPath | str:
    """The kernels for this layer, or why it takes the torch path. `kernels` makes the reason an error."""
    device = next(module.parameters()).device
    if choice == "torch":
        return "the torch path was asked for"
    if choice == "auto" and device.type != "cuda":
        return f"the layer is on {device.type}"
    found = _try(module, policy, device)
    if choice == "kernels" and isinstance(found, str):
        raise IntegrationError(f"The kernels cannot run {type(module).__name__}: {found}. Use dispatch='auto'.")
    return found


def _try(module: nn.Module, policy: Policy, device: torch.device) -> FastPath | str:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":  # the interpreter runs kernels on the CPU
        return f"the layer is on {device.type}"
    try:
        from ..kernels.experts import Layout
    except ImportError:
        return "Triton is not installed"
    if type(policy) not in RULED:
        return f"policy {policy.name!r} has no kernel"
    layout = Layout.of(module)
    if isinstance(layout, str):
        return layout
    if layout.block and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU has no FP8"
    return FastPath(layout, policy)


def on_gpu(module: nn.Module) -> str:
    """Which path an experts module takes on a GPU, and why; for modules without weights too."""
    if not is_registered(module):
        return "own loop: outside transformers' experts registry"
    try:
        from ..kernels.layout import Layout
    except ImportError:
        return "torch: Triton is not installed"
    layout = Layout.of(module)
    return f"torch: {layout}" if isinstance(layout, str) else "kernels"
