"""Which models, formats and engines tests have run: `pytest --support FILE` adds what it ran; docs/support.md is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ace_moe.files import write_whole
from ace_moe.provenance import provenance

KEY = "support"
Cell = dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--support", type=Path, help="Add what was run to this results file.")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Collected(config), "support-collected")


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Say which cells of the support page a test stands for; they count as its outcome is.

    `engine`: tables, transformers, kernels or vLLM; `stored`: the format of the experts; `why`: what is refused, all of it or
    a part.
    """

    def say(family: str, engine: str, *phases: str, stored: str = "plain", why: str = "", part: bool = False) -> None:
        answer = ("part" if part else "no") if why else "yes"
        cell = {"family": family, "stored": stored, "engine": engine, "answer": answer, "why": why}
        cell["device"] = "GPU" if torch.cuda.is_available() else "CPU"
        request.node.user_properties += [(KEY, {**cell, "phase": phase}) for phase in phases or ("",)]

    return say


class Collected:
    """What the tests of this run said; with several processes, in the one that starts the others."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.cells: list[Cell] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.outcome != "skipped":
            said = [value for name, value in report.user_properties if name == KEY]
            self.cells += [{**cell, "outcome": report.outcome} for cell in said]

    def pytest_sessionfinish(self) -> None:
        path = self.config.getoption("--support")
        if path is not None and not hasattr(self.config, "workerinput") and self.cells:
            arguments = ["pytest", *map(str, self.config.invocation_params.args)]
            store(path, self.cells, provenance("cuda" if torch.cuda.is_available() else "cpu", argv=arguments))


def store(path: Path, cells: Sequence[Cell], record: dict[str, Any]) -> None:
    """Beside what other runs left there: a cell that was run again is replaced, a run without cells is forgotten."""
    kept = json.loads(path.read_text()) if path.exists() else {"runs": [], "cells": []}
    runs = [*kept["runs"], record]
    found = {identity(cell): cell for cell in kept["cells"]} | merged(cells, len(kept["runs"]))
    used = sorted({cell["run"] for cell in found.values()})
    ordered = [found[key] | {"run": used.index(found[key]["run"])} for key in sorted(found)]
    lines = ",\n  ".join(json.dumps(cell) for cell in ordered)  # a line for each: a change can be read
    text = json.dumps({"kind": KEY, "runs": [runs[n] for n in used], "cells": []}, indent=1)
    write_whole(path, text.replace('"cells": []', f'"cells": [\n  {lines}\n ]').encode() + b"\n", "The support file")


def identity(cell: Cell) -> tuple[str, ...]:
    return tuple(cell[name] for name in ("family", "stored", "engine", "phase", "device"))


def merged(cells: Sequence[Cell], run: int) -> dict[tuple[str, ...], Cell]:
    """A cell for which one test failed has failed."""
    found: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        before = found.get(identity(cell), cell)
        worse = max(cell["outcome"], before["outcome"], key=("passed", "failed").index)
        found[identity(cell)] = {**cell, "outcome": worse, "run": run}
    return found
