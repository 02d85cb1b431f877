"""Results files that were edited, anywhere and into anything: a page, or an error of ours that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ace_moe.errors import AceError
from ace_moe.lab.report.page import write_page
from command import run_ace
from edits import replace_somewhere

KINDS = ("compared", "studied", "evaluated", "simulated", "timed")


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_edited_results(kind: str, request: pytest.FixtureRequest, tmp_path: Path, seed: st.DataObject) -> None:
    found = json.loads(request.getfixturevalue(kind).read_text())
    replace_somewhere(found, seed)
    edited, output = tmp_path / "edited.json", tmp_path / "page.html"
    edited.write_text(json.dumps(found))
    output.unlink(missing_ok=True)
    try:
        write_page([edited], output)
    except AceError:
        assert not output.exists()
    else:
        assert output.stat().st_size > 1000


HARMLESS = [("command", "x"), ("method", "x"), ("references", []), ("cells", []), ("tables", {}), ("layers", {})]


def cases() -> dict[str, Any]:
    """Each part of a results file, replaced by something that it cannot be."""
    whole = ("model", "environment", "command", "grid", "dense", "cells", "tables", "references", "workload")
    cell = ("method", "budget", "nll", "targets", "change", "realised", "interval", "layers")
    parts = [(name,) for name in whole] + [("cells", 0, name) for name in cell]
    replaced = [(part, value) for part in parts for value in (None, "x", -5, [], {}, True)]
    return {f"{part[-1]} {value!r}": (part, value) for part, value in replaced if (part[-1], value) not in HARMLESS}


@pytest.mark.parametrize(("part", "value"), cases().values(), ids=cases())
def test_each_part(part: tuple[Any, ...], value: Any, compared: Path, tmp_path: Path) -> None:
    """Through the command: one paragraph, no traceback, no page."""
    found = json.loads(compared.read_text())
    node = found
    for step in part[:-1]:
        node = node[step]
    node[part[-1]] = value
    (tmp_path / "edited.json").write_text(json.dumps(found))
    ran = run_ace("report", tmp_path / "edited.json", "-o", tmp_path / "page.html")
    assert ran.code == 1 and ran.err.startswith("error: "), ran
    assert "edited.json was changed since `ace compare` wrote it" in ran.err and part[-1] in ran.err


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "compare", "schema": 1, "a": NaN}',
        '{"kind": "compare", "schema": 1, "a": 1e999}',
        '{"kind": ["compare"]}',
        "[" * 100_000,
    ],
)
def test_files_that_hold_no_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "edited.json").write_text(text)
    ran = run_ace("report", tmp_path / "edited.json", "-o", tmp_path / "page.html")
    assert ran.code == 1 and "edited.json" in ran.err


def test_what_has_no_number_is_no_edit(compared: Path, tmp_path: Path) -> None:
    """An expert that no token was routed to has no ratio."""
    found = json.loads(compared.read_text())
    cell = next(c for c in found["cells"] if "experts" in c)
    cell["experts"][next(iter(cell["experts"]))][0] = None
    (tmp_path / "r.json").write_text(json.dumps(found))
    write_page([tmp_path / "r.json"], tmp_path / "page.html")
