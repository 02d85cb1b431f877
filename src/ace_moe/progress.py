"""Progress of long work, reported to one sink: a command shows it, a library caller sees nothing.

    with progress.task("mapping", total=64) as task:
        task.advance()

Tasks nest; a sink shows the innermost, with those around it in front.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

FIRST, AGAIN = 5.0, 30.0  # seconds until the first line of a log, and between two


@dataclass
class Task:
    """`total` may be an upper bound that shrinks; None where nobody knows."""

    label: str
    total: int | None
    parent: Task | None = None
    done: int = 0
    before: int = 0  # done by an earlier run: says nothing of how fast this one is
    started: float = field(default_factory=time.monotonic)

    def advance(self, number: int = 1) -> None:
        """Count parts that are done, and report them."""
        self.done += number
        if (sink := SINK.get()) is not None:
            sink.moved(self)

    def left(self, now: float, inside: float = 0.0) -> float | None:
        """Estimate the seconds to go of the outermost task, which is what somebody waits for, by the mean so far.

        `inside` is how much of the part under way is done. None where nothing is done or nobody knows how much there is.
        """
        if self.total is None:
            return None
        done = self.done + inside
        if self.parent is not None and self.parent.total is not None:
            return self.parent.left(now, min(1.0, done / max(1, self.total)))
        if done <= self.before:
            return None
        return (now - self.started) / (done - self.before) * max(0.0, self.total - done)

    def line(self, now: float) -> str:
        """Write the task in one line: "mapping, 50 %: 41 of 64, 1:20 left"."""
        names = [self.label]
        above = self.parent
        while above is not None:  # a task around another counts the one that is under way
            of = "" if above.total is None else f" {min(above.done + 1, above.total)} of {above.total}"
            names.append(above.label + of)
            above = above.parent
        line = f"{', '.join(reversed(names))}: {self.done}" + ("" if self.total is None else f" of {self.total}")
        seconds = self.left(now)
        if seconds is None:
            return line
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{line}, {hours}:{minutes:02}:{rest:02} left" if hours else f"{line}, {minutes}:{rest:02} left"


class Sink(Protocol):
    def began(self, task: Task) -> None: ...
    def moved(self, task: Task) -> None: ...
    def ended(self, task: Task) -> None: ...


SINK: ContextVar[Sink | None] = ContextVar("sink", default=None)
CURRENT: ContextVar[Task | None] = ContextVar("task", default=None)


@contextmanager
def task(label: str, total: int | None = None, done: int = 0) -> Iterator[Task]:
    """Begin and end a piece of work with `total` parts, some of them done before."""
    work, sink = Task(label, total, CURRENT.get(), done, done), SINK.get()
    before = CURRENT.set(work)
    if sink is not None:
        sink.began(work)
    try:
        yield work
    finally:
        CURRENT.reset(before)
        if sink is not None:
            sink.ended(work)


@contextmanager
def shown(sink: Sink) -> Iterator[None]:
    """Report tasks to this sink."""
    before = SINK.set(sink)
    try:
        yield
    finally:
        SINK.reset(before)


class Calls:
    """Call a function with what is under way, how much of it is done, and of how much if that is known."""

    def __init__(self, call: Callable[[str, int, int | None], object]):
        self.call = call

    def moved(self, task: Task) -> None:
        self.call(task.label, task.done, task.total)

    began = moved

    def ended(self, task: Task) -> None:
        pass


def reporting(call: Callable[[str, int, int | None], object] | None) -> Callable[[], AbstractContextManager[None]]:
    """Make a context that reports progress to a function; without a function, an empty one."""
    return nullcontext if call is None else lambda: shown(Calls(call))


class Log:
    """Write plain lines where there is no terminal: none for short work, then one now and again."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self.say, self.clock = say, clock
        self._next: float | None = None

    def began(self, task: Task) -> None:
        if self._next is None:
            self._next = self.clock() + FIRST

    def moved(self, task: Task) -> None:
        now = self.clock()
        if self._next is not None and now >= self._next:
            self._next = now + AGAIN
            self.say(task.line(now))

    def ended(self, task: Task) -> None:
        if task.parent is None:
            self._next = None
