"""Kept slots as a bit matrix."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def pack(
    ids, gates, short, scaled, bits, T, COLUMNS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr
):
    """Grid (blocks of BM tokens)."""
    row, slot = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, KP)
    at, there = row[:, None] * K + slot[None, :], (row < T)[:, None] & (slot < K)[None, :]
    e = tl.load(ids + at, mask=there, other=-1).to(tl.int32)
    gate = tl.load(gates + at, mask=there, other=0.0)
    tl.store(short + at, e.to(tl.int16), mask=there)
    tl.store(scaled + at, tl.where(e < 0, -1.0, gate).to(scaled.dtype.element_ty), mask=there)
    for column in range(COLUMNS):
        here = (e >= column * 32) & (e < column * 32 + 32)
        bit = tl.full((BM, KP), 1, tl.uint32) << tl.where(here, e - column * 32, 0).to(tl.uint32)
        word = tl.sum(tl.where(here, bit, 0), 1)  # a token's experts differ: the sum is the union
        tl.store(bits + row * COLUMNS + column, word.to(tl.uint32), mask=row < T)
