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
from .formats import Header

Rows = Callable[[str, int, range], Tensor | None]  # (stacked parameter [E, a, b], expert, rows) → [rows, b]
Part = tuple[Any, tuple[int, ...], tuple[int, ...]]  # a slice of a file, its shape, and the index in front of its rows


class Shards(ExitStack):
    """Tensors by their key on disk. A file is opened when the first of its tensors is asked for."""

    def __init__(self, files: Mapping[str, Path]):
        super().__init__()
        self.files, self._handles = files, dict[Path, safe_open]()

    def slice(self, key: str) -> Any:
        """The tensor as something to index: only what is asked for is read."""
        path = self.files[key]
        if path not in self._handles:
            self._handles[path] = self.enter_context(open_shard(path))
        handle = self._handles[path]
        part = _slice(handle, key, path)
        return handle.get_tensor(key).view(torch.uint8) if part.get_dtype() == "F4" else part  # F4 is read whole or not


def _slice(handle: safe_open, key: str, path: Path) -> Any:
    try:
        return handle.get_slice(key)
    except SafetensorError as error:  # the index promised it
        raise _unreadable(path, error) from error


def stacked_rows(parts: Sequence[Part], shape: tuple[int, ...], wanted: range) -> Tensor | None:
    """Read rows of a matrix [a, b] whose parts lie above each other; None if they do not make up such a matrix."""
    sizes = [size[len(index) :] for _, size, index in parts]
    if any(len(size) != 2 or size[1] != shape[1] for size in sizes) or sum(a for a, *_ in sizes) != shape[0]:
        return None
    starts, rows = list(accumulate((a for a, _ in sizes), initial=0)), []
    for number in wanted:
        place = bisect_right(starts, number) - 1
        part, _, index = parts[place]
        where = (*index, number - starts[place])
        rows.append(part[where])
    return torch.stack(rows)


def read_headers(files: Mapping[str, Path]) -> tuple[dict[str, Header], dict[str, str]]:
    """Read every tensor's dtype and shape, and what files say of themselves; no tensor is read."""
    headers, metadata = {}, dict[str, str]()
    by_file: dict[Path, list[str]] = {}
    for key, path in files.items():
        by_file.setdefault(path, []).append(key)
    for path, keys in by_file.items():
        with open_shard(path) as handle:
            metadata |= handle.metadata() or {}
            for key in keys:
                part = _slice(handle, key, path)
                headers[key] = Header(part.get_dtype(), tuple(part.get_shape()))
    return headers, metadata


def open_shard(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read ({brief(error)}). It is truncated or damaged; download it again.")
