"""The page as a file: whole, self-contained, and safe to put anything into."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ace_moe.errors import ResultError
from ace_moe.files import file_hash
from ace_moe.lab.report.contents import read
from ace_moe.lab.report.page import page, write_page
from ace_moe.provenance import FIELDS
from command import run_ace


def data_of(text: str) -> dict:  # type: ignore[type-arg]
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_command_writes_one_file(compared: Path, studied: Path, evaluated: Path, tmp_path: Path) -> None:
    """Any mix of results; nothing is loaded from anywhere."""
    ran = run_ace("report", compared, studied, evaluated, "-o", tmp_path / "report.html", "--rival", "share")
    assert ran.code == 0, ran.err
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=[\"'](?!data:,|#)", text)
    assert not re.search(r"\b(fetch|XMLHttpRequest|import)\s*\(", text)
    assert "{{" not in text.replace(json.dumps(data_of(text)), "")
    assert data_of(text)["rivals"][0]["rival"] == "share"
    record, notes = data_of(text)["provenance"], data_of(text)["notes"]
    assert set(record) == set(FIELDS) and record["inputs"][compared.name] == file_hash(compared)
    assert any(note.startswith("ace compare: ") for note in notes) and file_hash(compared)[:12] in notes[-1]


def test_its_data_are_the_results(compared: Path) -> None:
    """Every cell with every number but the losses by window."""
    results = json.loads(compared.read_text())
    found = data_of(page({"compare": [results]}))["compare"][0]
    for before, after in zip(results["cells"], found["cells"], strict=True):
        assert after == {k: v for k, v in before.items() if k not in ("nll", "targets", "kl_by_window")}
    assert found["dense"]["perplexity"] == results["dense"]["perplexity"]
    assert found["references"] == ["oracle"]


def test_names_cannot_break_out(compared: Path) -> None:
    """A model may be called anything."""
    results = json.loads(compared.read_text())
    results["model"]["name"] = "</script><script>alert(1)</script>{{data}}"
    text = page({"compare": [results]})
    assert text.count("<script") == 2
    assert data_of(text)["title"] == results["model"]["name"]


def test_files_that_are_no_results(tmp_path: Path, compared: Path) -> None:
    for content in ("", "[]", '{"kind": "other"}', "\x00"):
        path = tmp_path / "wrong.json"
        path.write_text(content)
        with pytest.raises(ResultError, match=r"wrong\.json is not a results file"):
            read(path)
    with pytest.raises(ResultError, match="not a results file"):
        write_page([compared, tmp_path / "missing.json"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_results_without_a_cell_say_what_to_do(tmp_path: Path, compared: Path) -> None:
    results = json.loads(compared.read_text()) | {"cells": []}
    (tmp_path / "empty.json").write_text(json.dumps(results))
    ran = run_ace("report", tmp_path / "empty.json", "-o", tmp_path / "report.html")
    assert ran.code == 1 and "ace compare" in ran.err
