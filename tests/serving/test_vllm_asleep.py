"""vLLM's sleep mode: what we keep on the device is not touched meanwhile, and is whole when the engine is awake."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_parts import FOUND, step

from ace_moe.engines.vllm import skipping
from ace_moe.engines.vllm.asleep import hook_sleep
from ace_moe.engines.vllm.control import ASLEEP, AceWorker


class Worker:
    """vLLM's, by its signatures; level 2 leaves memory that nobody has kept, here with what could do most harm in it."""

    vllm_config: Any

    def sleep(self, level: int = 1) -> None:
        own = skipping.find(self.vllm_config)
        for tensor in [] if own is None else [own.classes.buffer, *own.runtime.tensors()]:
            tensor.fill_(101)

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass


hook_sleep(Worker, skipping.find)


class Mixed(AceWorker, Worker):
    """As vLLM mixes them, with a place among ranks."""

    def __init__(self, config: Any):
        parallel = SimpleNamespace(tensor_parallel_size=1, rank=0, data_parallel_rank=3)
        self.vllm_config = SimpleNamespace(**vars(config) | {"parallel_config": parallel})


@pytest.mark.parametrize("tags", [[None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]])
def test_a_sleeping_engine_keeps_what_it_had(configured: Callable[..., Any], tags: list[list[str] | None]) -> None:
    """A scrape of /metrics is answered meanwhile; a budget changed there would be lost, and is refused."""
    config = configured()
    worker, own = Mixed(config), skipping.find(config)
    assert own is not None
    for n in range(6):
        own.add(n, f"model.layers.{n}", FOUND)
    own.change(threshold=[0.1, 0.2])
    own.runtime.state.set(own.runtime.state.tau, torch.full_like(own.runtime.state.target, 0.3))
    own.runtime.track()
    own.classes.mark(step([4], 9, 4))
    own.runtime.layers["0"].counts.fill_(7)
    tensors = [own.classes.buffer, *own.runtime.tensors()]
    before, report = [t.clone() for t in tensors], worker.ace_report()
    worker.sleep(level=2)
    for tag in tags:
        assert worker.ace_report() == report and report["data_rank"] == 3
        assert worker.ace_set(skip=0.0) == worker.ace_reset() == {"error": ASLEEP}
        assert not any(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
        worker.wake_up(tag)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    assert worker.ace_report() == report and "error" not in worker.ace_reset()


def test_an_engine_without_skipping_sleeps_as_ever() -> None:
    worker = Worker()
    worker.vllm_config = SimpleNamespace(additional_config={})
    assert worker.sleep(2) is worker.wake_up(["weights"]) is worker.wake_up() is None
