"""One thread's pass at a time: a second one waits until the first has ended, also where nothing says that it has.

An interrupt (Ctrl-C) ends a pass without torch's hooks behind it. The thread that was interrupted goes on with its next pass;
another one, such as a notebook's that streams, finds out by looking whether the pass is still running.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from torch import nn

PATIENCE = 1.0  # seconds until a waiting thread looks: passes are shorter, or it looks once a second
CALL = nn.Module._call_impl.__code__


class Turns:
    """Who runs a pass of a module."""

    def __init__(self) -> None:
        self._lock, self._owners, self._owner = threading.Lock(), threading.Lock(), 0

    @property
    def mine(self) -> bool:
        return self._owner == threading.get_ident()

    def take(self, module: nn.Module) -> None:
        """Returns when this thread is the one; it may be so already."""
        me = threading.get_ident()
        with self._owners:
            if self._owner == me:  # a pass of this thread that was interrupted has not let go
                return
        while not self._lock.acquire(timeout=PATIENCE):
            with self._owners:
                if self._owner and not running(module, self._owner):
                    self._owner = me
                    return
        self._owner = me

    def leave(self) -> None:
        with self._owners:
            if self.mine:
                self._owner = 0
                self._lock.release()


def running(module: nn.Module, thread: int) -> bool:
    """Whether a thread is inside a call of this module."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is CALL and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False
