"""A sleeping engine: vLLM takes back the memory of its weights, and what we keep on the device lies there too.

Until it is awake nothing of ours there may be read or written, and from level 2 it comes back as whatever is found: vLLM
saves what the modules of its model hold, and ours are none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from torch import Tensor

from ...decider import Part

TAGS = ("weights", "kv_cache")  # vLLM may wake them one after the other
MARK = "_ace_sleeps"


class Asleep:
    """What is known of an engine meanwhile: its report, and what its tensors held."""

    def __init__(self, part: Part, tensors: Iterable[Tensor]):
        self.part, self.away = part, set(TAGS)
        self.held = [(tensor, tensor.cpu().clone()) for tensor in {id(t): t for t in tensors}.values()]

    def wakes(self, tags: Sequence[str] | None) -> bool:
        """Whether all memory is there again; tensors then hold what they held."""
        self.away.difference_update(self.away.copy() if tags is None else tags)
        if self.away:
            return False
        for tensor, values in self.held:
            tensor.copy_(values)
        return True


def hook_sleep(cls: Any, find: Callable[[Any], Any]) -> None:
    """Have vLLM's worker tell us. One that cannot sleep, on a CPU, has these methods of its own."""
    if MARK in vars(cls):
        return
    sleep, wake_up = cls.sleep, cls.wake_up

    @wraps(sleep)
    def slept(self: Any, *args: Any, **kwargs: Any) -> Any:
        skipping = find(self.vllm_config)
        if skipping is not None:
            skipping.lie_down()
        return sleep(self, *args, **kwargs)

    @wraps(wake_up)
    def woken(self: Any, tags: Sequence[str] | None = None) -> Any:
        result = wake_up(self, tags)
        skipping = find(self.vllm_config)
        if skipping is not None:
            skipping.get_up(tags)
        return result

    for name, ours in (("sleep", slept), ("wake_up", woken), (MARK, True)):
        setattr(cls, name, ours)
