"""Progress: nothing for a library caller, plain lines for a log, bars for a terminal."""

from __future__ import annotations

from ace_moe import progress
from ace_moe.progress import AGAIN, FIRST, Log, Task


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_library_caller_sees_nothing(capsys) -> None:
    with progress.task("windows", 2) as task:
        task.advance()
    assert task.done == 1
    assert capsys.readouterr() == ("", "")


def test_a_log_speaks_after_a_while_and_then_now_and_again() -> None:
    said, clock = [], Clock()
    with progress.shown(Log(said.append, clock)), progress.task("budgets", 4) as outer:
        outer.started = clock.now
        for _ in range(4):
            with progress.task("windows", 64) as inner:
                for _ in range(64):
                    clock.now += 0.25
                    inner.advance()
            outer.advance()
    assert len(said) == 1 + int((64 - FIRST) // AGAIN)
    assert said[0] == "budgets 1 of 4, windows: 20 of 64, 0:59 left", "of all budgets"
    assert said[1].startswith("budgets 3 of 4, windows: ") and said[1].endswith("0:29 left")


def test_short_work_says_nothing() -> None:
    said, clock = [], Clock()
    for _ in range(20):  # many short tasks one after the other are short work each
        with progress.shown(Log(said.append, clock)), progress.task("layers", 3) as task:
            for _ in range(3):
                clock.now += 1
                task.advance()
    assert said == []


def test_what_an_earlier_run_did_says_nothing_of_the_pace() -> None:
    task = Task("cells", 10, done=6, before=6, started=0.0)
    assert task.left(50.0) is None
    task.done = 8
    assert task.left(50.0) == 50.0, "two cells took 50 s, two are left"
    assert Task("windows", None, done=3).line(1.0) == "windows: 3"


def test_what_is_left_is_of_the_whole() -> None:
    """Half of the third of four cells, two of which were there before: half a cell took 10 s, one and a half are left."""
    cells = Task("cells", 4, done=2, before=2, started=0.0)
    assert Task("windows", 16, cells, done=8, started=7.0).line(10.0) == "cells 3 of 4, windows: 8 of 16, 0:30 left"
    assert Task("windows", 16, Task("searching", None), done=8, started=0.0).left(10.0) == 10.0, "nobody knows more"


def test_tasks_end_with_their_error() -> None:
    seen = []

    class Sink:
        def began(self, task: Task) -> None:
            seen.append(f"+{task.label}")

        def moved(self, task: Task) -> None: ...

        def ended(self, task: Task) -> None:
            seen.append(f"-{task.label}")

    try:
        with progress.shown(Sink()), progress.task("outer"), progress.task("inner"):
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert seen == ["+outer", "+inner", "-inner", "-outer"]
    assert progress.CURRENT.get() is None and progress.SINK.get() is None
