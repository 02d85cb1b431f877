"""The transformers integration as a user meets it: context manager, generate, padding, budgets changed on the fly."""

import copy

import pytest
import torch
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface

import zoo
from ace_moe import ACE, build_plan
from ace_moe.errors import BudgetError, IntegrationError, PlanError
from ace_moe.mapping import map_budgets
from ace_moe.policies import make


@pytest.fixture(scope="module")
def plan(demo_model):
    return build_plan(demo_model)


def state_of(model):
    """Everything attach touches."""
    modules = [
        (n, m._is_expert_parallel if hasattr(m, "_is_expert_parallel") else None) for n, m in model.named_modules()
    ]
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    buffers = sorted(n for n, _ in model.named_buffers())
    own = [(type(m), sorted(vars(m)), id(getattr(m, "config", None))) for m in model.modules()]
    return modules, hooks, buffers, own, model.config._experts_implementation, sorted(model.state_dict())


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_detach_restores_the_model_also_after_an_exception(demo_model, plan, implementation):
    before_all = demo_model.config._experts_implementation
    demo_model.set_experts_implementation(implementation)
    before = state_of(demo_model)
    try:
        with pytest.raises(ZeroDivisionError), ACE(plan)(demo_model):
            assert demo_model.config._experts_implementation == implementation, "the model's own config is not touched"
            assert state_of(demo_model) != before
            raise ZeroDivisionError
        assert state_of(demo_model) == before
    finally:
        demo_model.set_experts_implementation(before_all)


def test_a_failed_attach_leaves_nothing_behind(demo_model, plan, monkeypatch):
    before = state_of(demo_model)
    monkeypatch.setattr("ace_moe.engines.transformers.attachment.listen", lambda: 1 / 0)  # the last step but one
    with pytest.raises(ZeroDivisionError):
        ACE(plan).attach(demo_model)
    assert state_of(demo_model) == before


def test_attaching_twice_is_refused(demo_model, plan):
    ace = ACE(plan)
    with ace(demo_model):
        with pytest.raises(IntegrationError, match="attached"):
            ace.attach(demo_model)
        with pytest.raises(IntegrationError, match="already"):
            ACE(plan).attach(demo_model)
    assert demo_model.model.layers[0].mlp.experts.config is demo_model.config


def test_both_registries_know_the_implementation():
    assert "ace" in ExpertsInterface() and "ace" in FP8ExpertsInterface()


def test_generate_counts_prefill_and_decode_apart(demo_model, plan):
    ace = ACE(plan)
    ids = zoo.inputs(batch=2, tokens=9)["input_ids"]
    with ace(demo_model):
        ace.set_threshold(torch.tensor([0.12, 0.08]))
        demo_model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    report = ace.report()
    slots = 8 * len(ace.deciders)
    assert report["prefill"]["routed"] == 2 * 9 * slots
    assert report["decode"]["routed"] == 2 * 4 * slots, "the first new token comes from the prefill"
    assert report["prefill"]["realised"] > report["decode"]["realised"] > 0
    assert sum(layer["prefill"]["kept"] for layer in report["layers"].values()) == report["prefill"]["kept"]
    assert ace.realised == report["realised"]


def test_generates_switch_of_implementations_leaves_us_alone(demo_model, plan, monkeypatch):
    """On a GPU generate() turns grouped_mm into batched_mm for decoding, which pays for skipped slots."""
    ace = ACE(plan)
    with ace(demo_model):
        monkeypatch.setattr(type(demo_model), "device", property(lambda self: torch.device("cuda")))
        with demo_model._optimize_model_for_decode():
            assert all(m.config._experts_implementation == "ace" for m in demo_model.modules() if hasattr(m, "ace"))


def test_padding_is_not_counted_and_changes_nothing(demo_model, plan):
    """A left-padded row gives the kept counts of the same row alone."""
    row = zoo.inputs(batch=1, tokens=7)["input_ids"]
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), row], 1)
    mask = torch.cat([torch.zeros(1, 5), torch.ones(1, 7)], 1).long()
    reports = []
    model = copy.deepcopy(demo_model).float()
    with ACE(plan)(model) as ace:
        ace.set_threshold(0.12)
        for inputs in (
            {"input_ids": row, "attention_mask": mask[:, 5:]},
            {"input_ids": padded, "attention_mask": mask},
        ):
            ace.reset()
            with torch.no_grad():
                model(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0))
            reports.append(ace.report())
    assert reports[0]["prefill"] == reports[1]["prefill"]
    assert reports[1]["padding"] == "not counted"


def test_without_a_mask_the_report_says_so(demo_model, plan):
    with ACE(plan)(demo_model) as ace, torch.no_grad():
        demo_model(**zoo.inputs())
    assert ace.report()["padding"].startswith("counted")


def test_a_batch_is_decided_token_by_token(demo_model, plan):
    both = zoo.inputs(batch=2, tokens=10)["input_ids"]
    kept = []
    model = copy.deepcopy(demo_model).float()
    with ACE(plan)(model) as ace:
        ace.set_threshold(0.12)
        for ids in (both[:1], both[1:], both):
            ace.reset()
            zoo.run(model, input_ids=ids)
            kept.append(ace.report()["prefill"]["kept"])
    assert kept[0] + kept[1] == kept[2]


def test_a_plan_of_other_weights_is_refused_unless_allowed(demo_model, plan):
    other = copy.deepcopy(demo_model)
    with torch.no_grad():
        other.model.layers[2].mlp.gate.weight[3, 5] += 1
    with pytest.raises(PlanError, match="other router weights"):
        ACE(plan).attach(other)
    ace = ACE(plan, allow_other_weights=True)
    with ace(other):
        assert len(ace.plan.other_weights) == 1


def test_multimodal_wrapper_and_text_model_share_a_plan():
    """The text part inside a vision-language wrapper has other module paths, the same layers and the same plan."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = zoo.build("qwen3_5_moe")
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": zoo.HIDDEN}
    config = Qwen3_5MoeConfig(text_config=text.config.to_dict(), vision_config=vision)
    wrapper = Qwen3_5MoeForConditionalGeneration(config).eval()
    wrapper.model.language_model.load_state_dict(text.model.state_dict())
    wrapper.lm_head.load_state_dict(text.lm_head.state_dict())
    plan = build_plan(text)
    with ACE(plan)(wrapper) as ace:
        ace.set_threshold(0.25)
        inside = zoo.run(wrapper)
        inside_kept = ace.report()["prefill"]["kept"]
    with ACE(plan)(text) as ace:
        ace.set_threshold(0.25)
        torch.testing.assert_close(zoo.run(text), inside)
        assert ace.report()["prefill"]["kept"] == inside_kept
    assert wrapper.config.text_config._experts_implementation != "ace"


def test_vision_experts_are_listed_as_not_covered():
    from ace_moe.checkpoint import MoEModel

    moe = MoEModel.of(zoo.build("ernie4_5_vl_moe"))
    assert moe.not_covered and all("vision" in path for path in moe.not_covered)
    assert [s.key for s in moe.sites] == ["1", "2", "3"], "dense layers are counted, not listed"


@pytest.mark.parametrize("policy", ["ace", "gsp", "rcr", "share"])
def test_every_policy_runs(demo_model, plan, policy):
    with ACE(plan, policy=make(policy))(demo_model) as ace:
        ace.set_threshold(0.12)
        assert zoo.run(demo_model).isfinite().all()
    assert 0.2 < ace.realised < 0.8


def test_budget_of_prefill_and_decode_may_differ(demo_model, plan, demo_windows):
    mapped = map_budgets(demo_model, plan, make("ace"), demo_windows, [0.3, 0.5], correct=False)
    low, high = (fit.threshold for fit in mapped.fits)
    ace = ACE(mapped.plan, {"prefill": 0.5, "decode": 0.3})
    assert ace.thresholds.tolist() == pytest.approx([high, low, low]), "verify follows decode"
    ace.set_skip({"prefill": 0.0, "decode": 0.5, "verify": 0.3})
    assert ace.thresholds.tolist() == pytest.approx([0.0, high, low])


@pytest.mark.parametrize("skip", [{"decode": 0.5}, {}, {"prefill": 0.5}, {"both": 0.3, "decode": 0.3}, {"prompt": 0.1}])
def test_budgets_by_phase_name_both(plan, skip):
    """Half a mapping would set the other half to something nobody asked for."""
    with pytest.raises(BudgetError, match=r'"prefill": 0\.3, "decode": 0\.5'):
        ACE(plan, skip)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1, "half", True, [0.1, 0.2, 0.3, 0.4], None])
def test_thresholds_that_are_none(plan, bad):
    ace = ACE(plan)
    with pytest.raises(BudgetError, match="A threshold is a number of at least 0"):
        ace.set_threshold(bad)
    assert ace.thresholds.tolist() == [0, 0, 0]


def test_from_pretrained_maps_when_a_model_comes(demo_model, demo_folder):
    from ace_moe.demo import TEXT

    ace = ACE.from_pretrained(demo_folder, skip={"prefill": 0.5, "decode": 0.0}, text=TEXT, tokens=1024)
    with ace(demo_model):
        assert ace.realised == 0, "the mapping passes are not counted"
        demo_model.generate(zoo.inputs(tokens=40)["input_ids"], max_new_tokens=3, do_sample=False)
    assert ace.report()["prefill"]["realised"] == pytest.approx(0.5, abs=0.15)
    assert ace.report()["decode"]["realised"] == 0
    assert [t.budget for t in ace.plan.thresholds] == [0.5]


def test_what_is_set_before_a_model_comes_holds(demo_model, demo_folder):
    from ace_moe.demo import TEXT

    ace = ACE.from_pretrained(demo_folder, skip=0.3, policy="share", text=TEXT, tokens=1024)
    ace.set_threshold(0.1)
    with ace(demo_model):
        assert ace.thresholds.tolist() == pytest.approx([0.1] * 3) and ace.skip is None and not ace.plan.thresholds
    ace = ACE.from_pretrained(demo_folder, policy="share", text=TEXT, tokens=1024)
    with pytest.raises(BudgetError, match="at most"):
        ace.set_skip(0.95)
    ace.set_skip(0.5)
    with ace(demo_model):
        assert ace.skip == 0.5 and ace.thresholds[1] > 0 and [t.budget for t in ace.plan.thresholds] == [0.5]
