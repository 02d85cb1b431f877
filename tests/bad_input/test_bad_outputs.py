"""Output that cannot be written, a disk that is full and Ctrl-C leave the folder to the byte as it was."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bad_input_cases import Refuse, budget_arguments, paragraph, snapshot

from ace_moe import Plan
from ace_moe.checkpoint import loading
from ace_moe.mapping import Passes
from command import run_ace, start_ace


def test_output_in_no_folder(single: Path, tmp_path: Path, refuse: Refuse) -> None:
    for path in (tmp_path / "no" / "plan.safetensors", single / "config.json" / "plan.safetensors"):
        refuse(
            "plan", single, "--tables", "-o", path, says=("There is no folder", "Create it, or choose another place")
        )


def test_output_that_is_a_folder(single: Path, tmp_path: Path, refuse: Refuse) -> None:
    refuse("plan", single, "--tables", "-o", tmp_path, says=("it is a folder", "Choose another place"))


def test_read_only_folder(
    single: Path, plan: Path, text: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated, because root may write anywhere: the long work must not even start."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **more: mode != os.W_OK and access(path, mode, **more))
    monkeypatch.setattr("ace_moe.checkpoint.MoEModel.open", lambda *_: pytest.fail("the checkpoint was opened"))
    monkeypatch.setattr("ace_moe.checkpoint.loading.load_model", lambda *_: pytest.fail("the model was loaded"))
    says = ("no permission", "Choose another place")
    refuse("plan", single, "--tables", "-o", plan, says=says)
    refuse(*budget_arguments(single, plan, text), says=says)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that not even root can write to")
def test_folder_that_refuses_the_write(single: Path, refuse: Refuse) -> None:
    """/proc: root is told it may write there, and then may not."""
    refuse(
        "plan",
        single,
        "--tables",
        "-o",
        "/proc/plan.safetensors",
        says=("/proc/plan.safetensors", "hoose another place"),
    )


def test_demo_into_a_file(text: Path, refuse: Refuse) -> None:
    for path in (text, text / "deeper"):
        refuse("demo", "-o", path, says=("is a file", "Choose another folder with -o"))


def fail_with(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("place", ["fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_full_disk(
    place: str, number: int, single: Path, plan: Path, text: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in the write it strikes: the old plan is intact, no temporary file is left, the reason is named."""
    monkeypatch.setattr(os, place, fail_with(OSError(number, os.strerror(number))))
    says = (os.strerror(number), "What was there is unchanged", "free space")
    refuse("plan", single, "--tables", "-o", plan, says=says)
    refuse(*budget_arguments(single, plan, text), says=says)
    refuse("plan", single, "--tables", "-o", plan.with_name("new.safetensors"), says=says)


@pytest.mark.long
def test_file_that_may_not_grow(single: Path, plan: Path, tmp_path: Path) -> None:
    """As a process with a real limit of 512 bytes a file: the write itself fails half way."""
    before = snapshot(tmp_path)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (512, 512))
    ran = start_ace("plan", single, "--tables", "-o", plan, preexec_fn=limit, env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert os.strerror(errno.EFBIG) in paragraph(ran)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("place", ["fsync", "replace"])
@pytest.mark.parametrize("command", ["tables", "budget"])
def test_interrupted_write(
    place: str, command: str, single: Path, plan: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C inside the write: exit code 130, one line, and the folder as before."""
    monkeypatch.setattr(os, place, fail_with(KeyboardInterrupt()))
    before = snapshot(tmp_path)
    tables = ("plan", single, "--tables", "-o", plan)
    ran = run_ace(*(tables if command == "tables" else budget_arguments(single, plan, text)))
    assert ran.code == 130
    assert "interrupted; nothing half-written is left behind" in ran.err
    assert "Traceback" not in ran.err
    assert snapshot(tmp_path) == before


def test_interrupted_pass(
    originals: Path, plan: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the model reads the text."""
    monkeypatch.setattr(Passes, "__call__", fail_with(KeyboardInterrupt()))
    before = snapshot(tmp_path)
    assert run_ace(*budget_arguments(originals / "single", plan, text)).code == 130
    assert snapshot(tmp_path) == before


def test_two_budgets_at_once(
    originals: Path, plan: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second reads the plan, loads its model and writes while the first is at work: both results are there."""
    load, model = loading.load_model, originals / "single"

    def meanwhile(*given: Any, **options: Any) -> Any:
        monkeypatch.setattr(loading, "load_model", load)
        assert run_ace(*budget_arguments(model, plan, text, budgets="0.25")).code == 0
        return load(*given, **options)

    monkeypatch.setattr(loading, "load_model", meanwhile)
    assert run_ace(*budget_arguments(model, plan, text, budgets="0.5,0.625")).code == 0
    new = {t.budget for t in Plan.load(plan).thresholds if t.workload.sha256 != "0" * 64}
    assert new == {0.25, 0.5, 0.625}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.safetensors", "text.txt"]
