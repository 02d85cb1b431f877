"""Tokens of every kind in one launch: each decided by its own τ, counted in its own row; padding by none and in none."""

import pytest
import torch
from kernel_cases import DEVICE, by_rule, counted, framed, launch_rule, text
from plain_rule import FORMS, Setting

from ace_moe.decider.rows import PADDING, row_of, rows_for
from ace_moe.kernels import decide

EXPERTS, K = 12, 6
KINDS = [PADDING, row_of("prefill"), row_of("decode"), row_of("verify"), row_of("prefill", 3), row_of("decode", 3)]
ROWS = rows_for(4)
MIXED = ["share", "two tables max", "rank", "cumulative", "combined"]
TABLES = {
    "a": torch.rand(EXPERTS, generator=torch.Generator().manual_seed(1)) + 0.5,
    "b": torch.rand(EXPERTS, generator=torch.Generator().manual_seed(2)) + 0.5,
    "own": torch.tensor(0.8),
}


def batch(tokens, seed=0):
    """ids, gates [T, k], rows [T] and τ [R], one of its own for each row."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :K]
    gates = torch.rand(tokens, K, generator=g).softmax(-1)
    rows = torch.tensor(KINDS)[torch.randint(len(KINDS), (tokens,), generator=g)].to(torch.int8)
    tau = torch.linspace(0.02, 0.35, ROWS)[torch.randperm(ROWS, generator=g)]
    tau[PADDING] = 0
    return ids, gates, rows, tau


def poisoned(ids, gates, rows):
    """Padding as engines leave it: any id, any gate."""
    padding = (rows == PADDING)[:, None]
    wild = torch.tensor([-1, 1 << 40, -(1 << 40), EXPERTS, -1, 2**31 - 1])
    return torch.where(padding, wild, ids), torch.where(padding, torch.nan, gates)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("tokens", [30, 300])
def test_each_token_by_its_own_row(name, tokens):
    form, setting = FORMS[name], Setting(min_active=2 if tokens < 256 else 1)
    ids, gates, rows, tau = batch(tokens)
    given = poisoned(ids, gates, rows)
    new_ids, new_gates, counts = launch_rule(form, setting, *given, rows, tau, TABLES, EXPERTS)
    keep, expected = by_rule(form, setting, ids, gates, tau[rows.long()], TABLES)
    real = (rows > 0)[:, None]
    assert torch.equal(new_ids, torch.where(keep & real, ids, EXPERTS))
    torch.testing.assert_close(new_gates, expected * real, rtol=2e-6, atol=1e-7)
    assert torch.equal(counts, counted(rows, torch.ones_like(keep), keep, ROWS))
    shares = counts[1:, 1] / counts[1:, 0].clamp(min=1)
    assert len(set(shares[shares > 0].tolist())) > 2, "rows of different τ lose different shares"


def test_neighbours_change_nothing():
    """A token among others gets what it gets alone; a GPU's larger programs add its gates up in another order."""
    form, setting = FORMS["two tables max"], Setting(min_mass=0.4)
    ids, gates, rows, tau = batch(11, seed=3)
    together = launch_rule(form, setting, ids, gates, rows, tau, TABLES, -1)
    one_by_one = zip(ids.split(1), gates.split(1), rows.split(1), strict=True)
    alone = [launch_rule(form, setting, *token, tau, TABLES, -1) for token in one_by_one]
    alone_ids, alone_gates = (torch.cat(parts) for parts in list(zip(*alone, strict=True))[:2])
    assert torch.equal(together[0], alone_ids)
    torch.testing.assert_close(together[1], alone_gates, rtol=1e-6 if DEVICE == "cuda" else 0, atol=0)
    assert torch.equal(together[2], sum(counts for _, _, counts in alone))


def test_counts_grow_and_the_third_column_is_not_ours():
    """One row for all tokens, several, or padding alone: every way a program adds up."""
    ids, gates, rows, tau = batch(9, seed=4)
    counts = torch.full((ROWS, 3), 5, dtype=torch.int64, device=DEVICE)
    expected, rule = counts.cpu().clone(), text(FORMS["share"], Setting())
    for kinds in (rows, torch.full_like(rows, 2), torch.full_like(rows, PADDING), torch.arange(9).clamp(max=1).char()):
        factor, on_device = torch.ones(2, device=DEVICE), (t.to(DEVICE) for t in (ids, gates, kinds, tau))
        new_ids, _ = decide.launch_rule(*on_device, factor, [], counts, -1, rule)
        keep, _ = by_rule(FORMS["share"], Setting(), ids, gates, tau[kinds.long()], {})
        expected = expected + counted(kinds, torch.ones_like(keep), keep, ROWS)
        assert torch.equal(counts.cpu(), expected)
        assert bool((new_ids[kinds.to(DEVICE) == PADDING] == -1).all())


def test_inputs_may_be_strided():
    """What a router or an engine hands over may be a view; what comes back is contiguous."""
    form, setting = FORMS["table"], Setting()
    ids, gates, rows, tau = batch(13, seed=5)
    wide = torch.stack([ids, torch.full_like(ids, -1)], -1).flatten(1).to(DEVICE)[:, ::2]
    across = gates.t().contiguous().t().to(DEVICE)
    some = torch.stack([rows, torch.full_like(rows, 99)], -1).flatten().to(DEVICE)[::2]
    counts, table = torch.zeros(ROWS, 3, dtype=torch.int64, device=DEVICE), framed(TABLES["a"])
    given = (wide, across, some, framed(tau), torch.ones(2, device=DEVICE), [table], counts, EXPERTS)
    found = decide.launch_rule(*given, text(form, setting))
    expected = launch_rule(form, setting, ids, gates, rows, tau, TABLES, EXPERTS)
    assert all(torch.equal(a.cpu(), b) for a, b in zip((*found, counts), expected, strict=True))
    assert all(t.is_contiguous() for t in found)


def test_what_is_no_number_is_kept():
    """As in `rule.py`: a damaged gate shows, it does not hide as a skipped slot. τ = 0 keeps all."""
    ids, gates = torch.arange(4).expand(2, 4), torch.tensor([[0.5, torch.nan, 0.25, 0.25], [0.5, 0.0, 0.0, 0.5]])
    rows, tau = torch.tensor([2, 1], dtype=torch.int8), torch.tensor([0.0, 0.0, 0.3])
    new_ids, _, counts = launch_rule(FORMS["share"], Setting(), ids, gates, rows, tau, {}, -1)
    assert torch.equal(new_ids, ids) and counts[1:, :2].tolist() == [[4, 4], [4, 4]]
