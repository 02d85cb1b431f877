"""Steering and watching a running engine: RPCs of every worker, and how their answers become one report."""

from __future__ import annotations

from typing import Any

from ...errors import AceError, OptionError
from ...runtime import Part, merge
from ...runtime.settings import Skip
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
        return {"error": OFF} if skipping is None else skipping.part(**_place(self.vllm_config)).to_json()

    def ace_set(
        self, skip: Skip | None = None, threshold: float | list[float] | None = None, restore: bool | None = None
    ) -> Reply:
        skipping = find(self.vllm_config)
        if skipping is None:
            return {"error": OFF}
        try:
            _set(skipping, skip, threshold, restore)
        except AceError as error:
            return {"error": str(error)}
        return self.ace_report()

    def ace_reset(self) -> Reply:
        skipping = find(self.vllm_config)
        if skipping is None:
            return {"error": OFF}
        skipping.reset()
        return self.ace_report()


def _set(skipping: Skipping, skip: Skip | None, threshold: float | list[float] | None, restore: bool | None) -> None:
    """All of it or nothing."""
    if (skip is None) == (threshold is None) and (restore is None or skip is not None):
        raise OptionError('Give either a budget ("skip") or a threshold, not both and not none.')
    before = skipping.runtime.state.restores
    if restore is not None:
        skipping.set_restore(restore)
    try:
        if skip is not None:
            skipping.set_skip(skip)
        elif threshold is not None:
            skipping.set_threshold(threshold)
    except AceError:
        skipping.set_restore(before)
        raise


def _place(vllm_config: Any) -> dict[str, int]:
    """Where this worker stands: ranks that see the same tokens count the same slots."""
    parallel = vllm_config.parallel_config
    tensor = parallel.tensor_parallel_size
    return {"tensor_rank": parallel.rank % tensor, "data_rank": parallel.data_parallel_rank}


def together(replies: Any) -> Reply:
    """One report from the replies of all workers."""
    return merge([Part.from_json(reply) for reply in replies])


# ---- the offline engine -----------------------------------------------------------------------------------------


def report(llm: Any) -> Reply:
    """What an offline `vllm.LLM` skipped since the last reset."""
    return together(llm.collective_rpc("ace_report"))


def set_skip(llm: Any, skip: Skip) -> Reply:
    """Another budget for an offline `vllm.LLM`, at once."""
    return _change(llm, skip=skip)


def set_threshold(llm: Any, threshold: float | list[float]) -> Reply:
    return _change(llm, threshold=threshold)


def set_restore(llm: Any, on: bool) -> Reply:
    """Restore slots whose expert is read anyway, or no longer."""
    return _change(llm, restore=on)


def _change(llm: Any, **wanted: Any) -> Reply:
    """A new epoch of the prefix cache first: what was cached under the old budget is not read under the new."""
    core = llm.llm_engine.engine_core
    if hasattr(core, "engine_core"):  # in this process
        core.engine_core.ace_epoch()
    else:
        core.call_utility("ace_epoch")
    return together(llm.collective_rpc("ace_set", kwargs=wanted))


def reset(llm: Any) -> None:
    together(llm.collective_rpc("ace_reset"))
