"""Executors: ways to run the slots that are left. Each engine offers its own; one is chosen, once, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import IntegrationError, OptionError

SENTINELS = "_is_expert_parallel"  # transformers ≥ 5.18 masks sentinel rows only under this flag; older ones always do


class Executor(Protocol):
    """Runs x [T, d] through the experts of the slots ids, gates [T, k]; ids that are no expert are left out."""

    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


Offer = Callable[[], Executor | str]  # an executor, or why there is none


@dataclass(frozen=True)
class Chosen:
    """The executor of a layer, and why the ones in front of it were not taken."""

    executor: Executor
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.executor.name


def choose(offers: Mapping[str, Offer], wanted: str = "auto", where: str = "this layer") -> Chosen:
    """The first offer that holds, or the one that was asked for; else an error that says why not."""
    if wanted != "auto" and wanted not in offers:
        raise OptionError(f"An executor is auto or one of {', '.join(offers)}; {wanted!r} is none here.")
    refused: dict[str, str] = {}
    for name, offer in offers.items():
        if wanted not in ("auto", name):
            refused[name] = f"{wanted} was asked for"
            continue
        made = offer()
        if not isinstance(made, str):
            return Chosen(made, refused)
        refused[name] = made
        if wanted == name:
            raise IntegrationError(f"{name} cannot run {where}: {made}. Leave the choice to `auto`.")
    raise IntegrationError(f"Nothing can run {where}: {'; '.join(f'{n}: {why}' for n, why in refused.items())}.")


# ---- kept slots alone: where shapes may follow the data --------------------------------------------------------------


def kept_alone(run: Callable[..., Tensor], hidden: Tensor, ids: Tensor, gates: Tensor, kept: Tensor) -> Tensor:
    """`run(hidden, ids, gates)` on kept slots as tokens of one slot each, added up in fp32. Syncs with the host.

    A stock grouped product skips the arithmetic of skipped slots but still gathers, masks, scales and adds a row for
    each of them, which on a CPU is half of its time.
    """
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    token, slot = kept.nonzero(as_tuple=True)
    if len(token):
        parts = run(hidden[token], ids[token, slot].unsqueeze(1), gates[token, slot].unsqueeze(1))
        out.index_add_(0, token, parts.float())
    return out.to(hidden.dtype)


def compact(
    stock: Callable[..., Tensor], module: nn.Module, hidden: Tensor, ids: Tensor, gates: Tensor, mark: int
) -> Tensor:
    """hidden [T, d], ids and gates [T, k] → [T, d]. With nothing skipped it is the stock function, to the last bit."""
    if hidden.device.type != "cpu" or torch.compiler.is_compiling():  # a compiler cannot know the number of slots
        return stock(module, hidden, ids, gates)
    kept = ids != mark
    with _no_sentinels(module):
        if bool(kept.all()):
            return stock(module, hidden, ids, gates)
        return kept_alone(partial(stock, module), hidden, ids, gates, kept)


@contextmanager
def _no_sentinels(module: nn.Module) -> Iterator[None]:
    """The stock function need not mask rows of skipped slots where none are left."""
    before = getattr(module, SENTINELS, None)
    if before is None:  # transformers before 5.18 masks always
        yield
        return
    setattr(module, SENTINELS, False)
    try:
        yield
    finally:
        setattr(module, SENTINELS, before)
