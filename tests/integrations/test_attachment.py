"""What people do with an attached model: each thing works, or is refused by name."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel, Qwen3MoeForCausalLM, Qwen3MoeForSequenceClassification

import ace_moe
import zoo
from ace_moe import ACE, build_plan
from ace_moe.checkpoint.loading import load_model
from ace_moe.decider import Decider
from ace_moe.demo import MODEL
from ace_moe.errors import IntegrationError
from ace_moe.plan import Plan

TAU = 0.13


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(MODEL, device="cpu").float()


@pytest.fixture(scope="module")
def plan(demo_plan: Plan) -> Plan:
    return demo_plan


@pytest.fixture(scope="module")
def stock(model: PreTrainedModel) -> torch.Tensor:
    return zoo.run(model)


@pytest.fixture(scope="module")
def skipped(model: PreTrainedModel, plan: Plan) -> torch.Tensor:
    with ACE(plan)(model) as ace:
        ace.set_threshold(TAU)
        return zoo.run(model)


def on(ace: ACE, model: PreTrainedModel) -> ACE:
    ace.attach(model)
    ace.set_threshold(TAU)
    return ace


# ---- one config, several models -----------------------------------------------------------------------------------------


def test_two_models_that_share_a_config(model: PreTrainedModel, plan: Plan, skipped: torch.Tensor) -> None:
    """Detaching one leaves the other attached; the config names neither."""
    config = AutoConfig.from_pretrained(MODEL)
    pair = [Qwen3MoeForCausalLM(config).eval() for _ in range(2)]
    for one in pair:
        one.load_state_dict(model.state_dict())
    first, second = (on(ACE(plan), one) for one in pair)
    first.detach()
    assert not torch.equal(zoo.run(pair[0]), skipped)
    assert torch.equal(zoo.run(pair[1]), skipped)
    assert second.realised > 0.3
    second.detach()
    assert config._experts_implementation != "ace"
    assert torch.equal(zoo.run(pair[1]), zoo.run(pair[0]))


def test_another_implementation_while_attached(
    model: PreTrainedModel, plan: Plan, skipped: torch.Tensor, stock: torch.Tensor
) -> None:
    """The model's own setting changes and comes into force on detaching; skipping goes on."""
    before = model.config._experts_implementation
    ace = on(ACE(plan), model)
    try:
        model.set_experts_implementation("eager")
        assert torch.equal(zoo.run(model), skipped) and ace.realised > 0.3
        ace.detach()
        assert model.config._experts_implementation == "eager"
        torch.testing.assert_close(zoo.run(model), stock)
    finally:
        ace.detach()
        model.set_experts_implementation(before)


# ---- copies, moves, ends ------------------------------------------------------------------------------------------------


def test_a_copy_is_a_model_without_a_plan(model: PreTrainedModel, plan: Plan, stock: torch.Tensor) -> None:
    """Its logits are stock's to the bit, it generates for itself, and what it does is not counted."""
    ace = on(ACE(plan), model)
    try:
        other = copy.deepcopy(model)
        ace.reset()
        assert torch.equal(zoo.run(other), stock)
        ids = zoo.inputs()["input_ids"]
        made = other.generate(ids, max_new_tokens=3, do_sample=False)
        assert ace.report()["prefill"]["routed"] == 0
    finally:
        ace.detach()
    assert torch.equal(made, model.generate(ids, max_new_tokens=3, do_sample=False))
    assert not any(isinstance(m, Decider) for m in other.modules())
    with ACE(plan)(other):
        assert torch.equal(zoo.run(other), stock)


@pytest.mark.parametrize("change", ["bfloat16", "half", "double"])
def test_another_precision_keeps_tau_and_tables(plan: Plan, change: str) -> None:
    model = load_model(MODEL, device="cpu").float()
    with ACE(plan)(model) as ace:
        ace.set_threshold(0.123456789)
        layer = next(iter(ace.deciders.values()))
        before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        getattr(model, change)()
        model.to("cpu")
        assert {n: b.dtype for n, b in layer.named_buffers()} == {n: b.dtype for n, b in before.items()}
        assert all(torch.equal(b, before[n]) for n, b in layer.named_buffers())
        ace.set_threshold(0.2)
        assert layer.tau[1] == torch.tensor(0.2), "layers and deciders still share one tensor"
        if change != "double":  # stock's own product does not take it
            assert zoo.run(model).isfinite().all() and ace.realised > 0


def test_a_model_that_is_dropped_is_gone(plan: Plan) -> None:
    """`del` without detaching: nothing holds the weights, and the plan can be attached again."""
    model = load_model(MODEL, device="cpu")
    ace = on(ACE(plan), model)
    zoo.run(model)
    gone, experts = weakref.ref(model), weakref.ref(model.model.layers[0].mlp.experts)
    del model
    gc.collect()
    assert gone() is None and experts() is None
    assert ace.realised > 0.3, "the counters stay readable"
    with ace(load_model(MODEL, device="cpu")):
        pass


def test_detach_without_the_handle(model: PreTrainedModel, plan: Plan, stock: torch.Tensor) -> None:
    """As in a notebook whose cell ran twice: the old ACE is out of reach, the model still attached."""
    on(ACE(plan), model)
    with pytest.raises(IntegrationError, match=r"ace_moe\.detach\(model\)"):
        ACE(plan).attach(model)
    ace_moe.detach(model)
    assert torch.equal(zoo.run(model), stock)
    ace_moe.detach(model)


def test_pickling_is_refused_and_saving_is_not(model: PreTrainedModel, plan: Plan, tmp_path: Path) -> None:
    names = set(model.state_dict())
    with ACE(plan)(model):
        with pytest.raises(IntegrationError, match="cannot be pickled"):
            torch.save(model, tmp_path / "model.pt")
        assert set(model.state_dict()) == names
        model.save_pretrained(tmp_path / "saved")
    again = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert "ace" not in (tmp_path / "saved" / "config.json").read_text().replace("whitespace", "").replace("space", "")
    assert torch.equal(zoo.run(again.float()), zoo.run(model))


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda ace: pickle.loads(pickle.dumps(ace))])
def test_a_copy_of_a_handle_is_attached_to_nothing(
    model: PreTrainedModel, plan: Plan, skipped: torch.Tensor, copied: Any, attached: bool
) -> None:
    """Also one that is sent to another process: with the thresholds of the first, and counters of its own."""
    with ACE(plan)(model) as ace:
        ace.set_threshold(TAU)
        zoo.run(model)
        other = copied(ace) if attached else None
        counted = ace.realised
    other = other or copied(ace)
    assert other.realised == 0 and "not attached" in repr(other) and ace.realised == counted > 0.3
    with other(model):
        assert torch.equal(zoo.run(model), skipped)
    assert other.realised == counted


# ---- what cannot be attached --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, "Qwen/Qwen3-30B-A3B", Path(), nn.Linear(2, 2)])
def test_what_is_no_model(plan: Plan, wrong: Any) -> None:
    with pytest.raises(IntegrationError, match="a loaded transformers model"):
        ACE(plan).attach(wrong)


def test_compiled_and_parallel_models_are_refused(plan: Plan) -> None:
    model = load_model(MODEL, device="cpu")
    for wrapped, words in (
        (torch.compile(model), "Attach first, then compile"),
        (nn.DataParallel(model), r"model inside DataParallel \(`model.module`\)"),
    ):
        with pytest.raises(IntegrationError, match=words):
            ACE(plan).attach(wrapped)
    model.compile()
    with pytest.raises(IntegrationError, match="Attach first, then compile"):
        ACE(plan).attach(model)


def test_parts_that_are_compiled(plan: Plan, skipped: torch.Tensor) -> None:
    """Wrapped, they are refused by name; in place, or attached before, they are compiled again with the plan."""
    model = load_model(MODEL, device="cpu").float()
    layers, ace = model.model.layers, ACE(plan)
    for take in (ace.attach, ACE.from_pretrained):
        layers[1], plain = torch.compile(layers[1], backend="eager"), layers[1]
        with pytest.raises(IntegrationError, match=r"model\.layers\.1 is compiled already.*Attach first"):
            take(model)
        layers[1] = plain
    layers[0].compile(backend="eager")
    zoo.run(model)
    on(ace, model)
    layers[1] = torch.compile(layers[1], backend="eager")
    torch.testing.assert_close(zoo.run(model), skipped)
    ace.detach()


def test_replicas_are_refused(model: PreTrainedModel, plan: Plan) -> None:
    with ACE(plan)(model):
        model.model._is_replica = True
        try:
            with pytest.raises(IntegrationError, match=r"nn\.DataParallel"):
                zoo.run(model)
        finally:
            del model.model._is_replica
        assert zoo.run(model).isfinite().all(), "the refused pass let go"


# ---- ways to attach -----------------------------------------------------------------------------------------------------


def test_inside_inference_mode(model: PreTrainedModel, plan: Plan, skipped: torch.Tensor) -> None:
    """Buffers made there would refuse to change outside."""
    with torch.inference_mode():
        ace = on(ACE(plan), model)
        inside = zoo.run(model)
    try:
        assert torch.equal(inside, skipped)
        ace.set_threshold(0.0)
        ace.reset()
        zoo.run(model)
        assert ace.realised == 0
    finally:
        ace.detach()


def test_classification_head_in_bf16(plan: Plan) -> None:
    """Its head stays in another precision than the rest where a twin is built; the plan is the causal model's."""
    model = Qwen3MoeForSequenceClassification.from_pretrained(MODEL, dtype=torch.bfloat16, num_labels=3).eval()
    model.config.pad_token_id = 0
    with ACE(plan)(model) as ace, torch.no_grad():
        ace.set_threshold(TAU)
        out = model(**zoo.inputs())
    assert out.logits.shape == (2, 3) and ace.realised > 0.3


def test_peft_adapters(plan: Plan) -> None:
    peft = pytest.importorskip("peft")
    model = load_model(MODEL, device="cpu").float()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    ace = on(ACE(plan), wrapped)
    wrapped.generate(input_ids=zoo.inputs()["input_ids"], max_new_tokens=3, do_sample=False)
    assert ace.report()["decode"]["routed"] > 0 and ace.realised > 0.3
    ace.detach()
    adapted = peft.get_peft_model(
        load_model(MODEL, device="cpu"), peft.LoraConfig(target_parameters=["mlp.experts.down_proj"], r=2)
    )
    with pytest.raises(IntegrationError, match="has an adapter"):
        ACE(plan, allow_other_weights=True).attach(adapted)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_accelerate_offload(plan: Plan, where: str, skipped: torch.Tensor, tmp_path: Path) -> None:
    """Weights that are parked elsewhere between two passes, attached before and after."""
    accelerate = pytest.importorskip("accelerate")
    model = load_model(MODEL, device="cpu").float()
    if where == "cpu":
        accelerate.cpu_offload(model, torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(tmp_path), torch.device("cpu"))
    with ACE(plan)(model) as ace:
        ace.set_threshold(TAU)
        assert torch.equal(zoo.run(model), skipped)
        assert ace.realised > 0.3
    first = load_model(MODEL, device="cpu").float()
    ace = on(ACE(plan), first)
    accelerate.cpu_offload(first, torch.device("cpu"))
    assert torch.equal(zoo.run(first), skipped)
    ace.detach()


def test_build_plan_of_an_attached_model(model: PreTrainedModel, plan: Plan) -> None:
    """Tables read weights, which a plan does not change."""
    before = build_plan(model)
    with ACE(plan)(model):
        assert build_plan(model) == before
