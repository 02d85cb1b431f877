"""A trace of a text: every window is a request, and all its tokens a prompt's."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ... import progress
from ...decider import Deciders
from ...decider.rows import PHASES
from ...engines.traces.collector import Collector
from ...engines.traces.record import Skip, Trace
from ...policies import Decision, Routing
from ...text import Windows


@torch.inference_mode()
def read(model: PreTrainedModel, deciders: Deciders, windows: Windows, skip: Skip = 0.0, batch: int = 1) -> Trace:
    """Trace the routers while the model, to which the deciders are attached, reads the text under this budget."""
    collector = Collector(deciders.plan.fingerprint, windows.ids.numel(), deciders.plan.model)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    phase, budget = PHASES.index("prefill"), collector.budget(skip)

    def see(key: str, routing: Routing, protected: Tensor | None, decision: Decision) -> None:
        seen[key] = routing.ids, routing.gates

    with deciders.observed(lambda key: partial(see, key)), progress.task("windows", len(windows.ids)) as task:
        for number, ids in enumerate(windows.batches(batch)):
            model(input_ids=ids.to(model.device), use_cache=False)
            requests = torch.arange(number * batch, number * batch + len(ids)).repeat_interleave(ids.shape[1])
            tokens = torch.stack([requests, torch.full_like(requests, phase), torch.full_like(requests, budget)])
            collector.add(tokens, seen)
            task.advance(len(ids))
    return collector.trace()
