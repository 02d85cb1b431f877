"""What stands in for a skipped slot: the mean output against Monte Carlo, and what a whole model makes of it."""

import os

import pytest
import torch
from test_tables import ALL, random_layer, table

import zoo
from ace_moe import ACE, build_plan, rule
from ace_moe.checkpoint import MoEModel
from ace_moe.engines.vllm.settings import check_policy
from ace_moe.errors import IntegrationError, PolicyError
from ace_moe.plan import Plan
from ace_moe.policies import make
from ace_moe.tables import PAPER, mean

MEAN = {"policy": "share", "compensate": "mean"}


def sampled(layer, count=1 << 17, part=1 << 12):
    """[E, d] by sampling, antithetic: inputs in pairs x, −x take out the part that has mean 0."""
    g, total = torch.Generator().manual_seed(0), 0.0
    for _ in range(count // part):
        z = torch.randn(part // 2, layer.hidden, generator=g) * layer.norm_scale
        x = torch.cat([z, -z]).expand(layer.num_experts, -1, -1)
        w_in, w_out = layer._oriented(slice(0, layer.num_experts))
        inner = torch.bmm(x, w_in.mT) if layer.b_in is None else torch.baddbmm(layer.b_in.float()[:, None], x, w_in.mT)
        out = torch.bmm(layer.activate(inner), w_out.mT).mean(1)
        total = total + (out if layer.b_out is None else out + layer.b_out.float())
    return total / (count // part)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_mean_is_that_of_gaussian_inputs(interleaved):
    """To 2 %, in any layout; gate and up rows are correlated, as without that there is no mean to find."""
    layer, *_ = random_layer(4, 16, 12, transposed=interleaved, interleaved=interleaved, seed=3)
    w = layer.w_in if interleaved else layer.w_in.mT  # [E, d, 2m]
    gate, up = (w[..., ::2], w[..., 1::2]) if interleaved else w.chunk(2, -1)
    up.add_(gate)
    found, expected = mean.part(layer, ALL), sampled(layer)
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("name", ["gpt_oss", "nemotron_h", "qwen3_moe"])
@pytest.mark.long
def test_the_mean_of_a_models_own_activation(name):
    """Clamps and biases, experts without a gate."""
    model = zoo.build(name)
    layer = next(MoEModel.of(model).layers())
    found, expected = table("mean_output", layer), sampled(layer)
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_a_far_longer_mean_is_cut():
    layer, *_ = random_layer(8, 16, 12, seed=1)
    layer.w_out[3] *= 1000
    length = mean.cut(mean.part(layer, ALL)).norm(dim=1)
    assert float(length[3] / length.median()) == pytest.approx(mean.LONGEST, rel=1e-4)


@pytest.fixture(scope="module")
def model():
    return zoo.build("qwen3_moe", num_hidden_layers=1)


def outputs(model, tau, dispatch="torch", tokens=5, **options):
    ace = ACE(build_plan(model, PAPER), dispatch=dispatch, **options)
    with ace(model), torch.no_grad():
        ace.set_threshold(tau)
        return model(**zoo.inputs(batch=1, tokens=tokens)).logits


def test_nothing_stands_in_where_nothing_is_skipped(model):
    whole = model(**zoo.inputs(batch=1, tokens=5)).logits
    assert torch.equal(outputs(model, 0.0, **MEAN), outputs(model, 0.0, policy="share"))
    torch.testing.assert_close(outputs(model, 0.0, **MEAN), whole)


@pytest.mark.parametrize("tokens", [2, 6])
@pytest.mark.long
def test_skipped_slots_add_their_gate_times_the_mean(model, tokens):
    """By the kernels as by torch; and the table matters."""
    expected = outputs(model, 0.4, tokens=tokens, **MEAN)
    assert not torch.allclose(expected, outputs(model, 0.4, tokens=tokens, policy="share"), atol=1e-4)
    if os.environ.get("TRITON_INTERPRET") == "1":
        found = outputs(model, 0.4, dispatch="kernels", tokens=tokens, **MEAN)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_sum_slot_by_slot():
    g = torch.Generator().manual_seed(0)
    ids, gates, means = torch.tensor([[3, -2, -7], [-1, 5, -2]]), torch.rand(2, 3, generator=g), torch.randn(6, 4)
    expected = torch.stack([gates[0, 1] * means[0] + gates[0, 2] * means[5], gates[1, 2] * means[0]])
    torch.testing.assert_close(rule.stand_in(ids, gates, means), expected)


def test_a_plan_keeps_the_table(model, tmp_path):
    plan = build_plan(model, PAPER)
    ace = ACE(plan, **MEAN)
    with ace(model):
        pass
    path = ace.plan.save(tmp_path / "plan.safetensors")
    assert Plan.load(path) == ace.plan and ace.plan.shapes == {"mean_output": ("experts", "hidden")}


def test_refused_where_nothing_can_stand_in(model):
    """vLLM, and ranks that would each add it."""
    vars(model)["_tp_size"] = 2
    with pytest.raises(IntegrationError, match="tensor-parallel"), ACE(build_plan(model, PAPER), **MEAN)(model):
        pass
    vars(model).pop("_tp_size")
    with pytest.raises(PolicyError, match="cannot be served"):
        check_policy(make("share", compensate="mean"))
    with pytest.raises(PolicyError, match="compensate is mean"):
        make("share", compensate="zero")
    assert make("share").settings == make("share", compensate=None).settings
