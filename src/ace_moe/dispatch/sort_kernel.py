"""Kept slots sorted by expert on the device, and the tiles they make."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rank(ids, counts, ranks, S, E, BLOCK: tl.constexpr):
    """ranks [S] ← number among its expert's slots; counts [E] from zero. The order of ranks has no influence on results."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(ids + slot, mask=slot < S, other=-1)
    kept = (e >= 0) & (e < E)
    tl.store(ranks + slot, tl.atomic_add(counts + e, 1, mask=kept, sem="relaxed"), mask=slot < S)


@triton.jit
def sort(ids, counts, ranks, order, S, E, EP: tl.constexpr, BLOCK: tl.constexpr):
    """order ← kept slots, expert after expert."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lanes = tl.arange(0, EP)
    count = tl.load(counts + lanes, mask=lanes < E, other=0)
    e = tl.load(ids + slot, mask=slot < S, other=-1)
    kept = (e >= 0) & (e < E)
    start = tl.sum(tl.where(lanes[None, :] < e[:, None], count[None, :], 0), 1)
    tl.store(order + start + tl.load(ranks + slot, mask=kept, other=0), slot, mask=kept)


@triton.jit
def tiles(counts, tile_expert, tile_start, tile_rows, E, EP: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr):
    """For each tile of at most BM slots: its expert (−1 past the last), where its slots start in `order`, how many."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lanes = tl.arange(0, EP)
    count = tl.load(counts + lanes, mask=lanes < E, other=0)
    needed = (count + BM - 1) // BM
    ends = tl.cumsum(needed, 0)
    before = (ends[None, :] <= t[:, None]) & (lanes < E)[None, :]
    e = tl.sum(before.to(tl.int32), 1)
    first = tl.sum(tl.where(before, needed[None, :], 0), 1)
    slots_before = tl.sum(tl.where(before, count[None, :], 0), 1)
    own = tl.sum(tl.where(lanes[None, :] == e[:, None], count[None, :], 0), 1)
    tl.store(tile_expert + t, tl.where(e < E, e, -1))
    tl.store(tile_start + t, slots_before + (t - first) * BM)
    tl.store(tile_rows + t, tl.minimum(BM, own - (t - first) * BM))
