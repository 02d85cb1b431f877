"""Two collectives that vLLM's CPU build lacks and data parallelism needs; a plugin of the tests, found by its entry point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def install(folder: Path) -> str:
    """A folder for PYTHONPATH in which this plugin looks installed."""
    found = folder / "cpu_collectives-0.0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-collectives\nVersion: 0.0\n")
    (found / "entry_points.txt").write_text("[vllm.general_plugins]\ncollectives = serving_collectives:register\n")
    return str(folder)


def register() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Rows of all ranks, `sizes` of each."""
    if isinstance(input_, list):
        return [all_gatherv(self, part, dim, sizes) for part in input_]
    sizes = sizes or [input_.shape[0]] * self.world_size
    mine = torch.zeros(max(sizes), *input_.shape[1:], dtype=input_.dtype)
    mine[: len(input_)] = input_
    every = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(every, mine, group=self.cpu_group)
    return torch.cat([rows[:size] for rows, size in zip(every, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: Tensor, dim: int = 0, sizes: list[int] | None = None) -> Tensor:
    """This rank's rows of the sum."""
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.clone()
    dist.all_reduce(total, group=self.cpu_group)
    return total.split(sizes)[self.rank_in_group]
