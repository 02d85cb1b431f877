"""A MoE layer's weights, and readers that hide the layout its model has them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 96 << 20  # fp32 working set of one chunk of experts; bounds memory for any model


@dataclass(eq=False)
class Stack:
    """Experts' matrices [E, a, b] that are read, and decoded in fp32 where they are packed, when they are asked for."""

    read: Callable[[int, torch.device], Tensor]
    shape: torch.Size
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _last: tuple[slice, Tensor] | None = field(default=None, init=False)  # tables ask one after another

    def __getitem__(self, chunk: slice) -> Tensor:
        if self._last is None or self._last[0] != chunk:
            self._last = None  # before others come into memory
            self._last = chunk, torch.stack([self.read(expert, self.device) for expert in range(self.shape[0])[chunk]])
        return self._last[1]

    def to(self, device: str | torch.device) -> Stack:
        return Stack(self.read, self.shape, torch.device(device))


@dataclass(frozen=True)
class Projections:
    """A few experts in one orientation, fp32: gate, up [C, m, d] and down [C, d, m]; gate is None if ungated."""

    gate: Tensor | None
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer's weights, in the layout of the model, with readers that hide the layout.

    `norm_scale` [d] is the effective scale Γ in front of the experts; `router_rows` [E, d] are the router's rows
    in the experts' input space. Where one has no meaning it is None and `undefined` says why.
    """

    key: str
    path: str
    top_k: int
    w_in: Tensor | Stack
    w_out: Tensor | Stack
    b_in: Tensor | None
    b_out: Tensor | None
    gated: bool
    transposed: bool
    interleaved: bool
    activate: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor], Tensor]
    norm_scale: Tensor | None
    router_rows: Tensor | None
    undefined: dict[str, str]

    @property
    def num_experts(self) -> int:
        return self.w_in.shape[0]

    @property
    def hidden(self) -> int:
        """d, the width of the experts' input."""
        return self.w_in.shape[1 if self.transposed else 2]

    def to(self, device: str | torch.device) -> MoELayer:
        """The same layer with its tensors on another device."""
        moved: dict[str, Any] = {
            n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor | Stack)
        }
        return replace(self, **moved)

    def chunks(self) -> Iterator[slice]:
        """Slices of experts whose fp32 copies fit the working set."""
        experts, per_expert = self.w_in.shape[0], 4 * (self.w_in.shape[1:].numel() + self.w_out.shape[1:].numel())
        step = 1 << (max(1, CHUNK_BYTES // per_expert).bit_length() - 1)  # a power of two shares out evenly over cores
        for start in range(0, experts, step):
            yield slice(start, min(start + step, experts))

    def _oriented(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """(w_in [C, 2m or m, d], w_out [C, d, m]) in fp32."""
        w_in, w_out = self.w_in[chunk].float(), self.w_out[chunk].float()
        return (w_in.mT, w_out.mT) if self.transposed else (w_in, w_out)

    def projections(self, chunk: slice) -> Projections:
        """The chunk's projections, whatever their layout."""
        w_in, w_out = self._oriented(chunk)
        if not self.gated:
            return Projections(None, w_in, w_out)
        if self.interleaved:
            return Projections(w_in[:, ::2], w_in[:, 1::2], w_out)
        gate, up = w_in.chunk(2, dim=1)
        return Projections(gate, up, w_out)

    def respond(self, x: Tensor, chunk: slice) -> Tensor:
        """Run each expert of the chunk on its row: x [C, d] → [C, d], the expert's complete forward in fp32."""
        w_in, w_out = self._oriented(chunk)
        z = torch.bmm(w_in, x.unsqueeze(-1)).squeeze(-1)
        z = z if self.b_in is None else z + self.b_in[chunk].float()
        y = torch.bmm(w_out, self.activate(z).unsqueeze(-1)).squeeze(-1)
        return self.finish(y if self.b_out is None else y + self.b_out[chunk].float())
