"""Routing and rule in one kernel, for routers recognised as a plain top-k."""

import pytest
import torch
from kernel_cases import DEVICE, by_rule, counted, factor, framed, launch_rule, text
from plain_rule import FORMS, Setting

import zoo
from ace_moe.checkpoint import MoEModel
from ace_moe.kernels import decide
from ace_moe.kernels.routing import TopK, recognise, reference

EXPERTS = 20
KINDS = [TopK(4, False, True), TopK(6, False, False), TopK(3, True, True)]
PLAIN = [TopK(k, sigmoid, normalise) for k in (1, 2, 4) for sigmoid in (False, True) for normalise in (False, True)]
SETTINGS = {
    "two tables max": Setting(), "share": Setting("kept", min_active=2), "squared": Setting("none", min_mass=0.5),
    "cumulative": Setting("none"), "rank": Setting(), "combined": Setting(common=0.5), "table": Setting(common=torch.inf),
}  # fmt: skip


def make_tables():
    g = torch.Generator().manual_seed(5)
    return {n: torch.rand(EXPERTS, generator=g) + 0.5 for n in ("a", "b")} | {"own": torch.tensor(0.7)}


def launch_route(form, setting, kind, logits, rows, tau, mark, dtype=torch.float32, ids_dtype=torch.int64, **vectors):
    """ids, gates [T, k] and counts [R, 3] by the kernel; rows, τ and tables among poison."""
    tables, counts = make_tables(), framed(torch.zeros(len(tau), 3, dtype=torch.int64))
    views = [framed(tables[name]) for name in form.tables]
    given = (logits.to(DEVICE), framed(rows), framed(tau), factor(form, setting, tables), views, counts, mark)
    vectors = {name: framed(vector) for name, vector in vectors.items()}
    ids, gates = decide.launch_route(*given, text(form, setting), *kind, dtype, ids_dtype, **vectors)
    return ids.cpu(), gates.cpu(), counts.cpu()


def batch(tokens):
    """logits [T, E], rows with padding among them, τ [R]."""
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens))
    return logits, torch.arange(tokens).remainder(4).flip(0).to(torch.int8), torch.tensor([0.0, 0.0, 0.11, 0.29])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tokens", [1, 6, 70])
def test_one_kernel_equals_top_k_and_rule(kind, name, tokens):
    """By `rule.py` behind torch's top-k; padding gets the mark and gates of 0, whatever its logits are."""
    form, setting, (logits, rows, tau) = FORMS[name], SETTINGS[name], batch(tokens)
    expected_ids, expected = reference(kind, logits)
    keep, expected = by_rule(form, setting, expected_ids, expected, tau[rows.long()], make_tables())
    real = (rows > 0)[:, None]
    ids, gates, counts = launch_route(form, setting, kind, torch.where(real, logits, torch.nan), rows, tau, EXPERTS)
    assert torch.equal(ids, torch.where(keep & real, expected_ids, EXPERTS))
    torch.testing.assert_close(gates, expected * real, rtol=1e-5, atol=1e-6)
    assert torch.equal(counts, counted(rows, torch.ones_like(keep), keep, 4))


@pytest.mark.parametrize("kind", [TopK(4, True, True, 2.5), TopK(5, False, True), TopK(3, True, False, 0.7)])
@pytest.mark.parametrize("vectors", ["bias", "scale", "bias and scale"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_experts_chosen_with_a_bias_and_gates_that_are_scaled(kind, vectors, tokens):
    """Biases larger than any score, of both signs; a bias is in the choice and not in the gate."""
    draw, (logits, rows, tau) = torch.Generator().manual_seed(3), batch(tokens)
    given = {name: 3 * torch.randn(EXPERTS, generator=draw) for name in ("bias", "scale") if name in vectors}
    if "scale" in given:
        given["scale"] = given["scale"].abs() + 0.5
    form, setting, real = FORMS["share"], Setting(), (rows > 0)[:, None]
    expected_ids, expected = reference(kind, logits, **given)
    keep, expected = by_rule(form, setting, expected_ids, expected, tau[rows.long()], make_tables())
    ids, gates, counts = launch_route(form, setting, kind, logits, rows, tau, EXPERTS, **given)
    assert torch.equal(ids, torch.where(keep & real, expected_ids, EXPERTS))
    torch.testing.assert_close(gates, expected * real, rtol=1e-5, atol=1e-6)
    assert torch.equal(counts, counted(rows, torch.ones_like(keep), keep, 4))


@pytest.mark.parametrize("name", SETTINGS)
def test_one_kernel_equals_two(name):
    """The rule's own kernel behind the gates that the fused one gives at τ = 0, in half precision, to the last bit."""
    form, setting, (logits, rows, tau) = FORMS[name], SETTINGS[name], batch(5)
    for dtype, ids_dtype, mark in ((torch.bfloat16, torch.int32, -1), (torch.float16, torch.int64, EXPERTS)):
        types, rows_of_all = (dtype, ids_dtype), torch.ones_like(rows)
        plain_ids, plain, _ = launch_route(FORMS["share"], Setting(), KINDS[0], logits, rows_of_all, tau, mark, *types)
        fused = launch_route(form, setting, KINDS[0], logits, rows, tau, mark, *types)
        apart = launch_rule(form, setting, plain_ids, plain, rows, tau, make_tables(), mark)
        assert fused[0].dtype == ids_dtype and fused[1].dtype == dtype
        assert all(torch.equal(a, b) for a, b in zip(fused, apart, strict=True))


def test_logits_may_be_strided():
    """A slice of a wider product, and columns that do not lie side by side."""
    logits, rows, tau = batch(5)
    expected = launch_route(FORMS["share"], Setting(), KINDS[0], logits, rows, tau, -1)
    wide = torch.full((5, 2 * EXPERTS), torch.nan)
    wide[:, :EXPERTS] = logits
    woven = torch.stack([logits, torch.full_like(logits, 9.0)], -1).flatten(1)
    for view in (wide[:, :EXPERTS], woven[:, ::2], logits.t().contiguous().t()):
        found = launch_route(FORMS["share"], Setting(), KINDS[0], view, rows, tau, -1)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_no_token_is_no_launch():
    ids, gates, counts = launch_route(
        FORMS["share"], Setting(), KINDS[0], *(t[:0] for t in batch(4)[:2]), torch.ones(4), -1
    )
    assert ids.shape == gates.shape == (0, 4) and not counts.any()


def test_equal_scores_go_to_the_lower_expert():
    logits = torch.zeros(1, EXPERTS)
    logits[0, 7] = 1.0
    ids, _, _ = launch_route(
        FORMS["share"], Setting(), KINDS[0], logits, torch.ones(1, dtype=torch.int8), torch.zeros(2), -1
    )
    assert ids.tolist() == [[7, 0, 1, 2]]


def test_experts_that_score_nothing_are_still_experts():
    """Masked experts have logits of −∞: where too few others are left, the lowest of them are taken, as they exist."""
    logits = torch.full((1, EXPERTS), -torch.inf)
    logits[0, 7] = 1.0
    given = (logits, torch.ones(1, dtype=torch.int8), torch.zeros(2), -1)
    for kind in (TopK(4, False, True), TopK(4, True, True)):
        ids, gates, _ = launch_route(FORMS["share"], Setting(), kind, *given)
        assert ids.tolist() == [[7, 0, 1, 2]] and gates.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_logits_that_are_no_numbers_show():
    """They become gates that are no numbers, of some expert, and never a token that looks whole."""
    logits, rows, tau = batch(3)
    logits[1, 3] = torch.nan
    ids, gates, _ = launch_route(FORMS["share"], Setting(), KINDS[0], logits, torch.full_like(rows, 2), tau, -1)
    assert gates[1].isnan().all() and gates[[0, 2]].isfinite().all()
    assert bool(((ids[1] >= 0) & (ids[1] < EXPERTS)).all())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_moe", TopK(4, False, True)), ("mixtral", TopK(4, False, True)), ("olmoe", TopK(4, False, False)),
        ("deepseek_v3", None), ("gpt_oss", None), ("gemma4", None), ("inkling", None), ("zaya", None),
    ],
)  # fmt: skip
def test_routers_are_recognised_by_behaviour(name, expected):
    """Biases, groups, scales, sinks: anything else keeps its own code."""
    model = zoo.build(name)
    site = MoEModel.of(model).sites[0]
    assert recognise(model.get_submodule(site.router_path), site.top_k) == expected


@pytest.mark.parametrize("name", zoo.families())
def test_every_familys_router_can_be_looked_at(name):
    """One that wants more than the tokens (MiniMax-M2's) ended in a TypeError when a plan was attached on a GPU."""
    model = zoo.build(name)
    for site in MoEModel.of(model).sites[:1]:
        if site.router_path is not None:
            assert recognise(model.get_submodule(site.router_path), site.top_k) in (*PLAIN, None)
