"""Do thresholds travel: the study on two workloads that differ, and its cost table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from ace_moe import ACE
from ace_moe.checkpoint.loading import load_tokenizer, load_windows
from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import OptionError, PolicyError, ResultError
from ace_moe.lab.compare import thresholds
from ace_moe.lab.compare.subject import Subject
from ace_moe.lab.compare.thresholds import Study, study
from ace_moe.mapping import Passes
from ace_moe.plan import Plan
from ace_moe.policies import make
from ace_moe.text import Windows
from command import run_ace

CODE = "def add(a, b):\n    return a + b\n\n\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    code, wiki = folder / "code.txt", folder / "wiki.txt"
    code.write_text(CODE * 60, encoding="utf-8")
    wiki.write_text(TEXT.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    return [wiki, code]


@pytest.fixture(scope="module")
def workloads(demo_model: PreTrainedModel, texts: list[Path]) -> list[Windows]:
    return [load_windows(demo_model, load_tokenizer(MODEL), path, 128, 256) for path in texts]


def setup(model: PreTrainedModel, plan: Plan, windows: Windows, **options: Any) -> Study:
    budgets = options.pop("budgets", (0.3, 0.5))
    return Study(Subject(model, plan, windows), make("share"), budgets, points=10, **options)


@pytest.mark.long
def test_thresholds_transfers_and_cost(
    demo_model: PreTrainedModel, demo_plan: Plan, workloads: list[Windows], tmp_path: Path
) -> None:
    """Own thresholds meet their budgets; a carried one realises what a pass with it realises."""
    path = tmp_path / "thresholds.json"
    found = study(setup(demo_model, demo_plan, workloads[0]), workloads, path, {"model": {"name": "demo"}})
    assert found == json.loads(path.read_text())
    assert [(r["workload"], r["budget"]) for r in found["workloads"]] == [
        *(("wiki.txt", 0.3), ("wiki.txt", 0.5)),
        *(("code.txt", 0.3), ("code.txt", 0.5)),
    ]
    assert all(abs(r["realised"] - r["budget"]) < 0.002 for r in found["workloads"])
    carried = next(r for r in found["transfers"] if r["from"] == "code.txt" and r["budget"] == 0.5)
    ace = ACE(demo_plan, policy="share")
    with ace(demo_model):
        Passes(ace.deciders, demo_model, workloads[0])(carried["threshold"])
        assert carried["realised"] == ace.realised
    ways = {r["way"]: r for r in found["cost"]}
    assert ways["quantile"]["passes"] == 1
    assert ways["quantile, corrected"]["passes"] < ways["binary search"]["passes"]
    assert ways["quantile, corrected"]["worst"] <= 0.001 and ways["binary search"]["worst"] <= 0.001
    assert ways["frontier walk"]["passes"] <= 10
    assert all(r >= b for r, b in zip(ways["frontier walk"]["realised"], (0.3, 0.5), strict=True))
    assert all(r["seconds"] > 0 for r in found["cost"])


@pytest.mark.long
def test_a_study_goes_on(
    demo_model: PreTrainedModel, demo_plan: Plan, workloads: list[Windows], tmp_path: Path
) -> None:
    """Nothing that is in the file is measured again; another budget is added."""
    path = tmp_path / "thresholds.json"
    options = {"measured": False, "budgets": (0.5,)}
    first = study(setup(demo_model, demo_plan, workloads[0], **options), workloads, path, {})
    assert study(setup(demo_model, demo_plan, workloads[0], **options), workloads, path, {}) == first
    more = study(setup(demo_model, demo_plan, workloads[0], measured=False, budgets=(0.3, 0.5)), workloads, path, {})
    assert more["budgets"] == [0.3, 0.5]
    assert more["workloads"][:2] == first["workloads"] and len(more["workloads"]) == 4
    assert more["cost"] == first["cost"]
    cut = [Windows(w.ids.reshape(-1, w.ids.shape[1] // 2), w.workload) for w in workloads]
    with pytest.raises(ResultError, match="window is"):
        study(setup(demo_model, demo_plan, cut[0], **options), cut, path, {})


def test_bad_studies(demo_model: PreTrainedModel, demo_plan: Plan, workloads: list[Windows], tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    with pytest.raises(OptionError, match="at least two texts"):
        study(setup(demo_model, demo_plan, workloads[0]), workloads[:1], path, {})
    with pytest.raises(OptionError, match="different names"):
        study(setup(demo_model, demo_plan, workloads[0]), [workloads[0], workloads[0]], path, {})
    searched = Study(Subject(demo_model, demo_plan, workloads[0]), make("alloc_t"), (0.5,))
    with pytest.raises(PolicyError, match="'alloc_t' has no threshold"):
        study(searched, workloads, path, {})


@pytest.mark.long
def test_the_commands(texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ace study thresholds` prints three tables, `ace study tables` one."""
    monkeypatch.setattr(thresholds, "STEEPNESS", 0.1)  # an even grid: the walk is over after few passes
    path = tmp_path / "thresholds.json"
    small = ("--tokens", 256, "--window", 128)
    options = ("--budgets", "0.5", "--policy", "share", "-o", path, "--no-measured", *small)
    ran = run_ace("study", "thresholds", MODEL, "--text", texts[0], "--text", texts[1], *options)
    assert ran.code == 0, ran.err
    assert all(title in ran.out for title in ("threshold by workload", "wiki → code", "binary search"))
    assert json.loads(path.read_text())["identity"]["policy"]["policy"] == "share"
    ran = run_ace("study", "tables", MODEL, "--text", texts[0], *small, "--json")
    assert set(ran.json) == set("012345")
    assert "by expert" in run_ace("study", "tables", MODEL, "--text", texts[0], *small).out
