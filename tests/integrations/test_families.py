"""Laws on every family of transformers' experts registry: identity at τ = 0, executed = kept, restored models."""

import pytest
import torch
import transformers
from packaging import version
from transformers.integrations import moe

import zoo
from ace_moe import ACE, AceError, build_plan
from ace_moe.checkpoint import MoEModel
from ace_moe.policies import make
from ace_moe.tables import PAPER

OUTSIDE = "its experts are outside transformers' registry"


def policy_for(plan):
    """ACE where both tables were made, else the gate share."""
    return make("share") if plan.lacks(PAPER) else make("ace")


def middle(plan):
    """A little over 1/k: about the median contribution of a random router, also where gates are nearly equal."""
    return 1.02 / next(iter(plan.fingerprint.structure.values()))["top_k"]


@pytest.fixture
def executed(monkeypatch):
    """Rows that each grouped product really computes: its last offset. The rest of its output is poisoned."""
    rows: list[int] = []
    stock = moe._grouped_mm

    def counting(input, weight, offs):
        out = stock(input, weight, offs)
        rows.append(int(offs[-1]))
        out[rows[-1] :] = torch.nan
        return out

    monkeypatch.setattr(moe, "_grouped_mm", counting)
    return rows


def test_zoo_is_complete():
    """A release with a family we do not list must not pass unnoticed."""
    listed = {f.module for f in zoo.FAMILIES}
    assert zoo.registry_modules() - listed == set()
    assert len(zoo.families()) >= 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", zoo.families())
def test_threshold_zero_is_the_stock_model(name, dtype, tried):
    tried(name, "transformers", "prefill")
    model = zoo.build(name, dtype)
    model.set_experts_implementation("grouped_mm")
    stock = zoo.run(model)
    plan = build_plan(model, PAPER)
    tried(name, "tables", why=" ".join(plan.undefined.values()), part=True)
    ace = ACE(plan, policy=policy_for(plan))
    with ace(model):
        attached = zoo.run(model)
        assert ace.realised == 0 and ace.report()["prefill"]["routed"] > 0
    assert torch.equal(stock, attached)
    assert torch.equal(stock, zoo.run(model)), "detaching did not restore the model"


@pytest.mark.parametrize("name", zoo.families())
def test_executed_slots_are_the_kept_slots(name, executed, tried):
    tried(name, "transformers", "prefill")
    model = zoo.build(name)
    plan = build_plan(model, PAPER)
    ace = ACE(plan, policy=policy_for(plan))
    with ace(model):
        ace.set_threshold(middle(plan))
        out = zoo.run(model)
        kept = ace.report()["prefill"]["kept"]
    products = 2 * len(ace.deciders)
    assert len(executed) == products
    assert sum(executed) == 2 * kept, "up and down each compute the kept rows, no more"
    assert out.isfinite().all(), "a row that was not computed leaked into the output"
    assert ace.realised > 0.05 or name == "zaya", "top-1 routing is all that has nothing to skip"


@pytest.mark.parametrize("name", zoo.families())
def test_skipping_matches_dense_arithmetic(name, tried):
    """The output equals running every slot and weighing the skipped ones 0."""
    tried(name, "transformers", "prefill")
    model = zoo.build(name)
    plan = build_plan(model, PAPER)
    ace = ACE(plan, policy=policy_for(plan))
    with ace(model):
        ace.set_threshold(middle(plan))
        skipped = zoo.run(model)
        for layer in ace.deciders.values():  # same rule, but skipped slots stay routed with gate 0
            layer.decide = lambda ids, gates, hidden, one=layer: (ids, type(one).decide(one, ids, gates, hidden)[1])
        dense = zoo.run(model)
    torch.testing.assert_close(skipped, dense, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.families())
def test_generated_tokens_are_skipped_and_counted(name, tried):
    """What a cache remembers changes no slot: the tokens are those of passes over the whole text, with the same rule."""
    model = zoo.build(name)
    if model.get_output_embeddings() is None or not model.can_generate():
        pytest.skip("it generates nothing")
    plan, ids = build_plan(model, PAPER), zoo.inputs(tokens=9)["input_ids"]
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    try:
        model.generate(ids, **how)
    except ValueError:
        pytest.skip("transformers' own generate does not run it")
    tried(name, "transformers", "decode")
    with ACE(plan, policy=policy_for(plan))(model) as ace:
        ace.set_threshold(middle(plan))
        found = model.generate(ids, **how)
        slots = sum(layer["top_k"] for layer in plan.fingerprint.structure.values())
        assert ace.report()["decode"]["routed"] == 3 * len(ids) * slots
        assert 0 < ace.report()["decode"]["kept"] < 3 * len(ids) * slots or name == "zaya"
        assert torch.equal(found, model.generate(ids, use_cache=False, **how))


@pytest.mark.parametrize("name", [f.name for f in zoo.UNREGISTERED])
def test_families_outside_the_registry_are_refused_or_covered(name, tried):
    """Step-3.7 is called like the others and, from 5.18 on, leaves sentinels out: a pre-hook covers it. The rest say why not."""
    if not zoo.has(name):
        pytest.skip("not in this release")
    model = zoo.build(name)
    tried(name, "tables", why=OUTSIDE)
    if name != "step3p7" or version.parse(transformers.__version__) < version.parse("5.18"):
        tried(name, "transformers", "prefill", "decode", why=OUTSIDE)
        with pytest.raises(AceError, match="experts"):
            ACE.from_pretrained(model, policy="share").attach(model)
        return
    tried(name, "transformers", "prefill")
    before = zoo.run(model)
    with ACE.from_pretrained(model, policy="share")(model) as ace:
        assert torch.equal(before, zoo.run(model))
        ace.set_threshold(middle(ace.plan))
        assert not torch.equal(before, zoo.run(model)) and 0 < ace.realised < 1
    assert torch.equal(before, zoo.run(model))


@pytest.mark.parametrize("name", ["step3p7", "zaya", "axk2"])
def test_share_runs_where_tables_are_undefined(name):
    """What needs a table says that `share` needs none."""
    if not zoo.has(name):
        pytest.skip("not in this release")
    model = zoo.build(name)
    plan = build_plan(model)
    assert plan.layers == [site.key for site in MoEModel.of(model).sites] and plan.lacks(PAPER) == list(PAPER)
    for made in (plan, build_plan(model, PAPER)):
        with pytest.raises(AceError, match="'share' needs no table"):
            ACE(made, policy="ace").attach(model)
    with ACE(plan, policy="share")(model) as ace:
        ace.set_threshold(middle(plan))
        zoo.run(model)
        assert (ace.realised > 0 or plan.top_k == 1) and ace.plan == plan
