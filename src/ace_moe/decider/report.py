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
NOT_COUNTED, COUNTED = "not counted", "counted, if there was any: some passes came without a mask that tells it apart"


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
    reads: dict[str, list[list[int]]] = field(default_factory=dict)  # by layer: [2, 2] experts read, asked for
    restores: bool = False
    budgets: list[str] = field(default_factory=list)  # of requests, in the order of their rows

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
    own = [part for part in parts if part.tensor_rank == 0 or part.split]
    counts, first = _added([part.counts for part in own]), parts[0]
    total = sum(counts.values(), torch.zeros(len(first.tau), 3, dtype=torch.int64))
    whole = _entry(total.sum(0))
    return {
        "skip": first.skip,
        "threshold": {phase: first.tau[row_of(phase)] for phase in PHASES},
        "realised": whole["realised"],
        "skipped": whole["skipped"],
        "restore": first.restores,
        **_reads(_added([part.reads for part in own])),
        **_phases(total),
        **_requests(first.budgets, total),
        "layers": {key: _phases(counts[key]) for key in sorted(counts, key=lambda key: (len(key), key))},
        "executors": _summary({key: way for part in parts for key, way in part.executors.items()}),
        "refused": _reasons(parts),
        "padding": next((p.padding for p in parts if p.padding != NOT_COUNTED), NOT_COUNTED),
    }


def _added(given: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """By layer, over all parts."""
    out: dict[str, Tensor] = {}
    for part in given:
        for key, values in part.items():
            found = torch.tensor(values, dtype=torch.int64)
            out[key] = out[key] + found if key in out else found
    return out


def ratio(counts: Tensor) -> float:
    """Fraction of routed slots that was not run; counts [3]."""
    routed, kept, restored = counts.tolist()
    return _left_out(kept + restored, routed)


def _left_out(ran: int, routed: int) -> float:
    return 1 - ran / routed if routed else 0.0


def _entry(counts: Tensor) -> dict[str, Any]:
    """`kept` by the rule and `restored` slots ran; `skipped` is the rule's ratio, `realised` what was not run."""
    routed, kept, restored = counts.tolist()
    ratios = {"realised": ratio(counts), "skipped": _left_out(kept, routed)}
    return {"routed": routed, "kept": kept, "restored": restored, **ratios}


def _phases(counts: Tensor) -> dict[str, Any]:
    """counts [R, 3], every budget's rows added up."""
    by_phase = {phase: counts[row_of(phase) :: len(PHASES)].sum(0) for phase in PHASES}
    return {phase: _entry(c) for phase, c in by_phase.items() if phase in ALWAYS or c[0] > 0}


def _requests(budgets: Sequence[str], counts: Tensor) -> dict[str, Any]:
    """What requests with budgets of their own got, by budget."""
    rows = {b: counts[row_of("prefill", i) : row_of("prefill", i + 1)] for i, b in enumerate(budgets, 1)}
    alone = torch.zeros(1, 3, dtype=torch.int64)
    return {"requests": {b: _phases(torch.cat([alone, c])) for b, c in rows.items()}} if rows else {}


def _reads(by_layer: Mapping[str, Tensor]) -> dict[str, Any]:
    """Experts read of those the router asked for, over layers and steps, where they were counted."""
    if not by_layer:
        return {}
    total = sum(by_layer.values(), torch.zeros(2, 2, dtype=torch.int64)).tolist()
    names = ("generated", "with prompts")
    return {"reads": {n: {"read": r, "asked": a, "ratio": r / a} for n, (r, a) in zip(names, total, strict=True) if a}}


def _summary(executors: Mapping[str, str]) -> dict[str, int]:
    """How many layers run in which way."""
    ways = list(executors.values())
    return {way: ways.count(way) for way in dict.fromkeys(ways)}


def _reasons(parts: Sequence[Part]) -> dict[str, str]:
    """Why an executor was not taken; the first layer's reason stands for layers that say the same."""
    return {name: why for part in parts for reasons in part.refused.values() for name, why in reasons.items()}
