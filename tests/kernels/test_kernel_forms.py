"""Every form in the rule's kernel against a plain loop over slots, each token with a τ of its own."""

import itertools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, TOLERANCE, by_rule, counted, launch_rule
from plain_rule import EXPERTS, FORMS, Setting, Token, cases, rescaled, scores

from ace_moe import rule
from ace_moe.kernels import decide
from ace_moe.rule import GAINS

ROWS = 10  # padding and three budgets
FIND = (
    Phase.explicit,
    Phase.reuse,
    Phase.generate,
)  # cases are small as they are, and shrinking runs hundreds of launches


def own_rows(data, case):
    """rows [T] with one row a token, and τ [R]; NaN where no token looks."""
    rows = torch.tensor(data.draw(st.permutations(range(1, ROWS)))[: len(case.tokens)], dtype=torch.int8)
    tau = torch.full((ROWS,), torch.nan)
    tau[rows.long()] = torch.tensor(case.taus)
    tau[0] = 0
    return rows, tau


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=8, phases=FIND)
@given(st.data())
def test_the_kernel_is_the_loop(name, data):
    """One slot, no token, ties, equal gates, slots in any order, k that is no power of two; gains and safeguards."""
    form = FORMS[name]
    # a GPU divides by sums to within two units in the last place: there τ keeps away from contributions
    case = data.draw(cases(form, exact=DEVICE == "cpu" or form.norm != "sum"))
    (ids, gates, tables), mark = case.tensors(), data.draw(st.sampled_from([-1, EXPERTS]))
    ids = ids.to(data.draw(st.sampled_from([torch.int64, torch.int32, torch.int16])))
    rows, tau = own_rows(data, case)
    new_ids, new_gates, counts = launch_rule(form, case.setting, ids, gates, rows, tau, tables, mark)
    keep, expected = case.expected(form)
    keep = torch.tensor(keep, dtype=torch.bool).reshape(ids.shape)
    expected = torch.tensor(expected).reshape(gates.shape)
    assert new_ids.dtype == ids.dtype and torch.equal(new_ids, torch.where(keep, ids, mark))
    torch.testing.assert_close(new_gates.float(), expected, rtol=TOLERANCE[case.dtype], atol=0)
    whole = keep.all(-1)
    assert torch.equal(new_gates[whole], gates[whole])
    assert torch.equal(counts, counted(rows, torch.ones_like(keep), keep, ROWS))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("tokens", "k", "kind"), [(9, 6, "sum"), (257, 5, "free"), (3, 22, "zeros")])
def test_the_kernel_is_the_rule_on_any_gates(name, tokens, k, kind):
    """Gates of no pattern, and the shapes of every launch: short programs, long ones, many slots."""
    form, g = FORMS[name], torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 40, generator=g).argsort(1)[:, :k]
    gates = torch.rand(tokens, k, generator=g)
    gates = {"sum": gates / gates.sum(1, keepdim=True), "free": 3 * gates}.get(kind, gates)
    gates = torch.where(torch.rand(tokens, k, generator=g) < 0.5, 0.0, gates) if kind == "zeros" else gates
    tables = {n: torch.rand(40, generator=g) + 0.5 for n in ("a", "b")} | {"own": torch.tensor(0.7)}
    rows = torch.arange(tokens).remainder(4).to(torch.int8)
    tau = torch.tensor([0.0, 0.0, 0.71 / k, 0.43])
    setting = Setting("kept", 2, 0.4) if kind == "zeros" else Setting()
    new_ids, new_gates, counts = launch_rule(form, setting, ids, gates, rows, tau, tables, 40)
    keep, expected = by_rule(form, setting, ids, gates, tau[rows.long()], tables)
    real = (rows > 0)[:, None]
    assert torch.equal(new_ids, torch.where(keep & real, ids, 40))
    torch.testing.assert_close(new_gates, expected * real, rtol=2e-6, atol=1e-7)
    assert torch.equal(counts, counted(rows, torch.ones_like(keep), keep, 4))


@pytest.mark.parametrize("name", FORMS)
def test_slots_that_are_none(name):
    """ids under 0 with NaN for gates: decided as if the token had been routed to its other slots alone."""
    form, setting = FORMS[name], Setting("kept", 2, 0.3)
    ids = torch.tensor([[3, -1, 7, 0, -1], [-1, -1, -1, -1, 5], [-1] * 5, [1, 2, 3, 4, -1]])
    gates = torch.tensor([[0.5, 0, 1.0, 0.25, 0], [0, 0, 0, 0, 0.125], [0.0] * 5, [0.25, 0.25, 0.25, 2.0, 0]])
    tables = {"a": [1.0, 2.0, 0.5, 4.0] * 3, "b": [0.5, 0.5, 1.0, 2.0] * 3, "own": [0.25]}
    tau, keep, expected = 0.11, torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(gates)
    for t, slots in enumerate((ids >= 0).unbind()):
        token = Token(ids[t][slots].tolist(), gates[t][slots].tolist(), 5)
        if token.ids:
            kept = [c >= tau for c in scores(form, setting, token, tables)]
            keep[t][slots] = torch.tensor(kept)
            expected[t][slots] = torch.tensor(rescaled(setting.gain, token.gates, kept))
    rows, taus = torch.tensor([1, 2, 3, 2], dtype=torch.int8), torch.tensor([0.0, tau, tau, tau])
    poisoned = torch.where(ids < 0, torch.nan, gates)
    given = {name: torch.tensor(values) for name, values in tables.items()}
    new_ids, new_gates, counts = launch_rule(form, setting, ids, poisoned, rows, taus, given, 99)
    assert torch.equal(new_ids, torch.where(keep, ids, 99))
    torch.testing.assert_close(new_gates, expected, rtol=2e-6, atol=0)
    assert torch.equal(counts, counted(rows, ids >= 0, keep, 4))


@pytest.mark.parametrize("name", FORMS)
def test_gates_that_are_all_zero(name):
    """Nothing is divided by 0: such slots contribute nothing, and the top one stays."""
    form, tables = FORMS[name], {"a": torch.ones(12), "b": torch.ones(12), "own": torch.tensor(0.5)}
    ids, gates, rows = torch.tensor([[4, 2, 9], [5, 1, 0]]), torch.zeros(2, 3), torch.tensor([1, 2]).char()
    tau = torch.tensor([0.0, 0.0, 0.1])
    new_ids, new_gates, _ = launch_rule(form, Setting(), ids, gates, rows, tau, tables, -1)
    keep, _ = by_rule(form, Setting(), ids, gates, tau[rows.long()], tables)
    assert torch.equal(new_ids, torch.where(keep, ids, -1)) and not new_gates.any()


@pytest.mark.parametrize("name", ["cumulative", "cumulative squared"])
def test_a_sum_of_shares_past_one_skips_nothing(name):
    """At τ = 0 a slot behind shares that add up to a rounding more than 1 is kept."""
    gates = torch.rand(300, 6, generator=torch.Generator().manual_seed(0))
    gates[:, 5] = 0
    shares = rule.share(gates, squared=FORMS[name].power == 2)
    assert (shares[:, :5].sum(-1) > 1).any(), "else nothing is tested"
    ids, rows = torch.arange(6).expand(300, 6), torch.ones(300, dtype=torch.int8)
    new_ids, new_gates, _ = launch_rule(FORMS[name], Setting(), ids, gates, rows, torch.zeros(2), {}, -1)
    assert torch.equal(new_ids, ids) and torch.equal(new_gates, gates)


def test_a_guarded_layer_skips_nothing():
    """Also where a contribution is 0, whose product with ∞ is no number."""
    ids, gates = torch.tensor([[4, 2, 9]]), torch.tensor([[0.0, 0.5, 0.0]])
    for form in FORMS.values():
        tables = {"a": torch.ones(12), "b": torch.ones(12), "own": torch.tensor(0.5)}
        given = (ids, gates, torch.ones(1, dtype=torch.int8), torch.tensor([0.0, 1e9]), tables, -1)
        new_ids, new_gates, _ = launch_rule(form, Setting(common=torch.inf), *given)
        assert torch.equal(new_ids, ids) and torch.equal(new_gates, gates)


def test_two_rules_never_share_a_text():
    """Two that decide differently are two builds; a form's own factor is no constant but a tensor."""
    forms = [form for form in FORMS.values() if form.factor is None]
    around = itertools.product(GAINS, (1, 2), (0.0, 0.1 + 0.2), (False, True))
    texts = [str(decide.Rule(form, *rest)) for form, rest in itertools.product(forms, around)]
    assert len(set(texts)) == len(texts)
    assert {decide.constants(text)["MIN_MASS"] for text in texts} == {0.0, 0.1 + 0.2}
