"""The rule against a literal reading of the paper's Algorithm 4, one token at a time, and its laws as properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_moe import rule
from ace_moe.errors import PolicyError
from ace_moe.policies import POLICIES, PRESETS, Routing, make

EXPERTS = 12
# what decides a token by its gates and the two tables alone; the others have tests of their own
PLAIN = [name for name in sorted(POLICIES) if set(make(name).needs) <= {"gsp", "rcr"}]
value = st.sampled_from([0.0, 0.01, 0.125, 0.25, 0.5, 1.0, 2.0]) | st.floats(2**-10, 1.0, width=32)


@st.composite
def tokens(draw):
    """gates and ids [T, k] in any order, with ties and zeros; tables [E]."""
    k = draw(st.integers(1, 8))
    t = draw(st.integers(0, 4))
    gates = torch.tensor([draw(st.lists(value, min_size=k, max_size=k)) for _ in range(t)]).reshape(t, k)
    ids = torch.tensor([draw(st.permutations(range(EXPERTS)))[:k] for _ in range(t)], dtype=torch.long).reshape(t, k)
    table = st.lists(st.floats(0.125, 4, width=32), min_size=EXPERTS, max_size=EXPERTS)
    tables = {name: torch.tensor(draw(table)) for name in ("gsp", "rcr")}
    return gates, ids, tables


threshold = st.sampled_from([0.0, 0.05, 0.125, 0.2, 0.5, 1.5])


def literal_algorithm_4(gates, ids, gsp, rcr, tau, min_active):
    """One token in Python floats: kept slots and renormalised gates, ties to the lower expert id."""
    k, eps = len(gates), 1e-8
    s_gsp = [g * gsp[e] for g, e in zip(gates, ids, strict=True)]
    s_rcr = [g * rcr[e] for g, e in zip(gates, ids, strict=True)]
    p_gsp = [s / (sum(s_gsp) + eps) for s in s_gsp]
    p_rcr = [s / (sum(s_rcr) + eps) for s in s_rcr]
    c = [max(a, b) for a, b in zip(p_gsp, p_rcr, strict=True)]
    skipped = {i for i in range(k) if p_gsp[i] < tau} & {i for i in range(k) if p_rcr[i] < tau}
    skipped -= {min(range(k), key=lambda i: (-gates[i], ids[i]))}
    kept = set(range(k)) - skipped
    for i in sorted(skipped, key=lambda i: (-c[i], ids[i]))[: max(0, min_active - len(kept))]:
        kept.add(i)
    total = sum(gates[i] for i in kept) + eps
    return kept, {i: gates[i] / total for i in kept}


def decide(policy, gates, ids, tables, tau):
    return policy.route(Routing(ids, gates, tables, torch.tensor(tau)))


@settings(max_examples=300)
@given(tokens(), threshold, st.integers(1, 4))
def test_paper_preset_is_algorithm_4(case, tau, min_active):
    """`kept` is the paper's renormalisation for gates that sum to 1. τ lies away from every contribution."""
    gates, ids, tables = case
    gates = gates / gates.sum(-1, keepdim=True).clamp(min=1e-6)
    policy = make("ace", gain="kept", min_active=min_active)
    contributions = policy.contribution(Routing(ids, gates, tables, torch.tensor(tau)))
    if ((contributions - tau).abs() < 1e-6).any() or not _distinct(contributions):
        return  # fp32 and Python floats may differ in the last digit there
    found = decide(policy, gates, ids, tables, tau)
    for row in range(len(gates)):
        kept, expected = literal_algorithm_4(
            gates[row].tolist(), ids[row].tolist(), tables["gsp"].tolist(), tables["rcr"].tolist(), tau, min_active
        )
        assert set(found.keep[row].nonzero().flatten().tolist()) == kept
        if gates[row].sum() > 0.5:
            for slot, gate in expected.items():
                assert math.isclose(float(found.gates[row, slot]), gate, rel_tol=1e-5, abs_tol=1e-7)


def _distinct(c):
    gaps = c.sort(-1).values.diff(dim=-1)
    return bool(((gaps > 1e-6) | (gaps == 0)).all())


def test_paper_preset_is_pinned():
    policy = PRESETS["paper"]
    assert policy.settings == {
        "policy": "ace",
        "params": {"fusion": "max"},
        "gain": "kept",
        "min_active": 1,
        "min_mass": 0.0,
        "factor": None,
    }


@settings(max_examples=200)
@given(tokens(), st.sampled_from(PLAIN), st.sampled_from(rule.GAINS), st.sampled_from([0.0, 0.5]))
def test_threshold_zero_returns_the_routers_own_gates(case, name, gain, min_mass):
    gates, ids, tables = case
    for dtype in (torch.float32, torch.bfloat16):
        found = decide(make(name, gain=gain, min_mass=min_mass), gates.to(dtype), ids, tables, 0.0)
        assert found.keep.all()
        assert torch.equal(found.gates, gates.to(dtype))


@settings(max_examples=200)
@given(tokens(), threshold, st.integers(1, 4), st.sampled_from(PLAIN))
def test_a_token_is_decided_by_itself(case, tau, min_active, name):
    """Not by its batch, nor by the order of its slots."""
    gates, ids, tables = case
    policy = make(name, min_active=min_active)
    together = decide(policy, gates, ids, tables, tau)
    for row in range(len(gates)):
        order = torch.randperm(gates.shape[1], generator=torch.Generator().manual_seed(row))
        alone = decide(policy, gates[row : row + 1, order], ids[row : row + 1, order], tables, tau)
        same_sums = torch.equal(
            policy.contribution(Routing(ids[row : row + 1], gates[row : row + 1], tables, torch.tensor(tau)))[:, order],
            policy.contribution(
                Routing(ids[row : row + 1, order], gates[row : row + 1, order], tables, torch.tensor(tau))
            ),
        )
        if same_sums:  # a sum in another order may differ in its last digit
            assert torch.equal(alone.keep[0], together.keep[row, order])


@settings(max_examples=200)
@given(tokens(), st.integers(1, 8), st.sampled_from([0.0, 0.3, 0.9]))
def test_safeguards_hold_for_any_threshold(case, min_active, min_mass):
    gates, ids, tables = case
    found = decide(make("ace", min_active=min_active, min_mass=min_mass), gates, ids, tables, 2.0)
    k = gates.shape[1]
    assert (found.keep.sum(-1) >= min(min_active, k)).all()
    assert found.keep[rule.top_slot(gates, ids)].all()
    kept = torch.where(found.keep, gates, 0.0).sum(-1)
    assert (kept >= min_mass * gates.sum(-1) - 1e-5).all()
    if min_mass == 0:
        assert (found.keep.sum(-1) == min(min_active, k)).all(), "a threshold above all keeps the protected slots alone"


@settings(max_examples=100)
@given(tokens())
def test_ties_go_to_the_lower_expert(case):
    gates, ids, _ = case
    equal = torch.ones_like(gates)
    top = rule.top_slot(equal, ids)
    assert torch.equal(ids[top], ids.min(-1).values) if len(ids) else True
    order = rule.rank(equal, ids)
    assert torch.equal(order, ids.argsort(-1).argsort(-1))


@pytest.mark.parametrize(
    ("gain", "factor"), [("kept", 1 / 0.8), ("none", 1.0), ("power", math.sqrt((0.25 + 0.09 + 0.04) / (0.25 + 0.09)))]
)
def test_gains(gain, factor):
    gates = torch.tensor([[0.5, 0.3, 0.2]])
    keep = torch.tensor([[True, True, False]])
    torch.testing.assert_close(rule.rescale(gates, keep, gain), gates * factor * keep)


def test_kept_gain_keeps_a_sum_that_is_not_one():
    gates = torch.tensor([[2.0, 1.0, 0.5]])
    out = rule.rescale(gates, torch.tensor([[True, False, True]]), "kept")
    assert out.sum() == pytest.approx(3.5)


def test_min_mass_protects_the_slot_that_would_cross():
    """Ascending contributions 0.1, 0.2, 0.3 of a token with mass 1: with 0.65 to keep, 0.1 + 0.2 may go, 0.3 may not."""
    gates = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    out = rule.protect(gates.clone(), gates, torch.arange(4)[None], min_mass=0.65)
    assert out.isinf().tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("fusion", ["max", "min", "mean"])
def test_fusion(fusion):
    a, b = torch.tensor([0.2, 0.6]), torch.tensor([0.4, 0.1])
    expected = {"max": [0.4, 0.6], "min": [0.2, 0.1], "mean": [0.3, 0.35]}[fusion]
    torch.testing.assert_close(rule.FUSE[fusion](a, b), torch.tensor(expected))


@pytest.mark.parametrize(
    "bad", [{"gain": "loud"}, {"min_active": 0}, {"min_mass": 1.5}, {"fusion": "median"}, {"min_active": 1.5}, {"x": 1}]
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(PolicyError):
        make("ace", **bad)


def test_rule_compiles_without_breaks_and_tau_is_an_input():
    """fullgraph, and another τ does not compile again."""
    from torch._dynamo.testing import CompileCounter

    policy, tables = make("ace", min_active=2, min_mass=0.3), {n: torch.rand(EXPERTS) + 0.5 for n in ("gsp", "rcr")}
    gates, ids = torch.rand(5, 4), torch.stack([torch.randperm(EXPERTS)[:4] for _ in range(5)])
    counter = CompileCounter()
    compiled = torch.compile(
        lambda g, i, t: policy.route(Routing(i, g, tables, t))[1:], fullgraph=True, backend=counter
    )
    for tau in (0.0, 0.2, 0.5):
        got, want = compiled(gates, ids, torch.tensor(tau)), decide(policy, gates, ids, tables, tau)
        assert torch.equal(got[0], want.gates)
        assert torch.equal(got[1], want.keep)
    assert counter.frame_count == 1
