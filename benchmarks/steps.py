"""Time on the device of what vLLM launches, without the host: captured graphs of decode steps, whole passes of prompts."""

from __future__ import annotations

import os
from typing import Any

import torch

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions below go to the worker by their names


def on_device(llm: Any, call: Any) -> tuple[Any, dict[str, list[float]]]:
    """What the call gave, and milliseconds of each replay of a graph and of each pass outside of graphs meanwhile."""
    llm.collective_rpc(watch)
    given = call()
    return given, llm.collective_rpc(read)[0]


def watch(worker: Any) -> None:
    worker.seen = {"replays": [], "passes": []}
    if torch.cuda.is_available():
        passes, replays = worker.seen["passes"], worker.seen["replays"]
        worker.unwatch = [_watch_passes(worker.model_runner.model, passes), _watch_replays(replays)]


def read(worker: Any) -> dict[str, list[float]]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        for end in worker.unwatch:
            end()
    return {name: [first.elapsed_time(last) for first, last in pairs] for name, pairs in worker.seen.items()}


def _event() -> Any:
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


def _watch_passes(model: Any, passes: list[Any]) -> Any:
    began: list[Any] = []
    first = model.register_forward_pre_hook(lambda *_: began.append(_event()))
    last = model.register_forward_hook(lambda *_: passes.append((began.pop(), _event())))
    return lambda: (first.remove(), last.remove())


def _watch_replays(replays: list[Any]) -> Any:
    stock = torch.cuda.CUDAGraph.replay

    def replay(self: Any) -> None:
        first = _event()
        stock(self)
        replays.append((first, _event()))

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
    return lambda: setattr(torch.cuda.CUDAGraph, "replay", stock)
