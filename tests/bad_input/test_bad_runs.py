"""Numbers that mean nothing, models that diverged, windows longer than a model, and names that talk to the terminal."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from bad_input_cases import Refuse, edit_config, rewrite, run_arguments
from safetensors.torch import load_file, save_file

from ace_moe import cli
from ace_moe.cli.serving import parse_kernels, refuse_flags, take_additional
from ace_moe.errors import ModelError, OptionError
from ace_moe.scoring.losses import Losses
from command import run_ace

SMALL = ("--tokens", 128, "--window", 64, "--device", "cpu")


def compare(model: Path, text: Path, *more: object) -> tuple[object, ...]:
    return ("compare", model, "--text", text, "-o", text.with_name("r.json"), *SMALL, "--methods", "share", *more)


@pytest.mark.parametrize("value", ["nan", "inf", "-0.5", "1", "0.5,nan"])
def test_budgets_of_every_command(value: str, single: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    says = ("a fraction from 0 to less than 1", "such as 0.5")
    refuse(*compare(single, text, f"--budgets={value}"), says=says)
    refuse("bench", single, f"--skip={value}", says=says)
    refuse("study", "thresholds", single, "--text", text, "--text", text, *SMALL, f"--budgets={value}", says=says)
    refuse("eval", single, "-p", plan, "--tasks", "piqa", f"--skip={value}", "-o", text.with_name("e.json"), says=says)


@pytest.mark.parametrize(("option", "value"), [("--min-mass", "nan"), ("--min-mass", "2"), ("--min-active", "0")])
def test_safeguards_of_compare(option: str, value: str, single: Path, text: Path, refuse: Refuse) -> None:
    refuse(*compare(single, text, option, value), says=(option.strip("-").replace("-", "_"),))


def test_options_that_would_be_ignored(single: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    refuse("plan", single, "--tables", "--text", text, "-o", plan, says=("leave --text out",))
    refuse("run", single, "-p", plan, "--prompt", "x", "--policy", "gsp", "--preset", "paper", says=("not both",))
    mapped = ("plan", single, "-p", plan, "--text", text, *SMALL, "--budgets", 0.5)
    refuse(*mapped, "--max-kl", 0.1, says=("leave --budgets out",))
    refuse(*compare(single, text, "--rival", "gsp"), says=("--rival is one of", "share"))
    refuse("bench", single, "--layers", 1, says=("--layers is for --shape",))
    refuse("bench", single, "--decode", "16x1x3", says=("16x1x3", "tokens x batch"))
    refuse("bench", single, "--chart", text.with_name("c.xyz"), says=("not a picture that can be drawn", "png"))
    refuse("serve", single, "-p", plan, "--dry-run", "--trace-tokens", 5, says=("--trace FILE",))
    asked = ("eval", single, "-p", plan, "--tasks", "piqa", "-o", text.with_name("e.json"))
    refuse(*asked, "--harness", "evalscope", "--chat", says=("--harness lm-eval",))


@pytest.mark.parametrize("flag", ["--additional-config", "--additional_config"])
def test_vllms_own_configuration_joins_ours(flag: str) -> None:
    """vLLM takes both spellings, and the last one alone."""
    for given in ([flag, '{"a": 1}'], [f'{flag}={{"a": 1}}']):
        assert take_additional(["--x", *given, "y"]) == (["--x", "y"], {"a": 1})


# ---- models that diverged ---------------------------------------------------------------------------------------------


def scaled(folder: Path, factor: float) -> Path:
    """The model with its head times a factor."""
    path = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    tensors["lm_head.weight"] *= factor
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("factor", [float("nan"), 1e38, 1e6], ids=["nan", "infinite", "beyond exp"])
def test_perplexity_of_a_diverged_model(factor: float, single: Path, text: Path, refuse: Refuse) -> None:
    scaled(single, factor)
    says = ("The model gives no", "on this text")
    refuse("perplexity", single, "--text", text, *SMALL, says=says)
    refuse("perplexity", single, "--text", text, *SMALL, "-o", text.with_name("p.json"), says=says)
    refuse(*compare(single, text, "--budgets", 0.5), says=says)


def test_perplexity_that_is_no_number() -> None:
    for nll in ([float("nan")], [1e6], [float("inf")]):
        with pytest.raises(ModelError, match="The model gives no"):
            _ = Losses(nll, 10).perplexity


# ---- sizes ------------------------------------------------------------------------------------------------------------


def test_window_above_the_models_length(single: Path, plan: Path, tmp_path: Path, refuse: Refuse) -> None:
    """The model has 512 positions; past them its numbers are of no use to anyone."""
    text = tmp_path / "long.txt"
    text.write_text("All that is gold does not glitter. " * 60)
    says = ("513", "512 positions", "--window")
    long = ("--window", 513, "--tokens", 1026, "--device", "cpu")
    refuse("plan", single, "-p", plan, "--text", text, *long, says=says)
    refuse("perplexity", single, "--text", text, *long, says=says)
    refuse("compare", single, "--text", text, "-o", tmp_path / "r.json", *long, says=says)
    edit_config(single, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0})
    assert run_ace("perplexity", single, "--text", text, *long).code == 0


def test_no_slot_for_a_token(single: Path, plan: Path, refuse: Refuse) -> None:
    edit_config(single, num_experts_per_tok=0)
    says = ("no expert", "num_experts_per_tok", "download it again")
    refuse("plan", single, "--tables", "-o", plan, says=says)
    refuse("inspect", single, says=says)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"phase": "junk"}, "phase"),
        ({"gain": ""}, "gain"),
        ({"gain": "x" * 99}, "gain"),
        ({"min_active": -1}, "min_active"),
    ],
    ids=str,
)
def test_entries_that_mean_nothing(change: dict[str, Any], said: str, single: Path, plan: Path, refuse: Refuse) -> None:
    rewrite(plan, meta=lambda meta: meta["thresholds"][0].update(change))
    refuse(*run_arguments(single, plan), says=(said,))


def test_router_changed_in_memory(single: Path, plan: Path) -> None:
    """A token then has other slots than the plan was made for."""
    from ace_moe import ACE
    from ace_moe.checkpoint.loading import load_model
    from ace_moe.errors import PlanError

    model = load_model(single, "cpu")
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 2
    with pytest.raises(PlanError, match="top_k 4 in the plan, 2 in the model"):
        ACE.load(plan, 0.5).attach(model)


# ---- flags of ace serve -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["²", "٣", "-1", "1.5", ""])
def test_kernels(value: str) -> None:
    """Digits that are no number to Python's int()."""
    with pytest.raises(OptionError, match="--kernels is auto, on, off or"):
        parse_kernels(value)
    assert parse_kernels("16") == 16


@pytest.mark.parametrize(
    "flag",
    ["--enable-lora", "--enable_lora", "--enable-lora=true", "--enable_lora=True", "--enable-dbo", "--enable_dbo"],
)
def test_flags_that_are_refused(flag: str) -> None:
    """vLLM takes both spellings."""
    with pytest.raises(OptionError, match=flag.split("=")[0].replace("_", "-")):
        refuse_flags(["--port", "80", flag])
    refuse_flags(["--port", "80"])


# ---- the terminal -----------------------------------------------------------------------------------------------------


def test_names_do_not_reach_the_terminal_as_commands(single: Path, plan: Path, text: Path, capsys: Any) -> None:
    """A model, a layer or a text may be called anything, `clear the screen` included."""
    evil = "a\x1b[2J\x1b]0;title\x07\x9b31mb\x7f\u202ec"
    rewrite(plan, meta=lambda meta: meta.update(model=evil))
    rewrite(plan, meta=lambda meta: meta["thresholds"][0]["workload"].update(name=evil))
    for ran in (run_ace("inspect", plan), run_ace("plan", f"./{evil}", "--tables"), run_ace("inspect", f"{evil}/x")):
        for character in "\x1b\x07\x9b\x7f\u202e":
            assert character not in ran.out + ran.err
    assert "a\\x1b[2J" in run_ace("inspect", plan).out.replace("\n", "")
    assert json.loads(run_ace("inspect", plan, "--json").out)["model"] == evil


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
@pytest.mark.parametrize(
    "arguments", [("--help",), ("demo", "--help"), ("inspect", "PLAN"), ("plan", "no/τ–→", "--tables")], ids=str
)
def test_terminals_without_unicode(encoding: str, arguments: tuple[str, ...], plan: Path) -> None:
    """– → τ become what the terminal has."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    given = [str(plan) if a == "PLAN" else a for a in arguments]
    with patch.object(sys, "argv", ["ace", *given]), patch.multiple(sys, stdout=streams[0], stderr=streams[1]):
        with pytest.raises(SystemExit):
            cli.main()
        for stream in streams:
            stream.flush()
    said = b"".join(stream.buffer.getvalue() for stream in streams)  # type: ignore[attr-defined]
    assert len(said) > 40 and b"Traceback" not in said
    if arguments[0] == "tables" and encoding == "ascii":
        assert b"no/tau-->" in said.replace(b"\n", b"")
