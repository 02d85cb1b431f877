"""A trace in the making: steps are added until it has the tokens it was asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...plan import Fingerprint
from .record import Skip, Slots, Trace


class Collector:
    """About four bytes a slot until it is written; what comes after `most` tokens is left out."""

    def __init__(self, fingerprint: Fingerprint, most: int, model: str = ""):
        self.fingerprint, self.most, self.model = fingerprint, most, model
        self.tokens = 0
        self._layers: dict[str, list[Slots]] = {key: [] for key in fingerprint.structure}
        self._tokens: list[Tensor] = []  # [3, T]: request, phase, budget
        self._skips: list[Skip] = []

    @property
    def full(self) -> bool:
        return self.tokens >= self.most

    def budget(self, skip: Skip) -> int:
        """The number a budget goes by."""
        if skip not in self._skips:
            self._skips.append(skip)
        return self._skips.index(skip)

    def add(self, tokens: Tensor, layers: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """tokens [3, T]: request, phase and budget's number; by layer ids and gates [T, k]."""
        room = min(self.most - self.tokens, tokens.shape[1])
        for key, (ids, gates) in layers.items():
            self._layers[key].append(Slots.of(ids[:room].cpu(), gates[:room].cpu()))
        self._tokens.append(tokens[:, :room].int())
        self.tokens += room

    def trace(self) -> Trace:
        requests, phases, budgets = torch.cat(self._tokens, 1)
        layers = {key: Slots(*map(torch.cat, zip(*parts, strict=True))) for key, parts in self._layers.items()}
        facts = (tuple(self._skips), self.fingerprint, self.model)
        return Trace(layers, requests, phases.byte(), budgets.byte(), *facts).check()
