"""Token policies against their formulas, one token at a time in Python floats."""

import math

import pytest
import torch
from hypothesis import given as cases
from hypothesis import settings
from hypothesis import strategies as st
from policy_cases import EXPERTS, KINDS, extras, norms_of, routing, tables

from ace_moe.policies import make

seeds, kinds, slots = st.integers(0, 10**6), st.sampled_from(KINDS), st.integers(1, 8)


def softmax(row):
    e = [math.exp(z - max(row)) for z in row]
    return [x / sum(e) for x in e]


class Token:
    """One token in Python numbers: ids, gates, p over all experts, output norms."""

    def __init__(self, routing, row, scale=1.0):
        self.e, self.g = routing.ids[row].tolist(), routing.gates[row].tolist()
        self.p = softmax(routing.extras.logits[row].tolist())
        self.f = norms_of(routing)[row].tolist()
        self.t = {name: table.tolist() for name, table in routing.tables.items()}
        self.top = max(range(len(self.g)), key=lambda i: self.g[i])

    def weighed(self, name):
        return [g * self.t[name][e] for g, e in zip(self.g, self.e, strict=True)]


def shares(values):
    return [v / sum(values) for v in values]


def relative(values):
    return [v / max(values) for v in values]


def squash(values):
    return [v / (1 + v) for v in values]


def top_p(gates):
    order = sorted(range(len(gates)), key=lambda i: -gates[i])
    mass, out = 0.0, [0.0] * len(order)
    for i in order:
        out[i] = 1 - mass / sum(gates)
        mass += gates[i]
    return out


def second_to_first(token):
    largest = sorted(token.g, reverse=True)
    x = largest[min(1, len(largest) - 1)] / largest[0] / token.t["naee_median"]
    return [x / (1 + x)] * len(largest)


FORMULAS = {
    "share": lambda t: shares(t.g),
    "share:squared=true": lambda t: shares([g * g for g in t.g]),
    "gsp": lambda t: shares(t.weighed("gsp")),
    "rcr": lambda t: shares(t.weighed("rcr")),
    "ace": lambda t: [max(a, b) for a, b in zip(shares(t.weighed("gsp")), shares(t.weighed("rcr")), strict=True)],
    "score": lambda t: [t.p[e] for e in t.e],
    "relative": lambda t: relative(t.g),
    "top_p": lambda t: top_p(t.g),
    "top_p:squared=true": lambda t: top_p([g * g for g in t.g]),
    "fixed": lambda t: [1 - sorted(t.g, reverse=True).index(g) / len(t.g) for g in t.g],
    "aimer": lambda t: shares(t.weighed("aimer")),
    "naee": lambda t: squash([g / max(t.g) / t.t["naee_median"] for g in t.g]),
    "modes": lambda t: [t.t["modes_alpha"] * g for g in shares(t.g)],
    "reap": lambda t: shares(t.weighed("reap_saliency")),
    "oracle": lambda t: shares([g * f for g, f in zip(t.g, t.f, strict=True)]),
    "oracle:raw": lambda t: [min(1, g * f / t.t["oracle_scale"]) for g, f in zip(t.g, t.f, strict=True)],
    "score:ace-paper": lambda t: relative(t.g),
    "expert_sparsity:ace-paper": lambda t: relative(t.g),
    "naee:ace-paper": lambda t: relative(t.weighed("gsp")),
    "diep:ace-paper": second_to_first,
    "sere:ace-paper": lambda t: [1 - t.t["sere_weights"][t.e[t.top]][e] for e in t.e],
    "modes:ace-paper": lambda t: [t.t["modes_alpha"] * g for g in shares(t.g)],
}


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=15)
@cases(seeds, kinds, slots)
def test_contribution_is_the_cited_formula(name, seed, kind, k):
    given = routing(kind, tokens=3, seed=seed, k=k)
    found = make(name).contribution(given)
    assert found.min() >= 0 and found.max() <= 1
    for row in range(3):
        assert found[row].tolist() == pytest.approx(FORMULAS[name](Token(given, row)), abs=2e-6)


@pytest.mark.parametrize("name", ["rcr", "reap"])
def test_which_table_is_read(name):
    """`centred=False` reads the other table; an expert without saliency counts as the mean of the others."""
    given = routing(tokens=5)
    if name == "rcr":
        other = given._replace(tables={"rcr": given.tables["rcr_uncentred"]})
        assert torch.equal(make("rcr", centred=False).contribution(given), make("rcr").contribution(other))
        return
    known = given.tables["reap_saliency"].clone()
    known[0] = 0
    filled = known.clone()
    filled[0] = known[1:].mean()
    found, expected = (make("reap").contribution(given._replace(tables={"reap_saliency": t})) for t in (known, filled))
    torch.testing.assert_close(found, expected)


@settings(max_examples=25)
@cases(seeds, kinds, st.sampled_from([0.2, 0.45, 0.7]))
def test_naee_is_the_published_rule_for_two_slots(seed, kind, median):
    """τ = 1/2: the second slot goes iff p_2 < β p_1, and the weights left are divided by their sum."""
    given = routing(kind, 0.5, tokens=4, seed=seed, k=2)
    given = given._replace(tables={"naee_median": torch.tensor(median)})
    found = make("naee").route(given)
    for row in range(4):
        p = sorted((Token(given, row).p[e] for e in given.ids[row].tolist()), reverse=True)
        if abs(p[1] - median * p[0]) < 1e-5:
            continue
        assert int(found.keep[row].sum()) == (1 if p[1] < median * p[0] else 2)
        assert float(found.gates[row].sum()) == pytest.approx(float(given.gates[row].sum()), rel=1e-5)


@settings(max_examples=25)
@cases(seeds, st.sampled_from(["sorted", "unsorted"]), st.sampled_from([0.3, 0.5, 0.8]))
def test_top_p_keeps_the_smallest_prefix_that_exceeds_p(seed, kind, mass):
    given = routing(kind, 1 - mass, tokens=4, seed=seed, k=6)
    found = make("top_p").route(given)
    for row in range(4):
        order = given.gates[row].argsort(descending=True).tolist()
        total, kept = 0.0, set()
        for i in order:
            kept.add(i)
            total += float(given.gates[row, i])
            if total > mass:
                break
        if abs(total - mass) < 1e-5:
            continue
        assert set(found.keep[row].nonzero().flatten().tolist()) == kept
        assert torch.equal(found.gates[row][found.keep[row]], given.gates[row][found.keep[row]])


def test_top_p_residuals_are_never_negative():
    """0.1 ten times sums to more than 1 in fp32; a residual under 0 would be skipped by every threshold but 0's."""
    gates = torch.full((1, 11), 1 / 11).bfloat16()
    given = routing()._replace(ids=torch.arange(11)[None], gates=gates)
    assert make("top_p").contribution(given).min() >= 0


@pytest.mark.parametrize("k2", [2, 4, 6, EXPERTS])
@pytest.mark.parametrize("kind", KINDS)
def test_fixed_divides_by_the_mass_of_the_top_k2(kind, k2):
    """w_i = p_i / Σ_top-k2 p on the scale of the model's own gates p_i / Σ_top-k p."""
    given = routing(kind, 0.5, k=4)  # keeps the slots of rank 0, 1 and 2
    found = make("halving", denominator=k2).route(given)
    for row in range(len(given.ids)):
        token = Token(given, row)
        order = sorted(range(4), key=lambda i: -token.g[i])
        unit = sum(token.g) / sum(sorted(token.p, reverse=True)[:4])
        for i in range(4):
            expected = unit * sum(sorted(token.p, reverse=True)[:4]) * token.p[token.e[i]]
            expected = expected / sum(sorted(token.p, reverse=True)[:k2]) if i in order[:3] else 0.0
            assert float(found.gates[row, i]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("gain", ["none", "power"])
def test_a_denominator_changes_gates_alone(gain):
    """The same slots as `fixed`, gates times Σ_top-k p / Σ_top-k2 p where a token lost one; k itself changes nothing."""
    given = routing("plain", 0.5, k=4)
    plain, same, wide = (make("halving", gain=gain, denominator=k2).route(given) for k2 in (0, 4, 6))
    assert torch.equal(plain.gates, make("fixed", gain=gain).route(given).gates)
    assert torch.equal(plain.keep, wide.keep) and not plain.keep.all()
    torch.testing.assert_close(same.gates, plain.gates, rtol=1e-5, atol=1e-7)
    for row in range(len(given.ids)):
        p = sorted(Token(given, row).p, reverse=True)
        factor = 1.0 if plain.keep[row].all() else sum(p[:4]) / sum(p[:6])
        torch.testing.assert_close(wide.gates[row], plain.gates[row] * factor, rtol=1e-4, atol=1e-7)


def test_relative_is_ik_llamas_rule():
    """-ser 2,0.4: the top 2 always, others iff p_i > 0.4 p_1."""
    given = routing("unsorted", 0.4, tokens=200)
    found = make("relative", min_active=2).route(given)
    for g, keep in zip(given.gates.tolist(), found.keep.tolist(), strict=True):
        order = sorted(range(4), key=lambda i: -g[i])
        assert keep == [i in order[:2] or g[i] > 0.4 * max(g) for i in range(4)]


@settings(max_examples=20)
@cases(seeds, st.booleans(), st.sampled_from([0.3, 0.7, 1.2]))
def test_pesf_counts_a_sequence(seed, padded, alpha):
    """Expert e is dropped from a sequence iff its count < α L k / E; τ = α / (1 + α)."""
    given = routing("unsorted", alpha / (1 + alpha), tokens=12, seed=seed, mask=padded)  # two sequences of 6
    found = make("pesf").route(given)
    for start in (0, 6):
        real = [t for t in range(start, start + 6) if not padded or bool(given.token_mask[t])]
        for t in real:
            for i in range(4):
                e = int(given.ids[t, i])
                count = sum(e in given.ids[u].tolist() for u in real)
                limit = alpha * len(real) * 4 / EXPERTS
                if abs(count - limit) < 1e-4:
                    continue
                top = int(given.gates[t].argmax()) == i
                assert bool(found.keep[t, i]) == (top or count >= limit)


def test_pesf_leaves_decoding_alone():
    given = routing(threshold=0.9, tokens=8)
    alone = extras(given.extras.logits, norms_of(given), 1)
    assert make("pesf").route(given._replace(extras=alone)).keep.all()


def test_sere_as_compared_moves_gates_to_the_top_slot():
    given = routing("unsorted", 0.5, tokens=30)
    found = make("sere:ace-paper").route(given)
    assert int((~found.keep).sum()) > 0
    for row in range(30):
        token = Token(given, row)
        far = [
            1 - token.t["sere_weights"][token.e[token.top]][e] >= 0.5 or i == token.top for i, e in enumerate(token.e)
        ]
        lost = sum(g for g, keep in zip(token.g, far, strict=True) if not keep)
        expected = [(g + lost * (i == token.top)) * keep for i, (g, keep) in enumerate(zip(token.g, far, strict=True))]
        assert found.keep[row].tolist() == far
        assert found.gates[row].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("with_hidden", [True, False])
def test_random_is_uniform_and_owes_nothing_to_the_gate(with_hidden):
    given = routing(tokens=20000)
    given = given if with_hidden else given._replace(hidden=None)
    c = make("random").contribution(given)
    histogram = torch.histc(c, 10, 0, 1) / c.numel()
    assert (histogram - 0.1).abs().max() < 0.005
    assert abs(torch.corrcoef(torch.stack([c.flatten(), given.gates.flatten()]))[0, 1]) < 0.02
    assert torch.equal(c, make("random").contribution(given))
    other = make("random", seed=1).contribution(given)
    assert abs(torch.corrcoef(torch.stack([c.flatten(), other.flatten()]))[0, 1]) < 0.02


def test_tables_differ():
    """Two policies by one formula but other tables must not pass each other's test."""
    values = [t for t in tables().values() if t.shape == (EXPERTS,)]
    assert len({tuple(v.tolist()) for v in values}) == len(values)
