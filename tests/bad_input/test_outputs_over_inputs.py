"""An output never destroys what it was made from, nor anything else that is not of its own kind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from bad_input_cases import Refuse, budget_arguments

from ace_moe import Plan
from ace_moe.demo import MODEL, TEXT
from command import run_ace

SMALL = ("--tokens", 128, "--window", 64, "--device", "cpu")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file of `ace compare`."""
    path = tmp_path_factory.mktemp("results") / "r.json"
    grid = ("--methods", "share", "--budgets", "0.5", "--gains", "kept")
    ran = run_ace("compare", MODEL, "--text", TEXT, *SMALL, *grid, "-o", path)
    assert ran.code == 0, ran.err
    return path.read_bytes()


@pytest.fixture
def compared(results: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "r.json"
    path.write_bytes(results)
    return path


@pytest.mark.parametrize("how", ["itself", "link", "hard link", "long way"])
def test_report_over_its_results(how: str, compared: Path, tmp_path: Path, refuse: Refuse) -> None:
    output = {"itself": compared, "long way": tmp_path / "." / ".." / tmp_path.name / "r.json"}.get(how)
    if output is None:
        output = tmp_path / "page.html"
        (output.symlink_to if how == "link" else output.hardlink_to)(compared)
    refuse("report", compared, "-o", output, says=("is what the page is made from", "Choose another place"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "new.safetensors"])
def test_plan_into_the_checkpoint(name: str, single: Path, refuse: Refuse) -> None:
    """A new file too: readers of a folder take every .safetensors file in it for a shard."""
    refuse("plan", single, "--tables", "-o", single / name, says=("inside the checkpoint", "Choose another place"))


def test_plan_through_a_link_into_the_checkpoint(single: Path, tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "plan.safetensors").symlink_to(single / "model.safetensors")
    refuse("plan", single, "--tables", "-o", tmp_path / "plan.safetensors", says=("inside the checkpoint",))


def test_results_into_the_checkpoint(single: Path, text: Path, compared: Path, refuse: Refuse) -> None:
    says = ("inside the checkpoint",)
    refuse("compare", single, "--text", text, "-o", single / "r.json", *SMALL, says=says)
    refuse("perplexity", single, "--text", text, "-o", single / "r.json", says=says)
    refuse("study", "thresholds", single, "--text", text, "-o", single / "r.json", *SMALL, says=says)
    refuse("report", compared, "-o", single / "page.html", says=says)
    refuse("bench", single, "-o", single / "b.json", says=says)
    refuse("bench", single, "--chart", single / "b.png", says=says)
    refuse("demo", "-o", single, says=("checkpoint",))


@pytest.mark.parametrize("content", [b"my notes", b"<!doctype html><p>my page", b'{"name": "package"}'])
def test_output_over_a_file_of_another_kind(
    content: bytes, single: Path, text: Path, compared: Path, tmp_path: Path, refuse: Refuse
) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    refuse("plan", single, "--tables", "-o", path, says=("not a plan", "Choose another place"))
    refuse("report", compared, "-o", path, says=("not a page of ours", "Choose another place"))
    refuse("compare", single, "--text", text, "-o", path, *SMALL, says=("not a results file", "Choose another place"))
    refuse("bench", single, "-o", path, says=("not a results file", "Choose another place"))
    refuse("bench", single, "--chart", path, says=("not a picture", "Choose another place"))


def test_plan_over_another_checkpoint_file(single: Path, tmp_path: Path, refuse: Refuse) -> None:
    """A readable safetensors file that is no plan, wherever it lies."""
    path = tmp_path / "weights.safetensors"
    path.write_bytes((single / "model.safetensors").read_bytes())
    refuse("plan", single, "--tables", "-o", path, says=("not a plan", "Choose another place"))


def test_outputs_over_their_own_kind(single: Path, plan: Path, compared: Path, tmp_path: Path) -> None:
    """Made again as often as one likes; an empty file is nothing to lose."""
    empty = tmp_path / "empty"
    empty.touch()
    for path in (plan, plan, empty):
        assert run_ace("plan", single, "--tables", "-o", path).code == 0
        assert Plan.load(path).model == "single"
    for _ in range(2):
        assert run_ace("report", compared, "-o", tmp_path / "page.html").code == 0


def test_a_damaged_plan_is_not_written_over(single: Path, plan: Path, refuse: Refuse) -> None:
    plan.write_bytes(plan.read_bytes()[:-1])
    refuse("plan", single, "--tables", "-o", plan, says=(plan.name, "Remove"))


def test_plan_that_lies_in_a_checkpoint_can_be_mapped(single: Path, plan: Path, text: Path) -> None:
    """It is there already and stays what it is."""
    inside = plan.rename(single / "plan.safetensors")
    assert run_ace(*budget_arguments(single.parent / "other", inside, text)).code == 1  # no such model
    assert Plan.load(inside).thresholds


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_full_disk_keeps_the_old_page(
    place: str, compared: Path, tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    assert run_ace("report", compared, "-o", page).code == 0

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, place, full)
    refuse("report", compared, "-o", page, says=(os.strerror(errno.ENOSPC), "What was there is unchanged"))
