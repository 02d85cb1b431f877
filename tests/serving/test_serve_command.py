"""`ace serve` up to where vLLM starts: the command it makes, the plan it finds, what it refuses."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from serving_cases import Case, environment, prompts, reference, run_engine

from ace_moe import ACE
from ace_moe.checkpoint.loading import load_model
from ace_moe.demo import TEXT
from ace_moe.plan import Plan


def ace(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "ace"), "serve", *options]
    return subprocess.run(
        command, env={**environment(), **env}, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.vllm
def test_command_line(case_of: Callable[[str], Case], mapped: Path, tmp_path: Path) -> None:
    model = str(case_of("demo").model)
    own = '{"gdn_prefill_backend": "triton"}'
    done = ace(
        model, "--plan", str(mapped), "--skip", "0.5", "--skip-decode", "0.2", "--skip-verify", "0.0", "--kernels",
        "off", "-tp", "2", "--additional-config", own, "--port", "80", "--dry-run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout)
    config = json.loads(command[command.index("--additional-config") + 1])
    assert config["ace"]["skip"] == {"prefill": 0.5, "decode": 0.2, "verify": 0.0}
    assert config["ace"]["kernels"] is False
    assert config["gdn_prefill_backend"] == "triton" and command.count("--additional-config") == 1
    assert command[-4:] == ["-tp", "2", "--port", "80"] and model in command


@pytest.mark.vllm
def test_command_line_refuses_before_vllm_starts(case_of: Callable[[str], Case], mapped: Path, tmp_path: Path) -> None:
    model, glm = str(case_of("demo").model), str(case_of("glm4").model)
    for options, reason in (
        ((model, "--plan", str(tmp_path / "none")), "There is no plan at"),
        ((glm, "--plan", str(mapped)), "The plan is of another model"),
        ((model, "--plan", str(mapped), "--skip", "0.95"), "cannot be met"),
        ((model, "--plan", str(mapped), "--skip", "0.8", "--workload", "none.txt"), "none.txt"),
        ((model, "--plan", str(mapped), "--skip", "0.5", "--enable-lora"), "--enable-lora"),
        ((model, "--plan", str(mapped), "--kernels", "fast"), "--kernels is"),
    ):
        done = ace(*options, "--dry-run")
        assert done.returncode == 1 and reason in " ".join(done.stderr.split()), done.stderr


@pytest.mark.vllm
def test_plan_is_made_when_none_is_given(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    model = str(case_of("demo").model)
    cache = {"ACE_CACHE": str(tmp_path / "cache")}
    first = ace(model, "--dry-run", **cache)
    said = " ".join(first.stderr.split())
    assert first.returncode == 0 and "keeping one of" in said and "the model writes itself" in said, said
    (made,) = (tmp_path / "cache").glob("*.safetensors")
    assert not any(Plan.load(made).tables.values()), "the default policy reads none"
    again = ace(model, "--skip", "0.3", "--dry-run", **cache)  # the budget where none is given
    assert again.returncode == 0 and "made earlier" in again.stderr and "mapping" not in again.stderr, again.stderr
    assert [(t.budget, t.workload.name) for t in Plan.load(made).thresholds] == [(0.3, "own text")]
    done = ace(model, "--skip", "0.5", "--text", sample(tmp_path), "--dry-run", **cache)
    assert done.returncode == 0, done.stderr
    assert (0.5, "sample.txt") in [(t.budget, t.workload.name) for t in Plan.load(made).thresholds]
    command = shlex.split(done.stdout)
    config = json.loads(command[command.index("--additional-config") + 1])
    assert os.path.samefile(config["ace"]["plan"], made)


def sample(folder: Path) -> str:
    """A text that is mapped on in seconds."""
    text = folder / "sample.txt"
    text.write_text(TEXT.read_text(encoding="utf-8")[:20000], encoding="utf-8")
    return str(text)


@pytest.mark.vllm
def test_a_policy_that_needs_further_tables(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """The plan has none for it: `ace serve` adds them with the thresholds, and a worker that finds none makes its own."""
    case, path = case_of("demo"), tmp_path / "plan.safetensors"
    shutil.copy(case.plan, path)
    given = [str(case.model), "--plan", str(path), "--policy", "aimer", "--skip", "0.5", "--dry-run"]
    done = ace(*given, "--text", sample(tmp_path))
    assert done.returncode == 0, done.stderr
    made = Plan.load(path)
    assert not made.lacks(["aimer"]) and [(t.policy, t.budget) for t in made.thresholds] == [("aimer", 0.5)]
    tau = made.thresholds[0].threshold
    settings = {"plan": str(case.plan), "policy": "aimer"}  # a plan without the table
    step = run_engine(tmp_path / "engine", case.model, settings, [{"threshold": tau}], enforce_eager=True)["steps"][0]
    model, theirs = load_model(case.model, device="cpu", dtype="float32"), ACE(made, policy="aimer")
    with theirs(model):
        expected, _ = reference(model, theirs, tau, prompts())
    assert step["tokens"] == expected.tokens
    assert step["report"]["realised"] == pytest.approx(expected.realised, abs=0.002) and expected.realised > 0.3
