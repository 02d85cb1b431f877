"""The safetensors files of a checkpoint, opened once and closed together, and single rows of experts out of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, brief

Rows = Callable[[str, int, range], Tensor | None]  # (stacked parameter [E, a, b], expert, rows) → [rows, b]
Part = tuple[Any, tuple[int, ...]]  # a slice of a file, and the index in front of its rows


class Shards:
    """Tensors by their key on disk. A file is opened when the first of its tensors is asked for."""

    def __init__(self, files: Mapping[str, Path]):
        self.files, self._handles, self._stack = files, dict[Path, safe_open](), ExitStack()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def get(self, key: str) -> Tensor:
        return self._ask(key, lambda handle: handle.get_tensor(key))

    def slice(self, key: str) -> Any:
        """The tensor as something to index: only what is asked for is read."""
        return self._ask(key, lambda handle: handle.get_slice(key))

    def _ask(self, key: str, question: Callable[[safe_open], Any]) -> Any:
        path = self.files[key]
        if path not in self._handles:
            self._handles[path] = self._stack.enter_context(open_shard(path))
        try:
            return question(self._handles[path])
        except SafetensorError as error:  # the index promised it
            raise _unreadable(path, error) from error


def stacked_rows(parts: Sequence[Part], shape: tuple[int, ...], wanted: range) -> Tensor | None:
    """Rows of a matrix [a, b] whose parts lie above each other; None if they do not make up such a matrix."""
    sizes = [tuple(part.get_shape())[len(index) :] for part, index in parts]
    if (
        not sizes
        or any(len(size) != 2 or size[1] != shape[1] for size in sizes)
        or sum(a for a, _ in sizes) != shape[0]
    ):
        return None
    starts = list(accumulate((a for a, _ in sizes), initial=0))

    def row(number: int) -> Tensor:
        place = bisect_right(starts, number) - 1
        part, index = parts[place]
        where = (*index, number - starts[place])
        return part[where]

    return torch.stack([row(number) for number in wanted])


def open_shard(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read ({brief(error)}). It is truncated or damaged; download it again.")
