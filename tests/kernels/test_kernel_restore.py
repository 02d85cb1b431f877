"""Slots whose expert is read anyway come back: the kernels against `rule.py`, in one launch or two, for any step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, by_rule, counted, factor, framed, text
from plain_rule import FORMS, Setting

from ace_moe import rule
from ace_moe.decider.rows import PADDING, row_of, rows_for
from ace_moe.kernels import decide

ROWS = rows_for(2)
KINDS = [PADDING, row_of("prefill"), row_of("decode"), row_of("verify"), row_of("decode", 1)]
FREE = torch.tensor([int(r > 0 and (r - 1) % 3 > 0) for r in range(ROWS)], dtype=torch.int8)
FORM = FORMS["share"]


def batch(tokens, k, experts, kinds, seed):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=g) * 2
    gates, ids = logits.softmax(-1).topk(k, dim=-1)
    rows = torch.tensor(kinds)[torch.randint(len(kinds), (tokens,), generator=g)].to(torch.int8)
    tau = torch.full((ROWS,), 1.2 / k)
    tau[PADDING] = 0
    tau[row_of("decode", 1)] = 2.0
    return logits, ids, gates / gates.sum(-1, keepdim=True), rows, tau


def launch(ids, gates, rows, tau, experts, mark, free=FREE, gain="power"):
    """ids, gates, counts [R, 3], reads [2, 2]; every input among poison."""
    counts, reads = (framed(torch.zeros(s, dtype=torch.int64)) for s in ((ROWS, 3), (2, 2)))
    setting = Setting(gain=gain)
    common = (framed(ids), framed(gates), framed(rows), framed(tau), factor(FORM, setting, {}), [], counts, mark)
    found = decide.launch_rule(*common, text(FORM, setting), [framed(free), reads], experts)
    return *(t.cpu() for t in found), counts.cpu(), reads.cpu()


def expected(ids, gates, rows, tau, experts, free=FREE, gain="power"):
    """(what the rule keeps, what runs, gates, counts, reads) by `rule.py`."""
    keep, _ = by_rule(FORM, Setting(gain=gain), ids, gates, tau[rows.long()], {})
    real = (rows > 0).unsqueeze(-1)
    every, kept = torch.ones_like(keep) & real, keep & real
    read, asked = rule.union(ids, kept, experts), rule.union(ids, every, experts)
    runs = rule.restore(kept, ids, read, free[rows.long()] > 0) & real
    counts = counted(rows, every, kept, ROWS)
    counts[:, 2].index_add_(0, rows.long(), (runs & ~kept).sum(-1))
    reads, prompt = torch.zeros(2, 2, dtype=torch.int64), int(((rows > 0) & (rows % 3 == 1)).any())
    reads[prompt] = torch.stack([read.sum(), asked.sum()])
    return kept, runs, rule.rescale(gates, runs, gain) * real, counts, reads


@pytest.mark.parametrize("gain", ["kept", "none", "power", "1.25"])
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 70, 256, 300])
def test_the_kernels_restore_as_the_rule_does(tokens, gain):
    """One program, every program by itself, and votes counted before: 6 slots of 40 experts."""
    _, ids, gates, rows, tau = batch(tokens, 6, 40, KINDS, tokens)
    new_ids, new_gates, counts, reads = launch(ids, gates, rows, tau, 40, -1, gain=gain)
    kept, runs, scaled, counted_, read = expected(ids, gates, rows, tau, 40, gain=gain)
    assert torch.equal(new_ids, torch.where(runs, ids, -1))
    torch.testing.assert_close(new_gates, scaled, rtol=3e-6, atol=1e-7)
    assert torch.equal(counts, counted_) and torch.equal(reads, read)
    assert (runs >= kept).all()
    if tokens > 16:
        assert (runs & ~kept).any(), "the case restores something"


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 10), st.integers(10, 70), st.sampled_from([[row_of("decode")], KINDS]),
    st.integers(0, 99), st.sampled_from([-1, 70]),
)  # fmt: skip
def test_any_step(tokens, k, experts, kinds, seed, mark):
    """Reads are the plain rule's; prompts get nothing back; padding neither votes nor runs; rows not free are as alone."""
    _, ids, gates, rows, tau = batch(tokens, k, experts, kinds, seed)
    wild = torch.where((rows == PADDING).unsqueeze(-1), torch.tensor(2**31 - 1), ids)
    new_ids, _, _, reads = launch(wild, gates, rows, tau, experts, mark)
    kept, runs, _, _, read = expected(ids, gates, rows, tau, experts)
    assert torch.equal(new_ids, torch.where(runs, ids, mark)) and torch.equal(reads, read)
    assert torch.equal(rule.union(ids, runs, experts), rule.union(ids, kept, experts))
    plain = launch(wild, gates, rows, tau, experts, mark, free=torch.zeros_like(FREE))
    assert torch.equal(plain[0], torch.where(kept, ids, mark)) and torch.equal(plain[3], reads)
    assert int(plain[2][:, 2].sum()) == 0


@pytest.mark.parametrize("tokens", [9, 40])
def test_order_and_padding_change_nothing(tokens):
    _, ids, gates, rows, tau = batch(tokens, 8, 32, [row_of("decode"), row_of("verify")], 5)
    first = launch(ids, gates, rows, tau, 32, -1)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    shuffled = launch(ids[order], gates[order], rows[order], tau, 32, -1)
    pad = torch.zeros(7, 8)
    padded = launch(
        torch.cat([ids, pad.long() - 1]), torch.cat([gates, pad]), torch.cat([rows, pad[:, 0].char()]), tau, 32, -1
    )
    for i in (0, 1):
        assert torch.equal(first[i][order], shuffled[i]) and torch.equal(first[i], padded[i][:tokens])
    assert all(torch.equal(first[i], other[i]) for i in (2, 3) for other in (shuffled, padded))


@pytest.mark.parametrize("tokens", [1, 5, 16, 33])
def test_fused_with_the_router_it_is_the_same(tokens):
    logits, ids, gates, rows, tau = batch(tokens, 8, 48, KINDS, tokens + 1)
    counts, reads = (torch.zeros(s, dtype=torch.int64, device=DEVICE) for s in ((ROWS, 3), (2, 2)))
    common = (
        framed(logits),
        framed(rows),
        framed(tau),
        factor(FORM, Setting(), {}),
        [],
        counts,
        -1,
        text(FORM, Setting()),
    )
    fused = decide.launch_route(*common, 8, False, True, 1.0, torch.float32, torch.int32, [framed(FREE), reads])
    apart = launch(ids, gates, rows, tau, 48, -1)
    assert torch.equal(fused[0].cpu().long(), apart[0])
    torch.testing.assert_close(fused[1].cpu(), apart[1], rtol=3e-6, atol=1e-7)
    assert torch.equal(counts.cpu(), apart[2]) and torch.equal(reads.cpu(), apart[3])
