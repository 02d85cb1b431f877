"""Steering and watching a running engine: RPCs of every worker, and how their answers become one report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...ace import Skip
from ...errors import AceError, BudgetError, IntegrationError, OptionError
from ...skipper import DECODE, PREFILL
from .skipping import Skipping, find

OFF = "Skipping is not configured in this server. Start it with `ace serve`, or with an `ace` part in --additional-config."
Reply = dict[str, Any]


class AceWorker:
    """vLLM mixes this into its workers (`--worker-extension-cls`); each method is a `collective_rpc`.

    An error comes back as a value: raised in a worker, it would look like a broken engine.
    """

    vllm_config: Any

    def ace_report(self) -> Reply:
        skipping = find(self.vllm_config)
        return {"error": OFF} if skipping is None else skipping.report() | _place(self.vllm_config)

    def ace_set(self, skip: Skip | None = None, threshold: float | list[float] | None = None) -> Reply:
        skipping = find(self.vllm_config)
        if skipping is None:
            return {"error": OFF}
        try:
            _set(skipping, skip, threshold)
        except AceError as error:
            return {"error": str(error)}
        return self.ace_report()

    def ace_reset(self) -> Reply:
        skipping = find(self.vllm_config)
        if skipping is None:
            return {"error": OFF}
        skipping.reset()
        return self.ace_report()


def _set(skipping: Skipping, skip: Skip | None, threshold: float | list[float] | None) -> None:
    if (skip is None) == (threshold is None):
        raise OptionError('Give either a budget ("skip") or a threshold, not both and not none.')
    if skip is not None:
        return skipping.set_skip(skip)
    try:
        value = torch.as_tensor(threshold, dtype=torch.float32).expand(2)
    except (TypeError, ValueError, RuntimeError):
        value = torch.full((2,), -1.0)
    if not (value >= 0).all() or not value.isfinite().all():
        raise BudgetError(
            f"A threshold is a number from 0 on, or one for prefill and one for decode; not {threshold!r}."
        )
    skipping.set_threshold(value)


def _place(vllm_config: Any) -> Reply:
    """Where this worker stands: ranks that see the same tokens count the same slots."""
    parallel = vllm_config.parallel_config
    tensor = parallel.tensor_parallel_size
    return {"tensor_rank": parallel.rank % tensor, "data_rank": parallel.data_parallel_rank}


# ---- one answer from many workers -------------------------------------------------------------------------------


def merge(replies: Sequence[Reply]) -> Reply:
    """One report, in the form of `ACE.report`. Tensor-parallel ranks that count the same slots count once."""
    for reply in replies:
        if "error" in reply:
            raise IntegrationError(reply["error"])
    counts: dict[str, torch.Tensor] = {}
    executors: dict[str, str] = {}
    for reply in replies:
        executors |= reply["executors"]
        if reply["tensor_rank"] == 0 or reply["split"]:
            for key, values in reply["counts"].items():
                counts[key] = counts.get(key, torch.zeros(2, 2, dtype=torch.int64)) + torch.tensor(values)
    total = sum(counts.values(), torch.zeros(2, 2, dtype=torch.int64))
    layers = sorted(counts, key=lambda key: (len(key), key))
    prefill, decode = replies[0]["thresholds"]
    return {
        "skip": replies[0]["skip"],
        "threshold": {"prefill": prefill, "decode": decode},
        "realised": _entry(total.sum(0))["realised"],
        **_phases(total),
        "layers": {key: _phases(counts[key]) for key in layers},
        "executors": _summary(executors),
    }


def _phases(counts: torch.Tensor) -> Reply:
    return {"prefill": _entry(counts[PREFILL]), "decode": _entry(counts[DECODE])}


def _entry(counts: torch.Tensor) -> Reply:
    routed, kept = counts.tolist()
    return {"routed": routed, "kept": kept, "realised": 1 - kept / routed if routed else 0.0}


def _summary(executors: Mapping[str, str]) -> dict[str, int]:
    """How many layers run in which way."""
    ways = list(executors.values())
    return {way: ways.count(way) for way in dict.fromkeys(ways)}


# ---- the offline engine -----------------------------------------------------------------------------------------


def report(llm: Any) -> Reply:
    """What an offline `vllm.LLM` skipped since the last reset."""
    return merge(llm.collective_rpc("ace_report"))


def set_skip(llm: Any, skip: Skip) -> Reply:
    """Another budget for an offline `vllm.LLM`, at once."""
    return merge(llm.collective_rpc("ace_set", kwargs={"skip": skip}))


def set_threshold(llm: Any, threshold: float | list[float]) -> Reply:
    return merge(llm.collective_rpc("ace_set", kwargs={"threshold": threshold}))


def reset(llm: Any) -> None:
    merge(llm.collective_rpc("ace_reset"))
