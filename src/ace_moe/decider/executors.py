"""Executors: ways to run the slots that are left. Each engine offers its own; one is chosen, once, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import IntegrationError, OptionError


class Executor(Protocol):
    """Runs x [T, d] through the experts of the slots ids, gates [T, k]; ids that are no expert are left out."""

    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


Offer = Executor | str  # an executor, or why there is none


@dataclass(frozen=True)
class Chosen:
    """The executor of a layer, and why the ones in front of it were not taken."""

    executor: Executor
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.executor.name


def choose(offers: Mapping[str, Offer], wanted: str = "auto", where: str = "this layer") -> Chosen:
    """Take the first executor on offer, or the one that was asked for; else say why there is none."""
    if wanted != "auto" and wanted not in offers:
        raise OptionError(f"An executor is auto or one of {', '.join(offers)}; {wanted!r} is none here.")
    refused: dict[str, str] = {}
    for name, offer in offers.items():
        if wanted not in ("auto", name):
            refused[name] = f"{wanted} was asked for"
        elif not isinstance(offer, str):
            return Chosen(offer, refused)
        elif wanted == name:
            raise IntegrationError(f"{name} cannot run {where}: {offer}. Leave the choice to `auto`.")
        else:
            refused[name] = offer
    raise IntegrationError(f"Nothing can run {where}: {'; '.join(f'{n}: {why}' for n, why in refused.items())}.")


def kept_alone(run: Callable[..., Tensor], hidden: Tensor, ids: Tensor, gates: Tensor, kept: Tensor) -> Tensor:
    """Run kept slots as tokens of one slot each and add them up in fp32: hidden [T, d] → [T, d]. Syncs with the host.

    A stock grouped product skips the arithmetic of skipped slots but still gathers, masks, scales and adds a row for
    each of them, which on a CPU is half of its time.
    """
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    token, slot = kept.nonzero(as_tuple=True)
    if len(token):
        parts = run(hidden[token], ids[token, slot].unsqueeze(1), gates[token, slot].unsqueeze(1))
        out.index_add_(0, token, parts.float())
    return out.to(hidden.dtype)
