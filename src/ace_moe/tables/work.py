"""Layers over processes: each opens the checkpoint for itself, takes the next layer, writes its part."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import progress
from ..checkpoint import MoEModel, Site
from ..checkpoint.hub import Repository, StreamedSource
from ..errors import OptionError
from ..plan import Plan
from .parts import Parts


@dataclass(frozen=True)
class Job:
    """How the work is done. `devices` are shared out over workers; `layers` are (first, one past the last) of MoE layers."""

    model: str
    output: Path
    stream: bool = False
    workers: int = 1
    devices: tuple[str, ...] = ("cpu",)
    layers: tuple[int, int] | None = None
    commit: str | None = None

    def open(self, folder: Path) -> MoEModel:
        """The checkpoint; of a repository that is streamed, into a folder of this process alone."""
        return MoEModel.open(self.model, Repository(self.model, folder, self.commit) if self.stream else None)


def parse_layers(text: str | None) -> tuple[int, int] | None:
    """ "0:20": MoE layers 0 to 19."""
    if text is None:
        return None
    try:
        first, last = (int(part) for part in text.split(":"))
        if not 0 <= first < last:
            raise ValueError
        return first, last
    except ValueError:
        raise OptionError(f"Layers are given as first:past-the-last, such as 0:20; {text!r} is not.") from None


def build_in_parts(job: Job, say: Callable[[str], None] = lambda line: None) -> tuple[Plan | None, list[Site]]:
    """The plan, or None and the layers that other machines have still to make. Layers that are done are not made again."""
    parts = Parts(job.output)
    with tempfile.TemporaryDirectory(prefix="ace-") as folder:
        moe = job.open(Path(folder))
        commit = moe.source.repository.commit if isinstance(moe.source, StreamedSource) else None
        missing = parts.missing(moe)
        wanted = moe.sites[slice(*job.layers)] if job.layers else moe.sites
        todo = [site for site in missing if site in wanted]
        if estimated := estimate(moe, todo, job.workers):
            say(estimated)
        _work(replace(job, commit=commit), moe, todo, len(wanted), parts)
        missing = parts.missing(moe)
        return (None, missing) if missing else (parts.plan(moe), [])


def estimate(moe: MoEModel, todo: Sequence[Site], workers: int) -> str:
    """What is about to be fetched, in words; nothing where all of it is on this machine."""
    if not isinstance(moe.source, StreamedSource) or not todo:
        return ""
    sizes = moe.source.sizes(todo)
    most = max(sizes.values())
    return (
        f"{len(todo)} layers in {len(sizes)} shards, {sum(sizes.values()) / 1e9:.1f} GB to fetch, at most "
        f"{workers * most / 1e9:.1f} GB of them on disk at a time"
    )


def _work(job: Job, moe: MoEModel, todo: Sequence[Site], total: int, parts: Parts) -> None:
    with progress.task("layers", total, total - len(todo)) as task:
        if job.workers == 1:
            parts.make(moe, todo, job.devices[0], lambda key: task.advance())
        elif todo:
            _share_out(job, [site.key for site in todo], task)


def _share_out(job: Job, keys: list[str], task: progress.Task) -> None:
    """Runs of neighbouring layers go to one worker: they lie in the same shards."""
    context = multiprocessing.get_context("spawn")
    count = min(job.workers, len(keys))
    runs = [keys[i * len(keys) // count : (i + 1) * len(keys) // count] for i in range(count)]
    with context.Manager() as manager, ProcessPoolExecutor(count, mp_context=context) as pool:
        done: Any = manager.Queue()
        left = {pool.submit(_run, job, run, n, count, done) for n, run in enumerate(runs)}
        while left:
            ended, left = wait(left, timeout=0.2, return_when=FIRST_COMPLETED)
            while not done.empty():
                done.get()
                task.advance()
            for future in ended:
                future.result()


def _run(job: Job, keys: list[str], number: int, count: int, done: Any) -> None:
    """In a worker: these layers, one after another."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    with tempfile.TemporaryDirectory(prefix="ace-", ignore_cleanup_errors=True) as folder:
        moe = job.open(Path(folder))
        todo = [site for site in moe.sites if site.key in keys]
        Parts(job.output).make(moe, todo, job.devices[number % len(job.devices)], done.put)
