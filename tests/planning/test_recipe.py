"""The one recipe: what it needs is made, what was mapped is not mapped again, and a stopped run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ace_moe import ACE, plan, progress
from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import BudgetError, PlanError
from ace_moe.lab.compare.subject import Recorder, Subject
from ace_moe.lab.policies import calibration_part, prepare
from ace_moe.mapping import Passes, map_budgets
from ace_moe.mapping.passes import attached
from ace_moe.mapping.unfinished import Partial
from ace_moe.plan import Plan
from ace_moe.policies import PRESETS, make
from ace_moe.text import Windows
from command import run_ace

PASS = ("--tokens", 1024, "--window", 256)


class Stop(Exception):  # noqa: N818
    pass


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The τ of every pass."""
    asked: list[float] = []
    stock = Passes.__call__

    def call(self: Passes, threshold: float) -> object:
        asked.append(threshold)
        return stock(self, threshold)

    monkeypatch.setattr(Passes, "__call__", call)
    return asked


def test_it_makes_what_a_policy_lacks(demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows) -> None:
    """Tables from weights; what makes one that a calibration makes is said."""
    mapped = map_budgets(demo_model, demo_plan, make("aimer"), demo_windows, [0.4])
    assert not mapped.plan.lacks(["aimer"])
    with pytest.raises(PlanError, match=r"naee_median.*ace_moe\.lab\.policies\.prepare"):
        map_budgets(demo_model, demo_plan, make("naee"), demo_windows, [0.4])
    plan = prepare(demo_plan, make("naee"), demo_model, calibration_part(demo_windows))
    assert plan.calibrations["naee_median"]["workload"]["tokens"] == 1024
    mapped = map_budgets(demo_model, plan, make("naee"), demo_windows, [0.4])
    assert mapped.fits[0].realised == pytest.approx(0.4, abs=1e-3)
    assert not any(hasattr(m, "ace") for m in demo_model.modules())


def test_budgets_are_checked_and_taken_once(
    demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows, counted: list[float]
) -> None:
    with pytest.raises(BudgetError, match=r"at most\s87\.5%"):
        map_budgets(demo_model, demo_plan, make("share"), demo_windows, [0.5, 0.95])
    assert counted == [], "refused before any pass"
    mapped = map_budgets(demo_model, demo_plan, make("share"), demo_windows, [0.5, 0.5, 0.50], correct=False)
    assert [t.budget for t in mapped.plan.thresholds] == [0.5] and len(mapped.fits) == 1


def test_the_papers_method_is_not_corrected(
    demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows
) -> None:
    """Decided in the recipe and nowhere else; asked for, it is."""
    paper = PRESETS["paper"]
    assert not map_budgets(demo_model, demo_plan, paper, demo_windows, [0.5]).fits[0].corrected
    assert map_budgets(demo_model, demo_plan, paper, demo_windows, [0.5], correct=True).fits[0].corrected
    assert map_budgets(demo_model, demo_plan, make("share"), demo_windows, [0.5]).fits[0].corrected


def test_what_is_mapped_is_not_mapped_again(
    demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows, counted: list[float]
) -> None:
    policy = make("share")
    first = map_budgets(demo_model, demo_plan, policy, demo_windows, [0.3])
    counted.clear()
    again = map_budgets(demo_model, first.plan, policy, demo_windows, [0.3])
    assert counted == [] and again.fits == first.fits and again.plan == first.plan
    other = Windows(demo_windows.ids[:2], demo_windows.workload.__class__("sample.txt", "0" * 64, 512))
    for windows, change in ((other, {}), (demo_windows, {"again": True})):
        counted.clear()
        map_budgets(demo_model, first.plan, policy, windows, [0.3], **change)
        assert counted, "another text, or asked to"


@pytest.mark.long
def test_a_stopped_run_goes_on(
    demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows, counted: list[float], tmp_path: Path
) -> None:
    """Stopped after the first budget: its entry is in the file, and the dense pass is not made again."""
    path, policy, budgets = tmp_path / "plan.safetensors", make("share"), [0.2, 0.4, 0.6]
    whole = map_budgets(demo_model, demo_plan, policy, demo_windows, budgets)
    passes = len(counted)
    saved: list[Plan] = []

    def save(plan: Plan) -> None:
        plan.save(path)
        saved.append(plan)
        if len(saved) == 1:
            raise Stop

    partial = Partial(path)
    with pytest.raises(Stop):
        map_budgets(demo_model, demo_plan, policy, demo_windows, budgets, save=save, partial=partial)
    assert partial.path.exists()
    counted_before = len(counted) - passes
    counted.clear()
    done = map_budgets(demo_model, Plan.load(path), policy, demo_windows, budgets, save=save, partial=partial)
    assert 0.0 not in counted and counted_before + len(counted) == passes, "no pass twice"
    assert [f.threshold for f in done.fits] == [f.threshold for f in whole.fits]
    assert done.plan == whole.plan
    assert not partial.path.exists()


@pytest.mark.long
def test_another_runs_leftover_is_not_taken(
    demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows, counted: list[float], tmp_path: Path
) -> None:
    partial = Partial(tmp_path / "plan.safetensors")

    def stop(plan: Plan) -> None:
        raise Stop

    with pytest.raises(Stop):
        map_budgets(demo_model, demo_plan, make("share"), demo_windows, [0.3], save=stop, partial=partial)
    for policy, windows in (
        (make("share"), Windows(demo_windows.ids.view(8, 128), demo_windows.workload)),
        (make("ace"), demo_windows),
        (make("share", min_active=2), demo_windows),
        (make("share"), Windows(demo_windows.ids, demo_windows.workload.__class__("other", "1" * 64, 1024))),
    ):
        counted.clear()
        with pytest.raises(Stop):
            map_budgets(demo_model, demo_plan, policy, windows, [0.3], save=stop, partial=partial)
        assert counted[0] == 0.0
    partial.path.write_bytes(b"damaged")
    map_budgets(demo_model, demo_plan, make("share"), demo_windows, [0.3], partial=partial)


@pytest.mark.long
def test_entries_say_what_they_do_to_predictions(
    demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows, tmp_path: Path
) -> None:
    """The same numbers as a comparison measures; kept in the file, and not measured again."""
    policy, budgets = make("share"), [0.3, 0.5]
    mapped = map_budgets(demo_model, demo_plan, policy, demo_windows, budgets, judged=True)
    kl = [t.fidelity["kl"]["value"] for t in mapped.entries if t.fidelity]
    assert 0 < kl[0] < kl[1]
    subject = Subject(demo_model, demo_plan, demo_windows)
    with attached(demo_model, demo_plan, policy) as deciders:
        found = Recorder(deciders, subject).outcome(mapped.fits[1].threshold).losses.fidelity
    assert found is not None and kl[1] == pytest.approx(sum(found.kl) / (4 * 255))
    assert mapped.entries[0].fidelity["kl"]["low"] is None, "four windows have no interval"  # type: ignore[index]
    path = mapped.plan.save(tmp_path / "plan.safetensors")
    passes: list[torch.Size] = []
    handle = demo_model.lm_head.register_forward_hook(lambda m, a, out: passes.append(out.shape))
    try:
        again = map_budgets(demo_model, Plan.load(path), policy, demo_windows, budgets, judged=True)
    finally:
        handle.remove()
    assert passes == [] and again.plan == mapped.plan


def test_a_pass_for_budgets_predicts_nothing(
    demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows
) -> None:
    """Logits of whole windows are most of a small model's time and memory."""
    shapes: list[torch.Size] = []
    handle = demo_model.lm_head.register_forward_hook(lambda m, a, out: shapes.append(out.shape))
    try:
        map_budgets(demo_model, demo_plan, make("share"), demo_windows, [0.3], correct=False)
    finally:
        handle.remove()
    assert shapes and all(shape[1] == 1 for shape in shapes)


@pytest.mark.long
def test_the_command_goes_on(tmp_path: Path, counted: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in `ace budget`, then the same command: what was found is kept."""
    path = tmp_path / "plan.safetensors"
    assert run_ace("plan", MODEL, "--tables", "-o", path).code == 0
    command = ("plan", MODEL, "-p", path, "--text", TEXT, *PASS, "--budgets", "0.3,0.5")
    stock, seen = plan.update, []

    def stopped(where: Path, had: Plan, made: Plan) -> Plan:
        found = stock(where, had, made)
        seen.append(where)
        if len(seen) == 1:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(plan, "update", stopped)
    assert run_ace(*command).code == 130
    assert [t.budget for t in Plan.load(path).thresholds] == [0.3]
    counted.clear()
    assert run_ace(*command).code == 0
    assert 0.0 not in counted
    assert [t.budget for t in Plan.load(path).thresholds] == [0.3, 0.5]
    assert ACE.load(path, 0.5).thresholds[0] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["plan.safetensors"]


def test_passes_tell_how_far_they_are(demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows) -> None:
    lines: list[str] = []

    class Sink:
        def began(self, task: progress.Task) -> None: ...
        def ended(self, task: progress.Task) -> None: ...
        def moved(self, task: progress.Task) -> None:
            lines.append(task.line(task.started))

    with progress.shown(Sink()):
        map_budgets(demo_model, demo_plan, make("share"), demo_windows, [0.3, 0.5], correct=False)
    assert lines[:4] == [f"windows: {n} of 4, 0:00 left" for n in range(1, 5)]
    assert lines[-1] == "budgets: 2 of 2, 0:00 left"
