"""What thresholds do to a model: its predictions at each, held against the unskipped model's, on a part of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import progress
from ..fidelity import Fidelity, compare
from ..plan import Plan
from ..policies import Policy
from ..scoring import predict
from ..statistics import token_interval
from ..text import Windows
from .passes import Passes, attached

MOST = 16  # windows: enough for an interval, few beside the passes that map


@torch.inference_mode()
def judge(
    model: PreTrainedModel, plan: Plan, policy: Policy, windows: Windows, taus: Sequence[float], batch: int = 1
) -> list[dict[str, Any]]:
    """KL, agreement and acceptance at each τ with their intervals; one batch of logits is in memory at a time."""
    part, found = windows.ids[:MOST], [Fidelity() for _ in taus]
    with attached(model, plan, policy) as runtime, progress.task("fidelity", len(part)) as task:
        aligned = Passes(runtime, model, windows, batch)
        for ids in part.split(batch):
            with runtime.aside():
                whole = predict(model, ids)
            for tau, sums in zip(taus, found, strict=True):
                runtime.align(aligned.statistics(tau))
                runtime.set(torch.full((3,), tau))
                sums.add(compare(whole, predict(model, ids)))
            task.advance(len(ids))
    return [_means(sums, part.shape[1] - 1) for sums in found]


def _means(sums: Fidelity, tokens: int) -> dict[str, Any]:
    weights = [tokens] * len(sums.kl)
    means = {name: asdict(token_interval(values, weights)) for name, values in vars(sums).items()}
    return {**means, "windows": len(weights), "tokens": sum(weights)}
