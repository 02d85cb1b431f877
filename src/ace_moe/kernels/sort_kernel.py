"""Kept slots sorted by expert on the device, and the tiles they make.

Few slots are one program's work and one launch: next to reading a few experts, every launch shows. The order of an
expert's slots has no influence on results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import take_turn


@triton.jit
def _ranks(ids, counts, slot, S, E):
    """(expert, whether kept, number among its expert's slots) of slots [BLOCK]; counts [E] grow."""
    e = tl.load(ids + slot, mask=slot < S, other=-1).to(tl.int32)
    kept = (e >= 0) & (e < E)
    return e, kept, tl.atomic_add(counts + e, 1, mask=kept, sem="relaxed")


@triton.jit
def _place(
    e, kept, ranks, slot, counts, order, used, tile_expert, tile_start, tile_rows, E, EP: tl.constexpr, BM: tl.constexpr
):
    """order ← kept slots, expert after expert; for each of the `used` tiles of at most BM slots its expert, where its
    slots start in `order` and how many they are. Programs share the tiles."""
    lanes = tl.arange(0, EP)
    count = tl.load(counts + lanes, mask=lanes < E, other=0, cache_modifier=".cg")
    start = tl.cumsum(count, 0) - count
    tl.store(order + tl.gather(start, tl.where(kept, e, 0), 0) + ranks, slot, mask=kept)
    needed = (count + BM - 1) // BM
    first = tl.cumsum(needed, 0) - needed
    for i in range(tl.program_id(0), tl.max(needed, 0), tl.num_programs(0)):
        there = i < needed
        tl.store(tile_expert + first + i, lanes, mask=there)
        tl.store(tile_start + first + i, start + i * BM, mask=there)
        tl.store(tile_rows + first + i, tl.minimum(BM, count - i * BM), mask=there)
    if tl.program_id(0) == 0:
        tl.store(used, tl.sum(needed, 0))


@triton.jit(do_not_specialize=["S"])
def sort(
    ids, counts, order, used, tile_expert, tile_start, tile_rows, S, E,
    SP: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All of it for at most SP slots. Grid (1)."""
    take_turn(EARLY)
    lanes = tl.arange(0, EP)
    tl.store(counts + lanes, tl.zeros((EP,), tl.int32), mask=lanes < E)
    tl.debug_barrier()
    slot = tl.arange(0, SP)
    e, kept, ranks = _ranks(ids, counts, slot, S, E)
    tl.debug_barrier()
    _place(e, kept, ranks, slot, counts, order, used, tile_expert, tile_start, tile_rows, E, EP, BM)


@triton.jit(do_not_specialize=["S"])
def rank(ids, counts, ranks, S, E, BLOCK: tl.constexpr):
    """The first half for any number of slots; counts [E] from zero."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, kept, found = _ranks(ids, counts, slot, S, E)
    tl.store(ranks + slot, found, mask=kept)


@triton.jit(do_not_specialize=["S"])
def place(
    ids, counts, ranks, order, used, tile_expert, tile_start, tile_rows, S, E,
    EP: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The second half."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(ids + slot, mask=slot < S, other=-1).to(tl.int32)
    kept = (e >= 0) & (e < E)
    found = tl.load(ranks + slot, mask=kept, other=0)
    _place(e, kept, found, slot, counts, order, used, tile_expert, tile_start, tile_rows, E, EP, BM)
