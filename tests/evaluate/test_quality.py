"""`ace perplexity`: protocols by name, the realised ratio, and a run that is stopped and goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ace_moe.demo import MODEL, TEXT
from ace_moe.lab.compare import quality
from ace_moe.plan import Plan
from command import run_ace

SMALL = ("--text", TEXT, "--tokens", 300, "--window", 128)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.safetensors"
    assert run_ace("plan", MODEL, "--tables", "-o", path).code == 0
    options = ("--tokens", 512, "--window", 128, "--budgets", "0.5", "--no-correct")
    assert run_ace("plan", MODEL, "-p", path, "--text", TEXT, *options).code == 0
    return path


def test_both_protocols(plan: Path) -> None:
    """Without a plan and at budget 0 the numbers are the same; the released protocol is another number."""
    plain = run_ace("perplexity", MODEL, *SMALL, "--json").json
    zero = run_ace("perplexity", MODEL, *SMALL, "-p", plan, "--skip", 0, "--json").json
    released = run_ace("perplexity", MODEL, *SMALL, "--protocol", "released", "--json").json
    assert plain["nll"] == zero["nll"] and zero["ace"]["realised"] == 0 and plain["ace"] is None
    assert (plain["windows"], plain["targets"]) == (3, 297)
    assert released["targets"] == 300 and released["perplexity"] != plain["perplexity"]
    assert plain["interval"][0] <= plain["perplexity"] <= plain["interval"][1]


def test_skipping_is_counted_and_printed(plan: Path) -> None:
    ran = run_ace("perplexity", MODEL, *SMALL, "-p", plan, "--skip", 0.5)
    assert ran.code == 0, ran.err
    assert "protocol standard, 3 windows of 128 tokens, 297 counted" in ran.out
    assert "requested 50.0%, realised 4" in ran.out or "requested 50.0%, realised 5" in ran.out


def test_a_stopped_run_goes_on(plan: Path, tmp_path: Path) -> None:
    """Stopped after the second window: the file has two, the next run reads one, losses and counts are those of one run."""
    path, whole = tmp_path / "stopped.json", tmp_path / "whole.json"
    options = ("perplexity", MODEL, *SMALL, "-p", plan, "--skip", 0.5, "-o")
    wanted = run_ace(*options, whole, "--json").json
    with patch.object(quality, "write_json", StopAfter(2)):
        assert run_ace(*options, path).code == 130
    assert len(json.loads(path.read_text())["nll"]) == 2
    found = run_ace(*options, path, "--json").json
    assert found["nll"] == wanted["nll"] and found["counts"] == wanted["counts"]
    assert found["ace"] == wanted["ace"] and found["perplexity"] == wanted["perplexity"]
    other = run_ace("perplexity", MODEL, *SMALL, "-o", path)
    assert other.code == 1 and "another measurement" in other.err
    read = Plan.load(plan)
    moved = replace(read, thresholds=tuple(replace(t, threshold=t.threshold / 2) for t in read.thresholds))
    again = run_ace(*options[:-3], "-p", moved.save(tmp_path / "moved.safetensors"), *options[-3:], path)
    assert again.code == 1 and "thresholds is" in again.err, "the same budget by other thresholds"


class StopAfter:
    """Writes, and raises what the user's Ctrl-C raises once `count` writes are done."""

    def __init__(self, count: int):
        self.left, self.write = count, quality.write_json

    def __call__(self, path: Path, value: dict[str, Any]) -> None:
        self.write(path, value)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_bad_requests(plan: Path, tmp_path: Path) -> None:
    """All refused before a model is loaded."""
    for options, problem in (
        (("--protocol", "other"), "standard, released"),
        (("--skip", 0.5), "--plan"),
        (("--window", 1), "at least 2"),
        (("-o", tmp_path / "no" / "file.json"), "no folder"),
    ):
        ran = run_ace("perplexity", "no-such-model", "--text", TEXT, *options)
        assert ran.code == 1 and problem in ran.err.replace("\n", " "), ran.err
