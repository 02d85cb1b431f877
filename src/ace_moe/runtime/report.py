"""One report for all engines: what was routed, what was kept, what was run, by phase and by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import IntegrationError
from .rows import PHASES, row_of

ALWAYS = ("prefill", "decode")  # phases a report has also before anything was counted
NOT_COUNTED, COUNTED = "not counted", "counted: some passes came without a mask that tells it apart"


@dataclass(frozen=True)
class Part:
    """What one process knows: plain values, so that it can travel."""

    counts: dict[str, list[list[int]]]  # by layer: [R, 3] routed, kept by the rule, restored
    tau: list[float]  # [R]
    skip: Any = None  # the budget that was asked for; None where only a threshold was set
    executors: dict[str, str] = field(default_factory=dict)  # by layer
    refused: dict[str, dict[str, str]] = field(default_factory=dict)  # by layer: executors that were not taken, and why
    padding: str = NOT_COUNTED
    tensor_rank: int = 0  # ranks that see the same tokens count the same slots …
    data_rank: int = 0
    split: bool = False  # … unless each sees its own part of them

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, reply: Mapping[str, Any]) -> Part:
        """From an engine's worker, whose errors come as values."""
        if "error" in reply:
            raise IntegrationError(reply["error"])
        return cls(**reply)


def merge(parts: Sequence[Part]) -> dict[str, Any]:
    """One report. Tensor-parallel ranks that count the same slots count once."""
    counts: dict[str, Tensor] = {}
    executors: dict[str, str] = {}
    for part in parts:
        executors |= part.executors
        if part.tensor_rank == 0 or part.split:
            for key, values in part.counts.items():
                found = torch.tensor(values, dtype=torch.int64)
                counts[key] = counts[key] + found if key in counts else found
    first = parts[0]
    total = sum(counts.values(), torch.zeros(len(first.tau), 3, dtype=torch.int64))
    return {
        "skip": first.skip,
        "threshold": {phase: first.tau[row_of(phase)] for phase in PHASES},
        "realised": _entry(total.sum(0))["realised"],
        **_phases(total),
        "layers": {key: _phases(counts[key]) for key in sorted(counts, key=lambda key: (len(key), key))},
        "executors": _summary(executors),
        "refused": _reasons(parts),
        "padding": next((p.padding for p in parts if p.padding != NOT_COUNTED), NOT_COUNTED),
    }


def ratio(counts: Tensor) -> float:
    """Fraction of routed slots that was not run; counts [3]."""
    routed, kept, restored = counts.tolist()
    return 1 - (kept + restored) / routed if routed else 0.0


def _entry(counts: Tensor) -> dict[str, Any]:
    routed, kept, restored = counts.tolist()
    return {"routed": routed, "kept": kept + restored, "realised": ratio(counts)}


def _phases(counts: Tensor) -> dict[str, Any]:
    """counts [R, 3], every budget's rows added up."""
    by_phase = {phase: counts[row_of(phase) :: len(PHASES)].sum(0) for phase in PHASES}
    return {phase: _entry(c) for phase, c in by_phase.items() if phase in ALWAYS or c[0] > 0}


def _summary(executors: Mapping[str, str]) -> dict[str, int]:
    """How many layers run in which way."""
    ways = list(executors.values())
    return {way: ways.count(way) for way in dict.fromkeys(ways)}


def _reasons(parts: Sequence[Part]) -> dict[str, str]:
    """Why an executor was not taken; the first layer's reason stands for layers that say the same."""
    return {name: why for part in parts for reasons in part.refused.values() for name, why in reasons.items()}
