"""A trace: ids and gates as the routers gave them, with what each token was; no token, no text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import TraceError
from ...plan import Fingerprint

Skip = float | Mapping[str, float] | None  # None: no budget but a threshold was set


class Slots(NamedTuple):
    """One layer's slots in the order of their experts: ids [T, k] int16, gates [T, k] bfloat16."""

    ids: Tensor
    gates: Tensor

    @classmethod
    def of(cls, ids: Tensor, gates: Tensor) -> Slots:
        """Decisions do not depend on the order of slots, and ascending ids take less room."""
        ids, order = ids.sort(-1)
        return cls(ids.short(), gates.gather(-1, order).bfloat16())


@dataclass(frozen=True, eq=False)
class Trace:
    """T tokens of requests, under budgets.

    `budgets` counts in `skips`, what was asked of the model while it ran. Without gates (a server's returned experts) the
    places of slots stand in for them, and the model is not known.
    """

    layers: dict[str, Slots]
    requests: Tensor  # [T] int32
    phases: Tensor  # [T] uint8, of budget.PHASES
    budgets: Tensor  # [T] uint8
    skips: tuple[Skip, ...]
    fingerprint: Fingerprint | None
    model: str = ""
    has_gates: bool = True

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def top_k(self) -> int:
        """Slots of a token (the fewest, where layers differ)."""
        return min(slots.ids.shape[-1] for slots in self.layers.values())

    def experts(self, key: str) -> int:
        """How many experts the layer has; where the model is not known, as many as were seen."""
        if self.fingerprint is not None:
            return int(self.fingerprint.structure[key]["experts"])
        return int(self.layers[key].ids.max()) + 1

    def check(self) -> Trace:
        """This trace, if its parts fit together and every slot is one of an expert."""
        for key, (ids, gates) in self.layers.items():
            whole = ids.shape == gates.shape and len(ids) == len(self) > 0 and not gates.float().isnan().any()
            if not whole or int(ids.min()) < 0 or int(ids.max()) >= self.experts(key):
                raise TraceError(f"layer {key} of the trace has slots of no expert. Trace again.")
        if int(self.budgets.max()) >= len(self.skips):
            raise TraceError("a token of the trace ran under a budget that the trace does not name. Trace again.")
        return self

    def shared(self) -> dict[str, int]:
        """How many tokens ran under each budget, in words."""
        counts = torch.bincount(self.budgets.long(), minlength=len(self.skips)).tolist()
        return {_said(skip): n for skip, n in zip(self.skips, counts, strict=True) if n}


def _said(skip: Skip) -> str:
    if skip is None:
        return "a threshold"
    if isinstance(skip, Mapping):
        return ", ".join(f"{phase} {budget:.0%}" for phase, budget in skip.items())
    return f"{skip:.0%}"
