"""Every policy × gain × kind of gates: the laws that hold whatever the method."""

from dataclasses import fields

import pytest
import torch
from policy_cases import EXPERTS, KINDS, NAMES, VARIANTS, K, extras, label, norms_of, of, part, routing, tables

from ace_moe import rule
from ace_moe.decider import Decider
from ace_moe.decider.rows import Same, row_of
from ace_moe.decider.state import State
from ace_moe.errors import PolicyError
from ace_moe.lab.policies.allocation import LayerwisePolicy
from ace_moe.policies import TokenPolicy, find, make
from ace_moe.rule import GAINS

variants = pytest.mark.parametrize("variant", VARIANTS, ids=label)
kinds = pytest.mark.parametrize("kind", KINDS)


def kept_pairs(decision):
    """Distinct (token, expert) pairs that run."""
    return {(t, e) for t, e, run in zip(*_flat(decision), strict=True) if run}


def _flat(decision):
    rows = torch.arange(len(decision.ids))[:, None].expand_as(decision.ids)
    return rows.flatten().tolist(), decision.ids.flatten().tolist(), decision.keep.flatten().tolist()


@variants
@kinds
@pytest.mark.parametrize("gain", GAINS)
def test_knob_zero_is_the_identity(variant, kind, gain):
    for dtype in (torch.float32, torch.bfloat16):
        given = routing(kind, 0.0, dtype=dtype)
        found = of(variant, gain=gain).route(given)
        assert found.keep.all()
        assert torch.equal(found.ids, given.ids)
        assert torch.equal(found.gates, given.gates) and found.gates.dtype == dtype


@variants
@kinds
@pytest.mark.parametrize("gain", GAINS)
def test_what_comes_back(variant, kind, gain):
    """Shapes, experts that exist, no gate on a skipped slot, no expert twice, and what the gain promises."""
    policy = of(variant, gain=gain)
    for tau in (0.1, 0.35, 0.6, 1.0):
        given = routing(kind, tau)
        found = policy.route(given)
        assert found.ids.shape == found.gates.shape == found.keep.shape == given.ids.shape
        assert ((found.ids >= 0) & (found.ids < EXPERTS)).all()
        assert found.gates.isfinite().all() and (found.gates[~found.keep] == 0).all()
        assert len(kept_pairs(found)) == int(found.keep.sum()), "an expert runs twice for one token"
        _check_gain(gain, given, found, variant)


def _check_gain(gain, given, found, variant):
    some = found.keep.any(-1)
    before, after = given.gates[some], found.gates[some]
    if variant == ("halving", {"denominator": 6}):
        return  # its own denominator comes on top
    if gain == "kept":
        torch.testing.assert_close(after.sum(-1), before.sum(-1))
    elif gain == "power":
        torch.testing.assert_close(after.square().sum(-1), before.square().sum(-1))
    else:
        same = (found.keep & (found.ids == given.ids))[some]
        moved = variant[0].startswith("sere")  # gates of other slots are added to some
        assert (after[same] >= before[same]).all() if moved else torch.equal(after[same], before[same])


@variants
@kinds
def test_a_larger_knob_skips_more(variant, kind):
    counts = [int(of(variant).route(routing(kind, tau, tokens=200)).keep.sum()) for tau in (0, 0.05, 0.15, 0.4, 0.7, 1)]
    assert counts == sorted(counts, reverse=True)
    if (variant[0] in ("sere", "xshare", "oea") and "group" not in variant[1]) or getattr(of(variant), "refill", False):
        return  # 200 tokens have all 12 experts among their top ones, or slots are filled again
    assert counts[-1] < counts[0]


@variants
@kinds
def test_safeguards(variant, kind):
    """Nothing protects a slot but the safeguards: at the largest knob what they name runs, for skipping policies."""
    if variant[0] == "modes:ace-paper":
        with pytest.raises(PolicyError, match="no safeguards"):
            of(variant, min_active=2)
        assert not of(variant).route(routing(kind, 2.0)).keep.any()
        return
    given = routing(kind, 2.0, tokens=60)
    policy = of(variant, min_active=3, min_mass=0.8)
    found = policy.route(given)
    assert (found.keep.sum(-1) >= 3).all()
    if getattr(policy, "refill", False):
        return  # slots are filled again, with other experts
    top = rule.top_slot(given.gates, given.ids)
    assert found.keep[top].all() and torch.equal(found.ids[top], given.ids[top])
    if not variant[0].startswith("sere"):  # its gates move with the slots
        mass = torch.where(found.keep, given.gates, 0.0).sum(-1)
        assert (mass >= 0.8 * given.gates.sum(-1) - 1e-5).all()


def test_min_active_alone_keeps_that_many():
    for variant in VARIANTS:
        policy = of(variant) if variant[0] == "modes:ace-paper" else of(variant, min_active=2)
        if isinstance(policy, TokenPolicy) and variant[0] != "modes:ace-paper":
            assert (policy.route(routing(threshold=2.0)).keep.sum(-1) == 2).all(), variant


@variants
@pytest.mark.parametrize("mask", [False, True])
def test_the_realised_ratio_is_counted_right(variant, mask):
    """The counters against a set of (token, expert) pairs; padding counts neither way."""
    policy, given = of(variant), routing("unsorted", 0.4, tokens=40, mask=mask)
    layer = Decider("0", policy, tables(), State(), experts=EXPERTS)
    layer.state.set(torch.full((4,), 0.4))
    layer.tokens, layer.extras = Masked(given.token_mask), given.extras
    ids, gates = layer.decide(given.ids, given.gates, given.hidden)
    real = set(range(40)) if given.token_mask is None else set(given.token_mask.nonzero().flatten().tolist())
    run = {(t, e) for t in real for e in ids[t].tolist() if e < EXPERTS}
    assert layer.counts[row_of("prefill")].tolist() == [len(real) * K, len(run), 0]
    assert layer.counts.sum() == len(real) * K + len(run)
    assert (gates[ids == EXPERTS] == 0).all()


class Masked(Same):
    """Two prompts of 20 tokens, some of them padding."""

    def __init__(self, mask):
        super().__init__(row_of("prefill"))
        self.mask = mask

    def rows(self, tokens, device):
        rows = super().rows(tokens, device)
        return rows if self.mask is None else torch.where(self.mask, rows, 0)


LOCAL = [v for v in VARIANTS if isinstance(of(v), (TokenPolicy, LayerwisePolicy)) and v[0] != "pesf"]


@pytest.mark.parametrize("variant", LOCAL, ids=label)
def test_token_policies_decide_a_token_by_itself(variant):
    """Not by its batch, nor by the order of its slots."""
    policy = of(variant)
    given = routing("unsorted", 0.2)
    together = policy.route(given)
    order = torch.tensor([2, 0, 3, 1])
    for row in range(len(given.ids)):
        alone = policy.route(part(given, slice(row, row + 1), order))
        assert torch.equal(alone.keep[0], together.keep[row, order])
        torch.testing.assert_close(alone.gates[0], together.gates[row, order])


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "group" in v[1]], ids=label)
def test_a_group_is_decided_by_itself(variant):
    policy, given = of(variant), routing("unsorted", 0.5, tokens=9)
    size, whole = variant[1]["group"], of(variant).route(given)
    for start in range(0, 9, size):
        rows = slice(start, start + size)
        alone = policy.route(part(given, rows))
        assert torch.equal(alone.keep, whole.keep[rows]) and torch.equal(alone.ids, whole.ids[rows])


@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if v[0] in ("sere", "xshare", "oea", "alloc_t", "pesf")], ids=label
)
def test_padding_has_no_say_in_a_batch(variant):
    """Real tokens are decided the same whatever stands at padded places."""
    given = routing("sorted", 0.4, tokens=20, mask=True)
    other = routing("sorted", 0.4, tokens=20, seed=5)
    real = given.token_mask[:, None]
    mixed = given._replace(
        ids=torch.where(real, given.ids, other.ids),
        gates=torch.where(real, given.gates, other.gates),
        extras=extras(torch.where(real, given.extras.logits, other.extras.logits), norms_of(given), 10),
    )
    one, two = of(variant).route(given), of(variant).route(mixed)
    assert torch.equal(one.keep[given.token_mask], two.keep[given.token_mask])
    assert torch.equal(one.ids[given.token_mask], two.ids[given.token_mask])


@variants
def test_no_host_sync_and_no_shape_from_data(variant):
    """Meta tensors have no values: whatever asks for one, or makes a shape of one, fails."""
    given = routing()
    meta = {name: t.to("meta") for name, t in given.tables.items()}
    tensors = {n: getattr(given, n).to("meta") for n in ("ids", "gates", "threshold", "hidden")}
    gathered = extras(given.extras.logits.to("meta"), norms_of(given).to("meta"), len(given.ids) // 2)
    found = of(variant).route(given._replace(**tensors, tables=meta, extras=gathered))
    assert found.ids.shape == found.gates.shape == found.keep.shape == given.ids.shape


@variants
def test_zero_and_equal_gates(variant):
    """Nothing is divided by zero, ties are broken, and knob 0 stays the identity."""
    gates = torch.tensor([[0.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0, 0], [0, 0, 0, 1.0]])
    given = routing(tokens=4)._replace(gates=gates)
    for gain in GAINS:
        assert torch.equal(of(variant, gain=gain).route(given).gates, gates)
        found = of(variant, gain=gain).route(given._replace(threshold=torch.tensor(0.7)))
        assert found.gates.isfinite().all()
        assert found.keep.any(-1).all() or variant[0] == "modes:ace-paper"


@variants
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(variant, tokens):
    given = routing(threshold=0.5, tokens=tokens)
    assert of(variant).route(given).keep.shape == (tokens, K)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("halving", {"denominator": -1}),
        ("sere", {"select": 0}),
        ("sere", {"group": -2}),
        ("xshare", {"group": 1.5}),
        ("diep", {"epochs": 0}),
    ],
)
def test_bad_settings_are_refused(name, bad):
    with pytest.raises(PolicyError, match=next(iter(bad))):
        make(name, **bad)


def test_every_policy_says_what_it_is():
    for variant in VARIANTS:
        policy = of(variant)
        assert policy.mapping == ("quantile" if isinstance(policy, TokenPolicy) else "search")
        assert policy.limits or policy.mapping == "quantile", f"{policy.name}: a search may fail and must say why"
        assert policy.__doc__ and make(policy).settings == policy.settings
        assert set(policy.needs) <= set(tables())


@pytest.mark.parametrize("name", NAMES)
def test_switches_are_true_or_false(name):
    """Not "False", as Python spells it: a text that is not empty would count as true."""
    for switch in (f.name for f in fields(find(name)) if f.type == "bool"):
        assert getattr(make(f"{name}:{switch}=false"), switch) is False
        for wrong in ("False", "no", "0", "null"):
            with pytest.raises(PolicyError, match=f"{switch} is true or false"):
                make(f"{name}:{switch}={wrong}")
