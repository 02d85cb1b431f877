"""What calibrations compute, against formulas written with the embedded model's weights."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from demo_parts import expert, layer_of, logits_of

from ace_moe import ACE
from ace_moe.errors import StructureError
from ace_moe.lab.policies import calibrate
from ace_moe.lab.policies.calls import Call, answers, sites, watch
from ace_moe.lab.policies.diep import train
from ace_moe.lab.policies.expert_sparsity import Loss
from ace_moe.policies import make
from ace_moe.scoring.predictions import score


@torch.no_grad()
def test_naee_median_of_the_routers_probabilities(fp32, few_windows):
    found = calibrate(make("naee"), fp32, few_windows)
    logits = fp32(input_ids=few_windows.ids, output_router_logits=True, use_cache=False).router_logits
    for number in range(6):
        p = logits[number].double().softmax(-1).sort(descending=True).values
        ratios = sorted((p[:, 1] / p[:, 0]).tolist())
        assert float(found[str(number)]["naee_median"]) == pytest.approx(ratios[(len(ratios) - 1) // 2], rel=1e-4)


def test_modes_alpha_is_the_kl_without_a_layer(fp32, few_windows):
    """Written by taking the layer's down projections to zero in a copy."""
    found = calibrate(make("modes"), fp32, few_windows)
    with torch.no_grad():
        whole = logits_of(fp32, few_windows).double().log_softmax(-1)
        loss = []
        for number in range(6):
            without = copy.deepcopy(fp32)
            layer_of(without, number).experts.down_proj.zero_()
            other = logits_of(without, few_windows).double().log_softmax(-1)
            loss.append(float((whole.exp() * (whole - other)).sum(-1).mean()))
    for number in range(6):
        assert float(found[str(number)]["modes_alpha"]) == pytest.approx(loss[number] / sum(loss), rel=1e-3)


@torch.no_grad()
def test_sere_similarity(fp32, few_windows, seen):
    found = calibrate(make("sere"), fp32, few_windows)["2"]["sere_similarity"]
    x = torch.cat([call.hidden for call in seen])
    outputs = [expert(fp32, 2, e, x) for e in range(32)]
    distance = torch.tensor([[float((a - b).norm()) for b in outputs] for a in outputs])
    torch.testing.assert_close(found, 1 - distance / distance.max(), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_reap_saliency(fp32, few_windows, seen):
    found = calibrate(make("reap"), fp32, few_windows)["2"]["reap_saliency"]
    total, count = [0.0] * 32, [0] * 32
    for call in seen:
        for x, ids, gates in zip(call.hidden, call.ids.tolist(), call.gates.tolist(), strict=True):
            for e, g in zip(ids, gates, strict=True):
                total[e] += g * float(expert(fp32, 2, e, x[None]).norm())
                count[e] += 1
    expected = [s / n if n else 0.0 for s, n in zip(total, count, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_oracle_runs_the_experts(fp32, few_windows, ready_plan, seen):
    """Norms that a policy sees inside an attached model, and the largest of all for the scale."""
    asked = {}

    class Spy(type(make("oracle"))):
        def contribution(self, routing):
            asked[len(asked)] = (routing, routing.extras.norms(routing))
            return super().contribution(routing)

    ace = ACE(ready_plan, policy=make("oracle"), allow_other_weights=True)
    with ace(fp32):
        for layer in ace.deciders.values():
            layer.policy = Spy()
        logits_of(fp32, few_windows)
    routing, norms = asked[0]
    for t, i in itertools.product((0, 17, 101), range(8)):
        expected = expert(fp32, 0, int(routing.ids[t, i]), routing.hidden[t : t + 1]).norm()
        assert float(norms[t, i]) == pytest.approx(float(expected), rel=1e-4)
    scale = calibrate(make("oracle:raw"), fp32, few_windows)
    largest = max(float((r.gates * n).max()) for r, n in asked.values())
    assert [float(layer["oracle_scale"]) for layer in scale.values()] == pytest.approx([largest] * 6, rel=1e-4)


@pytest.mark.long
def test_alloc_l_sensitivity(fp32, few_windows, monkeypatch):
    """S[l, j]: layer l with j slots, later layers with one, earlier ones untouched; by a model with those gates set to 0."""
    asked = []
    monkeypatch.setattr(
        "ace_moe.lab.policies.allocation.allocate", lambda costs: asked.extend(costs) or torch.ones(43, 6)
    )
    calibrate(make("alloc_l"), fp32, few_windows)
    assert [len(c) for c in asked] == [8] * 6
    assert float(asked[5][7]) == pytest.approx(score(fp32, few_windows).perplexity, rel=1e-9)
    for number, j in ((0, 3), (4, 8)):
        hooks = []
        for later in range(number, 6):
            keep = j if later == number else 1

            def cut(module, args, keep=keep):
                hidden, ids, gates = args
                smaller = gates.float().argsort(-1, descending=True)[:, keep:]
                left = gates.float().scatter(-1, smaller, 0.0)
                return hidden, ids, (left * gates.float().sum(-1, keepdim=True) / left.sum(-1, keepdim=True)).to(gates)

            hooks.append(layer_of(fp32, later).experts.register_forward_pre_hook(cut))
        expected = score(fp32, few_windows).perplexity
        for hook in hooks:
            hook.remove()
        assert float(asked[number][j - 1]) == pytest.approx(expected, rel=1e-4)


def test_alloc_l_and_lexi_share_out_every_total(ready_plan):
    for name in ("alloc_l_slots", "lexi_slots"):
        slots = torch.stack([layer[name] for layer in ready_plan.tables.values()], dim=1)
        assert slots.sum(1).tolist() == list(range(48, 5, -1))
        assert slots.min() == 1 and slots.max() == 8


@torch.no_grad()
def test_lexi_distances(fp32):
    """D(j) with the layer's own top-j on given inputs: renormalised gates of the j best experts."""
    x = torch.randn(20, 192, generator=torch.Generator().manual_seed(3))
    z = layer_of(fp32, 1).gate.weight @ x.mT
    p, ids = z.mT.softmax(-1).topk(8, dim=-1)
    call = Call(x, ids, p / p.sum(-1, keepdim=True), None)
    found = make("lexi").distances(layer_of(fp32, 1).experts, call)

    def layer(j):
        rows = []
        for t in range(20):
            w = p[t, :j] / p[t, :j].sum()
            rows.append(sum(w[i] * expert(fp32, 1, int(ids[t, i]), x[t : t + 1]) for i in range(j)))
        return torch.cat(rows)

    expected = [float((layer(j) - layer(8)).norm()) for j in range(1, 9)]
    assert found.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_lexi_feeds_gaussian_noise(fp32, monkeypatch):
    """What router and experts see during LExI's pass is N(0, I), another draw in each layer, and no text."""
    got = {}
    policy = make("lexi", samples=200)
    monkeypatch.setattr(
        type(policy), "distances", lambda self, experts, call: got.setdefault(id(experts), call) and torch.rand(8)
    )
    calibrate(policy, fp32, None)
    calls = list(got.values())
    assert len(calls) == 6 and all(c.hidden.shape == (200, 192) for c in calls)
    for number, call in enumerate(calls):
        assert abs(float(call.hidden.mean())) < 0.02 and float(call.hidden.std()) == pytest.approx(1, abs=0.02)
        own = call.hidden @ layer_of(fp32, number).gate.weight.mT
        torch.testing.assert_close(call.logits, own, rtol=1e-3, atol=1e-3)
    assert not torch.equal(calls[0].hidden, calls[1].hidden)


def test_lexi_says_where_it_has_no_meaning():
    import zoo

    with pytest.raises(StructureError, match=r"LExI is undefined: layer 0.*alloc_l"):
        calibrate(make("lexi"), zoo.build("gemma4"), None)


# ---- NAEE's pruning ---------------------------------------------------------------------------------------------


def literal_output(model, number, call, pruned):
    """F(X; D): the layer with the router rows of D at −∞."""
    z = call.logits.clone()
    z[:, list(pruned)] = -math.inf
    p, ids = z.softmax(-1).topk(8, dim=-1)
    w = p / p.sum(-1, keepdim=True)
    rows = [
        sum(w[t, i] * expert(model, number, int(ids[t, i]), call.hidden[t : t + 1]) for i in range(8) if w[t, i] > 0)
        for t in range(len(ids))
    ]
    return torch.cat(rows)


@torch.no_grad()
def test_expert_sparsity_loss(fp32, seen):
    call = Call(*(x[:10] for x in (seen[0].hidden, seen[0].ids, seen[0].gates, seen[0].logits)))
    every = answers(layer_of(fp32, 2).experts, call.hidden, torch.arange(32).expand(10, -1))
    loss = Loss(call, every @ every.mT)
    whole = literal_output(fp32, 2, call, ())
    for pruned in ((0,), (3, 8), tuple(range(0, 30, 2)), tuple(range(26))):
        sets = torch.zeros(1, 32, dtype=torch.bool)
        sets[0, list(pruned)] = True
        expected = (whole - literal_output(fp32, 2, call, pruned)).norm()
        assert float(loss(sets)) == pytest.approx(float(expected), rel=1e-3, abs=1e-4)


def test_expert_sparsity_enumerates_then_goes_on_greedily():
    """Against a brute-force minimum where all sets are tried, and the best single addition where not."""

    class Fake:
        experts = 6

        def __call__(self, sets):
            weight = torch.tensor([5.0, 1, 4, 2, 6, 3])
            together = (sets[:, 1] & sets[:, 3]).double() * 20  # greedy would take both of these
            return (sets.double() * weight).sum(1) + together

    rows = make("expert_sparsity", enumerate=15).search([Fake(), Fake()])
    for r in (1, 2, 4, 5):  # C(6, r) ≤ 15
        sets = [set(c) for c in itertools.combinations(range(6), r)]
        masks = torch.tensor([[e in s for e in range(6)] for s in sets])
        best = sets[int(Fake()(masks).argmin())]
        assert set(rows[r].nonzero().flatten().tolist()) == best
    two, three = (set(rows[r].nonzero().flatten().tolist()) for r in (2, 3))
    assert two < three and len(three) == 3, "C(6, 3) = 20: one more than the last set"
    assert not rows[0].any()


# ---- DiEP -------------------------------------------------------------------------------------------------------


def test_diep_first_step_is_gradient_descent_on_its_loss(fp32, few_windows):
    """One window, one epoch: α moves by −0.005 (∂loss + 0.05 α), the derivative taken numerically of the loss written out."""
    windows = replace(few_windows, ids=few_windows.ids[:1, :48])
    alpha, beta = train(fp32, windows, 1, 0.1)
    calls = watch(fp32, windows.ids)
    assert [float(b) for b in beta.values()] == pytest.approx([2.0] * 3 + [0.2] * 3), "β rests in the first epoch"

    routed = {}  # a step may change later routing, which has no derivative: experts stay those of the start

    @torch.no_grad()
    def loss(key, e, step):
        start = {k: call.gates.mean().repeat(32) for k, call in calls.items()}
        start[key][e] += step
        apart, hooks = 0.0, []
        for number, (k, call) in enumerate(calls.items()):
            outputs = answers(layer_of(fp32, number).experts, call.hidden, call.ids)
            whole = (outputs * call.gates[..., None]).sum(1)
            ours = (2.0 if number < 3 else 0.2) * (outputs * start[k][call.ids][..., None]).sum(1)
            apart += float((whole - ours).double().norm())

            def instead(module, args, k=k, a=start[k]):
                ids = routed.setdefault(k, args[1])
                return args[0], ids, a[ids]

            hooks.append(layer_of(fp32, number).experts.register_forward_pre_hook(instead))
        ids = windows.ids
        found = F.cross_entropy(fp32(input_ids=ids).logits[0, :-1].double(), ids[0, 1:])
        for hook in hooks:
            hook.remove()
        return float(found) + 0.1 * apart

    loss("0", 0, 0.0)
    for key in ("0", "4"):
        e = int(calls[key].ids.flatten().mode().values)
        start, small = float(calls[key].gates.mean()), 1e-3
        slope = (loss(key, e, small) - loss(key, e, -small)) / (2 * small)
        expected = start - 5e-3 * (slope + 0.05 * start)
        assert float(alpha[key][e]) - start == pytest.approx(expected - start, rel=0.03)


def test_diep_orders_all_experts_of_the_model(ready_plan):
    order = torch.cat([layer["diep_order"] for layer in ready_plan.tables.values()])
    torch.testing.assert_close(order.sort().values, torch.arange(192) / 192)


def test_diep_moves_beta_in_every_third_epoch(demo_model, few_windows):
    two, three = (train(demo_model, few_windows, epochs, 0.1) for epochs in (2, 3))
    for key in two[0]:
        assert torch.equal(two[0][key], three[0][key]), "α rests in the third epoch"
        assert float(two[1][key]) in (pytest.approx(2.0), pytest.approx(0.2))
        assert two[1][key] != three[1][key]


# ---- more -------------------------------------------------------------------------------------------------------


def test_watch_sees_what_the_layer_was_given(fp32, few_windows):
    ids = few_windows.ids[:1]
    call = watch(fp32, ids)["2"]
    p = fp32(input_ids=ids, output_router_logits=True, use_cache=False).router_logits[2]
    torch.testing.assert_close(call.logits, p)
    gates, experts = p.softmax(-1).topk(8, dim=-1)
    assert torch.equal(call.ids, experts)
    torch.testing.assert_close(call.gates, gates / gates.sum(-1, keepdim=True))
    assert [site.key for site in sites(fp32)] == [str(n) for n in range(6)]
