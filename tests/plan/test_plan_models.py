"""The model a plan belongs to: its structure is named where it differs, its routers are known in any precision, its
experts are compared in words."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import plan_of
from transformers import PreTrainedModel

import zoo
from ace_moe import ACE, build_plan
from ace_moe.checkpoint import MoEModel
from ace_moe.checkpoint.loading import load_model
from ace_moe.demo import MODEL
from ace_moe.errors import CheckpointError, PlanError
from ace_moe.plan import Fingerprint, Plan, Routers, Sample


def test_plan_fits_its_own_model() -> None:
    plan = plan_of()
    assert plan.check_model(plan.fingerprint) is plan


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"experts": 16}, "layer 1 has experts 8 in the plan, 16 in the model"),
        ({"top_k": 2}, "layer 1 has top_k 4 in the plan, 2 in the model"),
        ({"router": "same:8x32"}, "router"),
    ],
)
def test_another_structure_is_named(change: dict[str, Any], said: str) -> None:
    plan = plan_of()
    structure = plan.fingerprint.structure
    other = {**structure, "1": {**structure["1"], **change}}
    with pytest.raises(PlanError, match=said):
        plan.check_model(replace(plan.fingerprint, structure=other), allow_other_weights=True)


def test_other_layers_are_named() -> None:
    with pytest.raises(PlanError, match=r"0–1 \(2\) in the plan, 0–2 \(3\) in the model.*ace plan"):
        plan_of().check_model(plan_of(layers=3).fingerprint, allow_other_weights=True)


def test_other_weights_once_allowed_are_recorded(tmp_path: Path) -> None:
    """A quantised copy is accepted on request, remembered in the file, and needs no request again."""
    plan, copy = plan_of(), replace(plan_of().fingerprint, routers=Routers("d" * 64))
    with pytest.raises(PlanError, match=r"other router weights.*allow_other_weights"):
        plan.check_model(copy)
    taken = plan.check_model(copy, allow_other_weights=True)
    loaded = Plan.load(taken.save(tmp_path / "p.safetensors"))
    assert loaded.other_weights == ("d" * 64,)
    assert loaded.check_model(copy) is loaded
    assert loaded.check_model(plan.fingerprint) is loaded


# ---- routers in two precisions ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half() -> PreTrainedModel:
    return load_model(MODEL, "cpu", "float16")


def test_loads_in_fp16_and_bf16_are_one_model(
    demo_plan: Plan, demo_model: PreTrainedModel, half: PreTrainedModel
) -> None:
    """The smallest weights are other numbers in fp16, so the exact hashes differ; no permission is needed, no notice given."""
    assert (demo_model.dtype, half.dtype) == (torch.bfloat16, torch.float16)
    one, other = MoEModel.of(demo_model).fingerprint(), MoEModel.of(half).fingerprint()
    assert one.routers.exact != other.routers.exact
    assert one.routers.coarse == other.routers.coarse
    assert one.experts == other.experts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for plan, model in ((demo_plan, half), (build_plan(half), demo_model)):
            with ACE(plan)(model) as ace:
                assert ace.plan.other_weights == ()


def test_permission_holds_in_both_precisions() -> None:
    """What is recorded is the coarse hash, if there is one."""
    plan = plan_of()
    copy = replace(plan.fingerprint, routers=Routers("d" * 64, "e" * 64))
    taken = plan.check_model(copy, allow_other_weights=True)
    assert taken.check_model(replace(copy, routers=Routers("f" * 64, "e" * 64))) is taken


def test_unknown_coarse_hashes_are_not_equal() -> None:
    """Two plans of schema 1 have none; that makes them no pair."""
    plan = plan_of()
    assert not plan.fingerprint.same_routers(replace(plan.fingerprint, routers=Routers("d" * 64)))
    assert not plan.fingerprint.same_routers(replace(plan.fingerprint, structure={}))


# ---- experts ----------------------------------------------------------------------------------------------------


def with_experts(fingerprint: Fingerprint, *rms: float, sample: str = "s") -> Fingerprint:
    return replace(fingerprint, experts={"0": Sample((0.02, 0.02), "z"), "1": Sample(rms, sample)})


@pytest.mark.parametrize(
    ("rms", "said"),
    [
        ((2.0, 0.0198), r"layer 1 are 100× larger than the plan's \(rms 2 against 0.02\)"),
        ((0.02, 0.002), r"layer 1 are 10× smaller than the plan's \(rms 0.002 against 0.02\)"),
        ((0.0206, 0.02), r"layer 1 are 3.0% larger than the plan's"),
        ((0.02, 0.02), r"layer 1 have other values of the same size \(rms 0.02 against 0.02\)"),
        ((0.0, 0.02), r"smaller than the plan's \(rms 0 against 0.02\)"),
    ],
)
def test_other_experts_are_said_in_words(rms: tuple[float, ...], said: str) -> None:
    """Never a refusal: a copy in another format has other experts too."""
    plan = plan_of()
    plan = replace(plan, fingerprint=with_experts(plan.fingerprint, 0.02, 0.02))
    with pytest.warns(UserWarning, match=rf"in 1 of 2 layers a sample differs; .*{said}.*a few per cent.*ace plan"):
        assert plan.check_model(with_experts(plan.fingerprint, *rms, sample="t")) is plan


def test_experts_that_were_not_sampled_are_not_compared() -> None:
    plan = plan_of()
    assert plan.fingerprint.experts_notice(with_experts(plan.fingerprint, 0.02)) is None
    assert with_experts(plan.fingerprint, 0.02).experts_notice(plan.fingerprint) is None


def test_experts_a_hundred_times_larger_are_noticed(tmp_path: Path) -> None:
    """The same routers over other experts: only the sample can tell. From memory and from disk."""
    model = zoo.build("qwen3_moe", torch.bfloat16)
    plan = build_plan(model)
    site = MoEModel.of(model).sites[-1]
    model.get_submodule(site.path).down_proj.data.mul_(100)
    model.save_pretrained(tmp_path)
    for moe in (MoEModel.of(model), MoEModel.open(tmp_path)):
        with pytest.warns(UserWarning, match=rf"experts of layer {site.key} are \d\d.*× larger"):
            assert plan.check_model(moe.fingerprint()) is plan


def test_codes_without_factors_are_nobody() -> None:
    """Bytes that are no weights are not compared with weights: the model is refused by the tensor's name."""
    model = zoo.build("qwen3_moe")
    site = MoEModel.of(model).sites[-1]
    experts = model.get_submodule(site.path)
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"experts\.down_proj is F8_E4M3"):
        MoEModel.of(model)


def test_experts_without_a_number_are_left_out() -> None:
    model = zoo.build("qwen3_moe")
    site = MoEModel.of(model).sites[0]
    model.get_submodule(site.path).down_proj.data[0, 0, 0] = float("nan")
    assert site.key not in MoEModel.of(model).fingerprint().experts
