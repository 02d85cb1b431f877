"""Perplexity by protocol as a run that can be stopped: losses and slot counts are kept after every batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...ace import ACE
from ...scoring.statistics import perplexity_interval
from .perplexity import Protocol, measure
from .store import open_results, write_json
from .subject import identity_of

KIND = "perplexity"
Results = dict[str, Any]


def run(
    model: PreTrainedModel,
    ace: ACE | None,
    protocol: Protocol,
    windows: Sequence[Tensor],
    path: Path | None,
    facts: Results,
    batch: int = 1,
) -> Results:
    """The protocol's perplexity with its interval and, with a plan attached, the realised ratio; into `path` if given."""
    results: Results = open_results(path, KIND, identity(protocol, windows, facts)) if path else {"kind": KIND}
    results |= facts
    known = results.get("nll", [])
    if ace is not None:
        ace.reset()
        ace.deciders.continue_counts(results.get("counts", {}))

    def save(nll: list[float]) -> None:
        counts = {} if ace is None else ace.deciders.counts()
        results["nll"], results["counts"] = list(nll), {key: c.tolist() for key, c in counts.items()}
        if path is not None:
            write_json(path, results)

    score = measure(model, protocol, windows, batch, known, save)
    interval = perplexity_interval(score)
    results |= {"perplexity": score.perplexity, "interval": [interval.low, interval.high], "windows": len(windows)}
    results |= {"targets": score.targets, "ace": None if ace is None else ace.report()}
    if path is not None:
        write_json(path, results)
    return results


def setup_of(model: PreTrainedModel, ace: ACE | None, skip: float, batch: int) -> Results:
    """The model, its precision and what is skipped. Batches are part of it: they change rounding."""
    settings = {} if ace is None else {**ace.policy.settings, "thresholds": ace.thresholds.tolist()}
    return {**identity_of(model), "skip": skip, "batch": batch, **settings}


def identity(protocol: Protocol, windows: Sequence[Tensor], facts: Results) -> Results:
    """What must be the same for a file to be continued."""
    text = hashlib.sha256(torch.cat(list(windows)).numpy().tobytes()).hexdigest()
    return {"protocol": protocol.name, "text": text, "windows": len(windows), **facts["setup"]}
