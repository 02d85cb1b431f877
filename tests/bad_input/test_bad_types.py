"""Things of another kind than the one that is meant, in Python: the error says which call takes them, or what to give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ace_moe import ACE, Plan, build_plan
from ace_moe.checkpoint.loading import load_model, load_tokenizer
from ace_moe.errors import BudgetError, CheckpointError, IntegrationError, OptionError, PlanError, TextError
from ace_moe.policies import make
from ace_moe.text import read_text


@pytest.mark.parametrize("given", ["plan.safetensors", Path("plan.safetensors"), None, {}])
def test_a_plan_that_is_not_loaded(given: Any) -> None:
    with pytest.raises(PlanError, match=r"`ACE\.load` reads one"):
        ACE(given, 0.3)


def test_what_is_no_path(good_plan: Plan) -> None:
    for use in (Plan.load, good_plan.save, read_text):
        for given in (None, 3, b"plan.safetensors"):
            with pytest.raises((OptionError, PlanError), match="not by"):
                use(given)  # type: ignore[arg-type]


def test_settings_in_part(good_plan: Plan) -> None:
    with pytest.raises(OptionError, match=r"gain, min_active, min_mass, params are missing.*make\("):
        good_plan.lookup({"policy": "share"}, 0.3)
    with pytest.raises(BudgetError, match=r"such as 0\.5"):
        good_plan.lookup(make("share").settings, "half")  # type: ignore[arg-type]


def test_what_no_plan_is_loaded_from(good_plan: Plan) -> None:
    for given in (good_plan, None, b"plan.safetensors", 3):
        with pytest.raises(PlanError, match=r"`ACE\(plan\)` takes one that is loaded"):
            ACE.load(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 3, b"demo"])
@pytest.mark.parametrize("take", [ACE.from_pretrained, build_plan, load_model, load_tokenizer])
def test_what_no_model_is_read_from(take: Any, given: Any) -> None:
    with pytest.raises(CheckpointError, match="a loaded transformers model, not"):
        take(given)


def test_the_commands_name_of_the_embedded_model() -> None:
    """`demo` is a word of the commands; the error names what Python has."""
    with pytest.raises(CheckpointError, match=r"`ace_moe\.demo\.MODEL`"):
        ACE.from_pretrained("demo")


def test_a_module_that_is_no_model() -> None:
    with pytest.raises(IntegrationError, match="not to Linear"):
        ACE.from_pretrained(nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [123, {"text": 3}, [1, 2], b"a text"])
def test_what_is_no_text(text: Any, originals: Path) -> None:
    with pytest.raises(TextError, match="a file, a string or a list of strings"):
        ACE.from_pretrained(originals / "single", text=text)


def test_a_workload_by_its_number(plan: Path) -> None:
    with pytest.raises(BudgetError, match="no workload 3"):
        ACE.load(plan, workload=3)


def test_an_adapter_on_the_router_is_named(originals: Path, good_plan: Plan) -> None:
    """`all-linear` takes the routers too: their rows are under another name then, and it is not the checkpoint's fault."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        load_model(originals / "single", device="cpu"), peft.LoraConfig(target_modules=["gate"], r=2)
    )
    for take in (ACE(good_plan).attach, ACE.from_pretrained):
        with pytest.raises(CheckpointError, match=r"gate has an adapter .*merge_and_unload"):
            take(adapted)


def test_a_model_with_adapters_is_the_model_inside(originals: Path) -> None:
    peft = pytest.importorskip("peft")
    model = load_model(originals / "single", device="cpu")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert ACE.from_pretrained(adapted).plan == build_plan(originals / "single")
