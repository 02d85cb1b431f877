"""Results of small runs on the embedded model, made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ace_moe.demo import MODEL, TEXT
from ace_moe.scoring.statistics import mean_difference, mean_interval
from command import run_ace

FACTS = {"model": {"name": "model"}, "environment": {"ace_moe": "0", "torch": "0", "transformers": "0"}}
SMALL = ("--tokens", 256, "--window", 64)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="session")
def compared(folder: Path) -> Path:
    path = folder / "results.json"
    grid = ("--methods", "share,ace,random,oracle,xshare", "--budgets", "0.3,0.5", "--gains", "kept,power")
    ran = run_ace("compare", MODEL, "--text", TEXT, *SMALL, *grid, "-o", path)
    assert ran.code == 0, ran.err
    return path


@pytest.fixture(scope="session")
def studied(folder: Path) -> Path:
    """As `ace study thresholds` writes it, with made-up numbers."""
    names, budgets = ("wiki.txt", "code.txt"), (0.3, 0.5)
    own = [
        {"workload": n, "tokens": 256, "budget": b, "threshold": 0.2 * b + 0.01 * i, "realised": b}
        for i, n in enumerate(names)
        for b in budgets
    ]
    pairs = (names, names[::-1])
    carried = [
        {"from": a, "to": c, "threshold": 0.1, "realised": b + 0.02, "budget": b} for a, c in pairs for b in budgets
    ]
    cost = [
        {"way": way, "passes": passes, "seconds": 0.5 * passes, "budgets": budgets, "realised": budgets, "worst": 0.001}
        for way, passes in (("quantile", 1), ("binary search", 23))
    ]
    study = {
        "workloads": own,
        "transfers": carried,
        "cost": cost,
        "budgets": budgets,
        "command": "ace study thresholds",
    }
    path = folder / "thresholds.json"
    path.write_text(json.dumps({"schema": 1, "kind": "study thresholds", "identity": {}, **study, **FACTS}))
    return path


@pytest.fixture(scope="session")
def evaluated(folder: Path) -> Path:
    """As `ace eval` writes it, with made-up answers."""
    dense, half = [1.0] * 70 + [0.0] * 30, [1.0] * 60 + [0.0] * 40
    cells = []
    for skip, questions in ((0.0, dense), (0.5, half)):
        found, change = mean_interval(questions), mean_difference(questions, dense)
        cells.append(
            {"task": "arc_easy", "skip": skip, "metric": "acc", "value": found.value, "realised": skip}
            | {"interval": [found.low, found.high], "change": vars(change) if skip else None, "questions": questions}
        )
    run = {"schema": 1, "kind": "eval", "identity": {}, "command": "ace eval", "settings": "policy ace"}
    path = folder / "eval.json"
    path.write_text(json.dumps({**run, "cells": cells, **FACTS}))
    return path


@pytest.fixture(scope="session")
def simulated(folder: Path) -> Path:
    """As `ace simulate -o` writes it, from a trace of the embedded model."""
    trace, path = folder / "sample.trace", folder / "simulated.json"
    assert run_ace("trace", MODEL, "--text", TEXT, "--tokens", 512, "--window", 64, "-o", trace).code == 0
    ran = run_ace("simulate", trace, "--skip", "0.3,0.6", "--batch", "1,4,8", "-o", path)
    assert ran.code == 0, ran.err
    return path


@pytest.fixture(scope="session")
def timed(folder: Path) -> Path:
    """As `ace bench` writes it, with made-up times."""
    common = {"what": "tpot", "tokens": 256, "batch": 4}
    ways = [("grouped_mm", 0.0, 10.5), ("ace", 0.0, 6.0), ("ace", 0.6, 4.0)]
    rows = [{**common, "path": p, "requested": s, "realised": s, "wall_ms": ms} for p, s, ms in ways]
    path = folder / "latency.json"
    path.write_text(
        json.dumps(
            {"schema": 1, "kind": "bench", "command": "ace bench --shape small", "device": "a card", "rows": rows}
        )
    )
    return path
