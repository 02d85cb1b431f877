"""Policies that look at a batch or at pruned experts, against loops over tokens and slots."""

import itertools
import math

import pytest
import torch
from hypothesis import given as cases
from hypothesis import settings
from hypothesis import strategies as st
from policy_cases import EXPERTS, K, routing

from ace_moe.lab.policies.allocation import allocate
from ace_moe.lab.policies.scores import reselect, scores
from ace_moe.policies import make

seeds = st.integers(0, 10**6)
kinds = st.sampled_from(["sorted", "unsorted", "unnormalised"])
knobs = st.sampled_from([0.05, 0.2, 0.45, 0.6, 0.85])
groups = st.sampled_from([0, 1, 3, 4])


def literal_top_k(given, row, allowed):
    """The router without the rows of experts that are not allowed: {expert: gate}, scaled to the old sum of gates."""
    z = given.extras.logits[row].tolist()
    inside = sorted((e for e in range(EXPERTS) if e in allowed), key=lambda e: -z[e])[:K]
    weight = {e: math.exp(z[e]) for e in inside}
    total = float(given.gates[row].sum())
    return {e: total * w / sum(weight.values()) for e, w in weight.items()}


def literal_kept(given, row, keep):
    """Slots in `keep` alone, divided by their sum."""
    g = given.gates[row].tolist()
    total = sum(g[i] for i in keep)
    return {int(given.ids[row, i]): g[i] * sum(g) / total for i in keep}


def found(decision, row):
    slots = zip(decision.ids[row].tolist(), decision.gates[row].tolist(), decision.keep[row].tolist(), strict=True)
    return {e: g for e, g, keep in slots if keep}


def batches(given, group):
    size = group or len(given.ids)
    return [range(start, min(start + size, len(given.ids))) for start in range(0, len(given.ids), size)]


def ranking(given, row):
    return sorted(range(K), key=lambda i: -float(given.gates[row, i]))


def top(given, row):
    return int(given.ids[row, ranking(given, row)[0]])


def demand(given, rows):
    p = given.extras.logits.double().softmax(-1)
    return {e: sum(float(p[t, e]) for t in rows) for e in range(EXPERTS)}


# ---- batches ----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@cases(seeds, kinds, knobs, groups)
def test_xshare(seed, kind, tau, group):
    given = routing(kind, tau, tokens=8, seed=seed)
    decision = make("xshare", group=group).route(given)
    for rows in batches(given, group):
        chosen = {top(given, t) for t in rows}
        utility, size = demand(given, rows), math.ceil(EXPERTS * (1 - tau) - 1e-6)
        for e in sorted((e for e in utility if e not in chosen), key=lambda e: -utility[e]):
            if len(chosen) < size:
                chosen.add(e)
        for t in rows:
            assert found(decision, t) == pytest.approx(literal_top_k(given, t, chosen), rel=1e-4)


@settings(max_examples=40)
@cases(seeds, kinds, knobs)
def test_xshare_as_compared(seed, kind, tau):
    given = routing(kind, tau, tokens=8, seed=seed)
    decision = make("xshare:ace-paper").route(given)
    utility, size = demand(given, range(8)), math.ceil(EXPERTS * (1 - tau) - 1e-6)
    hot = sorted(utility, key=lambda e: -utility[e])[:size]
    for t in range(8):
        keep = [i for i in range(K) if int(given.ids[t, i]) in hot or i == ranking(given, t)[0]]
        assert found(decision, t) == pytest.approx(literal_kept(given, t, keep), rel=1e-4)


@settings(max_examples=40)
@cases(seeds, kinds, knobs, groups, st.booleans())
def test_oea(seed, kind, tau, group, refill):
    given = routing(kind, tau, tokens=8, seed=seed)
    decision = make("oea", group=group, refill=refill).route(given)
    first = math.ceil(K * (1 - tau) - 1e-6)
    for rows in batches(given, group):
        base = {int(given.ids[t, i]) for t in rows for i in ranking(given, t)[:first]}
        for t in rows:
            inside = [i for i in range(K) if int(given.ids[t, i]) in base]
            expected = literal_top_k(given, t, base) if refill else literal_kept(given, t, inside)
            assert found(decision, t) == pytest.approx(expected, rel=1e-4)


@settings(max_examples=40)
@cases(seeds, kinds, knobs, groups, st.sampled_from([1, 2]))
def test_sere(seed, kind, tau, group, select):
    """The kernel's loop: argmax over the batch's primary experts, kept where the similarity is under ρ; then merged."""
    given = routing(kind, tau, tokens=8, seed=seed)
    similarity = given.tables["sere_similarity"].tolist()
    decision = make("sere", group=group, select=select).route(given)
    for rows in batches(given, group):
        primary = {int(given.ids[t, i]) for t in rows for i in ranking(given, t)[:select]}
        for t in rows:
            expected: dict[int, float] = {}
            for place, i in enumerate(ranking(given, t)):
                u = int(given.ids[t, i])
                if place >= select and u not in primary:
                    v = max(sorted(primary), key=lambda v: similarity[u][v])
                    assert abs(similarity[u][v] - (1 - tau)) > 1e-6
                    u = v if similarity[u][v] >= 1 - tau else u
                expected[u] = expected.get(u, 0.0) + float(given.gates[t, i])
            assert found(decision, t) == pytest.approx(expected, rel=1e-5)


@settings(max_examples=40)
@cases(seeds, kinds, knobs, st.integers(1, 3))
def test_alloc_t(seed, kind, tau, base):
    """Every token its top K_base, then the largest of all other gates until the layer's budget is spent."""
    given = routing(kind, tau, tokens=9, seed=seed)
    decision = make("alloc_t", min_active=base).route(given)
    kept = {(t, i) for t in range(9) for i in ranking(given, t)[:base]}
    rest = sorted(set(itertools.product(range(9), range(K))) - kept, key=lambda s: -float(given.gates[s]))
    budget = 9 * K - math.floor(9 * K * tau + 1e-6)
    kept |= set(rest[: max(0, budget - len(kept))])
    for t in range(9):
        expected = literal_kept(given, t, [i for i in range(K) if (t, i) in kept])
        assert found(decision, t) == pytest.approx(expected, rel=1e-4)


# ---- layers -----------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@cases(st.lists(st.lists(st.floats(0, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_allocation_is_the_optimum_for_every_total(costs):
    shares = allocate([torch.tensor(c, dtype=torch.float64) for c in costs])
    most = sum(map(len, costs))
    assert len(shares) == most - len(costs) + 1
    for level, row in enumerate(shares.tolist()):
        assert sum(row) == most - level
        every = itertools.product(*(range(1, len(c) + 1) for c in costs))
        best = min(sum(c[j - 1] for c, j in zip(costs, n, strict=True)) for n in every if sum(n) == most - level)
        assert sum(c[j - 1] for c, j in zip(costs, row, strict=True)) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("name", ["alloc_l", "lexi"])
def test_a_layer_keeps_its_own_number_of_slots(name):
    slots = torch.tensor([4.0, 2, 3, 1])  # shares of a total are not nested
    for level, number in enumerate(slots.tolist()):
        given = routing("unsorted", level / 3, tables={f"{name}_slots": slots})
        decision = make(name).route(given)
        for t in range(len(given.ids)):
            keep = ranking(given, t)[: int(number)]
            assert found(decision, t) == pytest.approx(literal_kept(given, t, keep), rel=1e-4)


# ---- pruned experts ---------------------------------------------------------------------------------------------


def removed(name, given, tau, most):
    count = min(most, math.ceil(EXPERTS * tau - 1e-6))
    if name == "expert_sparsity":
        return set(given.tables["expert_sparsity_pruned"][count].nonzero().flatten().tolist())
    if name == "diep":
        order = given.tables["diep_order"].tolist()
        return set(sorted((e for e in range(EXPERTS) if order[e] < tau), key=lambda e: order[e])[:most])
    saliency = given.tables["aimer" if name == "aimer:prune" else "reap_saliency"].tolist()
    return set(sorted(range(EXPERTS), key=lambda e: saliency[e])[:count])


@pytest.mark.parametrize("name", ["expert_sparsity", "reap:prune", "aimer:prune", "diep"])
@settings(max_examples=25)
@cases(seeds, kinds, knobs | st.just(1.0), st.booleans())
def test_pruning(name, seed, kind, tau, refill):
    """Without the pruned router rows, k experts at the least; or their slots skipped, the top one excepted."""
    given = routing(kind, tau, tokens=8, seed=seed)
    decision = make(name, refill=refill).route(given)
    gone = removed(name, given, tau, EXPERTS - K if refill else EXPERTS - 1)
    for t in range(8):
        keep = [i for i in range(K) if int(given.ids[t, i]) not in gone or i == ranking(given, t)[0]]
        rest = set(range(EXPERTS)) - gone
        expected = literal_top_k(given, t, rest) if refill else literal_kept(given, t, keep)
        assert found(decision, t) == pytest.approx(expected, rel=1e-4)


def test_slots_stay_empty_where_too_few_experts_are_left():
    given = routing(tokens=5)
    allowed = torch.zeros(1, EXPERTS, dtype=torch.bool)
    allowed[0, [2, 7]] = True
    score = scores(given.extras.logits, given.ids, given.gates)
    ids, gates, keep = reselect(score, given.ids, given.gates, allowed)
    assert (keep.sum(-1) == 2).all() and (gates[~keep] == 0).all()
    assert [sorted(ids[t][keep[t]].tolist()) for t in range(5)] == [[2, 7]] * 5


# ---- the router's scores ----------------------------------------------------------------------------------------

ROUTERS = {
    "softmax": lambda z: z.softmax(-1),
    "sigmoid": lambda z: z.sigmoid(),
    "sqrtsoftplus": lambda z: torch.nn.functional.softplus(z).sqrt(),
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1.0), (torch.bfloat16, 0.97)])
def test_scores_find_the_routers_own_function(router, normalised, dtype, share):
    """For each token by itself; in bf16 a token whose gates are nearly equal may fit two functions."""
    z = 2 * torch.randn(200, EXPERTS, generator=torch.Generator().manual_seed(1))
    p = ROUTERS[router](z)
    gates, ids = p.topk(K, dim=-1)
    gates = gates / gates.sum(-1, keepdim=True) if normalised else gates
    found = scores(z, ids, gates.to(dtype))
    assert (found == p).all(-1).float().mean() >= share


def test_scores_take_probabilities_as_they_are():
    p = torch.randn(50, EXPERTS, generator=torch.Generator().manual_seed(1)).softmax(-1)
    gates, ids = p.topk(K, dim=-1)
    assert torch.equal(scores(p, ids, gates), p)
