"""Steering and watching a running engine: RPCs of every worker, and how their answers become one report."""

from __future__ import annotations

import warnings
from typing import Any

from ...budget import Budget, BudgetLike
from ...decider import Part, merge
from ...errors import AceError, IntegrationError
from .skipping import find

OFF = "Skipping is not configured in this server. Start it with `ace serve`, or with an `ace` part in --additional-config."
NOTICES = "notices"  # in a reply: what a budget is that was asked for, such as interpolated
PLAN = "plan"  # in a reply: sha256 of the plan file that the worker read
Reply = dict[str, Any]


class AceWorker:
    """vLLM mixes this into its workers (`--worker-extension-cls`); each method is a `collective_rpc`.

    An error comes back as a value: raised in a worker, it would look like a broken engine.
    """

    vllm_config: Any

    def ace_report(self) -> Reply:
        skipping = find(self.vllm_config)
        if skipping is None:
            return {"error": OFF}
        return {**skipping.part(**_place(self.vllm_config)).to_json(), PLAN: skipping.settings.plan_sha256}

    def ace_set(
        self,
        skip: BudgetLike | None = None,
        threshold: float | list[float] | None = None,
        restore: bool | None = None,
        reset: bool = False,
        workload: str | None = None,
    ) -> Reply:
        """Change what is skipped, and then reset counters: all of it or nothing. Notices come with the reply."""
        skipping = find(self.vllm_config)
        if skipping is None:
            return {"error": OFF}
        try:
            with warnings.catch_warnings(record=True) as noted:
                warnings.simplefilter("always")
                skipping.change(None if skip is None else Budget.parse(skip), threshold, restore, workload)
        except AceError as error:
            return {"error": str(error)}
        if reset:
            skipping.reset()
        return {**self.ace_report(), NOTICES: list(dict.fromkeys(str(note.message) for note in noted))}

    def ace_reset(self) -> Reply:
        skipping = find(self.vllm_config)
        if skipping is None:
            return {"error": OFF}
        skipping.reset()
        return self.ace_report()


def _place(vllm_config: Any) -> dict[str, int]:
    """The ranks of this worker: those that see the same tokens count the same slots."""
    parallel = vllm_config.parallel_config
    tensor = parallel.tensor_parallel_size
    return {"tensor_rank": parallel.rank % tensor, "data_rank": parallel.data_parallel_rank}


def together(replies: Any) -> Reply:
    """One report from the replies of all workers, with what they have to say about it."""
    notices = [note for reply in replies for note in reply.get(NOTICES, ())]
    report = merge(_parts(replies))
    return {**report, NOTICES: list(dict.fromkeys(notices))} if notices else report


def by_engine(replies: Any) -> dict[str, Reply]:
    """A report for each engine of a data-parallel server, under the number vLLM's metrics have for it."""
    parts = _parts(replies)
    ranks = sorted({part.data_rank for part in parts})
    return {str(rank): merge([part for part in parts if part.data_rank == rank]) for rank in ranks}


def _parts(replies: Any) -> list[Part]:
    return [Part.from_json({k: v for k, v in reply.items() if k not in (NOTICES, PLAN)}) for reply in replies]


def check_start(replies: Any, sha256: str | None) -> None:
    """Refuse a server some of whose workers do not skip, or read another plan than a front end with this hash.

    Workers of one front end are given its hash; those of further nodes, and further front ends, read files of their own.
    """
    _parts(replies)
    if len({reply.get(PLAN) for reply in replies} | ({sha256} - {None})) > 1:
        raise IntegrationError(
            "The processes of this server read different plans: the file differs between nodes, or was changed while they "
            "started. Start the server again with one plan everywhere."
        )


# ---- the offline engine -----------------------------------------------------------------------------------------


def report(llm: Any) -> Reply:
    """Report what an offline `vllm.LLM` skipped since the last reset."""
    return together(llm.collective_rpc("ace_report"))


def set_skip(llm: Any, skip: BudgetLike) -> Reply:
    """Give an offline `vllm.LLM` another budget, at once."""
    return change(llm, skip=Budget.parse(skip).to_json())


def set_threshold(llm: Any, threshold: float | list[float]) -> Reply:
    """Set τ itself, for all phases or as [prefill, decode]."""
    return change(llm, threshold=threshold)


def set_restore(llm: Any, on: bool) -> Reply:
    """Restore slots whose expert is read anyway, or no longer."""
    return change(llm, restore=on)


def reset(llm: Any) -> None:
    """Set counters to zero."""
    together(llm.collective_rpc("ace_reset"))


def change(llm: Any, **wanted: Any) -> Reply:
    """Change what an offline `vllm.LLM` skips; arguments are those of `ace_set`."""
    return together(llm.collective_rpc("ace_set", kwargs=wanted))
