"""The bit matrix of kept slots: a bit for every kept expert of a token and for no other."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, TOLERANCE, framed

from ace_moe.kernels.bits import packed


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 32, 4), (40, 128, 8), (33, 100, 6), (5, 31, 1)])
def test_every_kept_slot_is_a_bit(tokens: int, experts: int, k: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    gates, ids = torch.rand(tokens, experts, generator=generator).topk(k)
    ids = torch.where(torch.rand(tokens, k, generator=generator) < 0.4, -1, ids).int()
    short, scaled, bits = packed(framed(ids), framed(gates), experts)
    assert short.dtype == torch.int16 and torch.equal(short.cpu().int(), ids)
    wide = torch.where(ids < 0, -1, gates)  # the interpreter cuts off where a GPU rounds
    torch.testing.assert_close(scaled.cpu().float(), wide, rtol=TOLERANCE[torch.bfloat16], atol=0)
    numbers = torch.arange(bits.shape[1] * 32, device=DEVICE)
    found = (bits.to(torch.int64)[:, numbers // 32] >> (numbers % 32)) & 1
    wanted = torch.zeros(tokens, len(numbers) + 1, dtype=torch.int64).scatter_(1, ids.long() % (len(numbers) + 1), 1)
    assert torch.equal(found.cpu(), wanted[:, :-1])
