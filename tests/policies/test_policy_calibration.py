"""Calibrations on the embedded model end to end: what they leave in a plan, and what they leave alone."""

import pytest
import torch
import torch.nn.functional as F
from demo_parts import expert, layer_of, logits_of
from policy_cases import NAMES, QUICK

from ace_moe import ACE, Plan, build_plan
from ace_moe.checkpoint import MoEModel
from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import IntegrationError, PlanError, TextError
from ace_moe.lab.policies import calibrate, calibrated, prepare
from ace_moe.mapping import map_budgets
from ace_moe.plan.file import seal
from ace_moe.policies import make
from ace_moe.tables import tables_of
from ace_moe.tables.build import add_tables
from command import run_ace

CALIBRATED = [name for name in NAMES if calibrated(make(name))]


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.long
def test_calibration_makes_what_the_policy_needs_and_leaves_the_model_alone(name, demo_model, few_windows):
    before, flags = logits_of(demo_model, few_windows), [p.requires_grad for p in demo_model.parameters()]
    policy = make(name, **QUICK.get(name, {}))
    found = calibrate(policy, demo_model, few_windows)
    assert list(found) == [str(n) for n in range(6)]
    for layer in found.values():
        assert set(layer) == set(policy.needs)
        assert all(t.isfinite().all() and t.dtype == torch.float32 and not t.requires_grad for t in layer.values())
    assert torch.equal(logits_of(demo_model, few_windows), before)
    assert [p.requires_grad for p in demo_model.parameters()] == flags
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in demo_model.modules())


def test_a_plan_carries_all_tables_and_says_how_they_were_made(ready_plan, tmp_path):
    loaded = Plan.load(ready_plan.save(tmp_path / "plan.safetensors"))
    for key, layer in ready_plan.tables.items():
        assert set(layer) == set(loaded.tables[key])
        assert all(torch.equal(values, loaded.tables[key][name]) for name, values in layer.items())
    assert loaded.calibrations["modes_alpha"]["workload"]["name"] == "wikitext-2-slice.txt"
    assert loaded.calibrations["diep_order"]["params"]["epochs"] == 3
    assert not loaded.lacks(need for name in NAMES for need in make(name).needs)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("naee_median", torch.tensor(float("nan"))),
        ("naee_median", torch.ones(5)),
        ("reap_saliency", torch.ones(31)),
        ("sere_similarity", torch.ones(32, 31)),
        ("alloc_l_slots", torch.ones(42)),
        ("modes_alpha", torch.tensor(1.0, dtype=torch.float64)),
    ],
)
def test_a_damaged_calibration_is_refused(ready_plan, tmp_path, name, values):
    from safetensors import safe_open
    from safetensors.torch import save

    path = ready_plan.save(tmp_path / "plan.safetensors")
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    path.write_bytes(seal(save({**tensors, f"layers.3.{name}": values}, metadata)))
    with pytest.raises(PlanError, match=f"layers.3.{name}.*ace plan"):
        Plan.load(path)
    tensors.pop(f"layers.3.{name}")
    path.write_bytes(seal(save(tensors, metadata)))
    with pytest.raises(PlanError, match="missing: 3"):
        Plan.load(path)


def test_what_is_missing_is_named(demo_model, demo_plan, few_windows):
    """Before any work: the table, and what makes it."""
    with pytest.raises(PlanError, match=r"needs the table modes_alpha.*ace plan MODEL .*--policy modes` makes it"):
        ACE(demo_plan, policy="modes")
    with pytest.raises(TextError, match="got none"):
        prepare(demo_plan, make("modes"), demo_model, None)
    with pytest.raises(PlanError, match="every MoE layer"):
        demo_plan.with_tables({"0": {"aimer": torch.ones(32)}})
    ace = ACE(demo_plan)
    with ace(demo_model), pytest.raises(IntegrationError, match="Detach it"):
        prepare(demo_plan, make("naee"), demo_model, few_windows)


def test_tables_from_weights_are_made_on_attaching(demo_model, demo_plan):
    """Nothing but the model is needed for them; the plan in use has them, the plan that was given is as it was."""
    ace = ACE(demo_plan, policy="aimer")
    with ace(demo_model):
        assert not ace.plan.lacks(["aimer"])
    assert demo_plan.lacks(["aimer"]) == ["aimer"]


def test_a_calibrated_policy_in_python(demo_model, demo_plan, few_windows):
    """Its table on a text, a threshold, the realised ratio; without the table the error says what makes it."""
    with pytest.raises(PlanError, match=r"naee_median.*ace_moe\.lab\.policies\.prepare"):
        ACE.from_pretrained(MODEL, skip=0.3, text=TEXT, tokens=1024, policy="naee")
    plan = prepare(demo_plan, make("naee"), demo_model, few_windows)
    ace = ACE(map_budgets(demo_model, plan, make("naee"), few_windows, [0.3]).plan, 0.3, policy="naee")
    with ace(demo_model), torch.no_grad():
        demo_model(torch.arange(64)[None])
        assert 0.1 < ace.realised < 0.5
    assert ace.plan.calibrations["naee_median"]["workload"]["tokens"] == 1024


def test_budget_command_prepares(tmp_path):
    """`ace plan` writes what the policy needs into the plan; then `ace run` has it."""
    path = tmp_path / "plan.safetensors"
    build_plan(MODEL).save(path)
    small = ("--text", TEXT, "--tokens", 256, "--window", 128, "--budgets", 0.5, "--no-correct", "--json")
    for policy, needed in (("naee", "naee_median"), ("rcr:centred=false", "rcr_uncentred")):
        ran = run_ace("plan", MODEL, "--plan", path, "--policy", policy, *small)
        assert ran.code == 0, ran.err
        assert not Plan.load(path).lacks([needed])
        again = run_ace(
            "run", MODEL, "--plan", path, "--policy", policy, "--prompt", "The", "--max-new-tokens", 2, "--json"
        )
        assert again.code == 0, again.err
    assert Plan.load(path).calibrations["naee_median"]["workload"]["tokens"] == 256


def test_prepare_does_not_do_it_again(ready_plan, demo_model):
    for name in NAMES:
        assert prepare(ready_plan, make(name), demo_model, None) is ready_plan


# ---- tables from weights ----------------------------------------------------------------------------------------


def test_aimer_table(demo_model, demo_plan):
    found = add_tables(demo_plan, ["aimer"], demo_model).tables["1"]["aimer"]
    experts = layer_of(demo_model, 1).experts
    ratio = []
    for e in range(32):
        w = torch.cat([experts.gate_up_proj[e].flatten(), experts.down_proj[e].flatten()]).detach().double()
        ratio.append(float(w.abs().mean() / w.square().mean().sqrt()))
    keep = torch.tensor([1 / r for r in ratio])
    torch.testing.assert_close(found, keep / keep.mean(), rtol=1e-5, atol=0)


def test_uncentred_rcr_table(demo_model):
    layer = MoEModel.of(demo_model).layer(MoEModel.of(demo_model).sites[1])
    rows = layer_of(demo_model, 1).gate.weight.float()
    raw = []
    for e in range(32):
        q = rows[e] / rows[e].square().mean().sqrt()
        raw.append(expert(demo_model, 1, e, q[None]).norm() / q.norm())
    raw = torch.stack(raw).detach()
    torch.testing.assert_close(
        tables_of(layer, ["rcr_uncentred"])[0]["rcr_uncentred"], raw / raw.mean(), rtol=1e-4, atol=0
    )


def test_weight_similarity_table(demo_model):
    experts, scale = layer_of(demo_model, 1).experts, demo_model.model.layers[1].post_attention_layernorm.weight.float()
    signatures = []
    for e in range(32):
        gate, up = (experts.gate_up_proj[e].float() * scale).chunk(2)
        signatures.append(torch.cat([up.norm(dim=1), gate.norm(dim=1), experts.down_proj[e].float().norm(dim=0)]))
    expected = F.cosine_similarity(torch.stack(signatures)[:, None], torch.stack(signatures)[None], dim=-1).detach()
    found = calibrate(make("sere:ace-paper"), demo_model, None)["1"]["sere_weights"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
