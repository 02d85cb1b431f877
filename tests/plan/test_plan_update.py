"""Several writers of one plan: none loses what another wrote, links and permissions stay, and nothing is left lying around."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plan_cases import entry as entry_of
from plan_cases import plan_of

from ace_moe.errors import PlanError
from ace_moe.files import UNFINISHED, locked, replace_whole
from ace_moe.plan import Plan, Threshold, update


def entry(budget: float, tau: float = 0.1) -> Threshold:
    return entry_of(budget, tau)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return plan_of(entry(0.125)).save(tmp_path / "plan.safetensors")


def test_two_who_read_before_either_wrote(path: Path) -> None:
    had = Plan.load(path)
    update(path, had, had.with_thresholds([entry(0.25)]))
    update(path, had, had.with_thresholds([entry(0.5)]))
    assert {t.budget for t in Plan.load(path).thresholds} == {*(t.budget for t in had.thresholds), 0.25, 0.5}


def test_many_at_once(path: Path) -> None:
    had, budgets = Plan.load(path), [n / 64 for n in range(1, 33)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda b: update(path, had, had.with_thresholds([entry(b)])), budgets))
    assert {t.budget for t in Plan.load(path).thresholds} >= set(budgets)
    assert os.listdir(path.parent) == [path.name]


def test_everything_else_is_merged_too(path: Path) -> None:
    """Tables, calibrations, permissions: what one added stays beside what the other added."""
    had = Plan.load(path)
    one = {key: {"aimer": torch.ones(len(t["gsp"]))} for key, t in had.tables.items()}
    two = {key: {"other": torch.zeros(len(t["gsp"]))} for key, t in had.tables.items()}
    update(path, had, replace(had.with_tables(one, {"params": {}}), other_weights=("a" * 64,)))
    update(path, had, replace(had.with_tables(two), other_weights=("b" * 64,)))
    found = Plan.load(path)
    assert not found.lacks(["gsp", "rcr", "aimer", "other"]) and set(found.calibrations) == {"aimer"}
    assert found.other_weights == ("a" * 64, "b" * 64)


def test_the_newer_entry_of_one_budget_stays(path: Path) -> None:
    had = Plan.load(path)
    update(path, had, had.with_thresholds([replace(entry(0.5), threshold=0.1)]))
    update(path, had, had.with_thresholds([replace(entry(0.5), threshold=0.2)]))
    assert [t.threshold for t in Plan.load(path).thresholds if t.budget == 0.5] == [0.2]


def test_a_plan_that_became_another_models(path: Path) -> None:
    had = Plan.load(path)
    other = plan_of(experts=6)
    other.save(path)
    with pytest.raises(PlanError, match="is of another model now"):
        update(path, had, had.with_thresholds([entry(0.5)]))
    assert Plan.load(path) == other


def test_a_plan_that_was_deleted_is_written_again(path: Path) -> None:
    had = Plan.load(path)
    path.unlink()
    update(path, had, had.with_thresholds([entry(0.5)]))
    assert 0.5 in {t.budget for t in Plan.load(path).thresholds}


# ---- the file ---------------------------------------------------------------------------------------------------------


def test_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "plan.safetensors"
    link.symlink_to(path)
    plan = Plan.load(link).with_thresholds([entry(0.5)])
    plan.save(link)
    assert link.is_symlink() and Plan.load(path) == plan
    assert os.listdir(link.parent) == ["plan.safetensors"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_permissions_stay(mode: int, path: Path) -> None:
    path.chmod(mode)
    Plan.load(path).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_new_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        replace_whole(tmp_path / "new", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


def test_what_a_killed_writer_left_is_gone_after_the_next(path: Path) -> None:
    left = path.with_name(f".{path.name}.0123abcd{UNFINISHED}")
    left.write_bytes(b"half")
    other = path.with_name(f".else.safetensors.0123abcd{UNFINISHED}")
    other.write_bytes(b"half")
    Plan.load(path).save(path)
    assert not left.exists() and other.exists()


def test_a_folder_that_cannot_be_locked_is_written_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network drives."""
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(path.parent) as alone:
        assert not alone
    assert Plan.load(Plan.load(path).with_thresholds([entry(0.5)]).save(path)).thresholds
