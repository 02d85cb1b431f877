"""Decode attention in Triton's interpreter against torch's."""

import os

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from ace_moe.kernels.attend import attend, split, workspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("batch", "heads", "group"), [(1, 2, 8), (3, 1, 1), (2, 3, 5)])
@pytest.mark.parametrize(("positions", "width"), [(1, 16), (63, 32), (300, 40)])
def test_grouped_attention_is_attention(batch, heads, group, positions, width):
    """One split or several, widths that are no power of two, strided queries, sequences of different lengths."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(batch, 1, heads * group, width, generator=g).to(DEVICE).transpose(1, 2)
    k, v = (torch.randn(batch, heads, positions, width, generator=g).to(DEVICE) for _ in range(2))
    lengths = torch.randint(1, positions + 1, (batch,), generator=g)
    mask = (torch.arange(positions)[None, :] < lengths[:, None])[:, None, None, :].to(DEVICE)
    arrived = workspace(torch.device(DEVICE))
    for seen in (None, mask):
        wide_k, wide_v = (t.repeat_interleave(group, 1) for t in (k, v))
        expected = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=seen, scale=0.3).transpose(1, 2)
        torch.testing.assert_close(attend(q, k, v, seen, arrived, 0.3), expected, rtol=1e-4, atol=1e-5)
        assert not arrived.any(), "the workspace must be zero after every call"


def test_what_is_masked_is_not_read():
    """A static cache holds anything behind its last token, also NaN."""
    k = torch.full((1, 1, 200, 16), torch.nan, device=DEVICE)
    k[:, :, :130] = torch.randn(130, 16, device=DEVICE)
    mask = (torch.arange(200, device=DEVICE) < 130)[None, None, None, :]
    y = attend(torch.randn(1, 4, 1, 16, device=DEVICE), k, k.clone(), mask, workspace(torch.device(DEVICE)), 1.0)
    assert y.isfinite().all()


@pytest.mark.parametrize("positions", [1, 64, 65, 272, 1000, 40000])
@pytest.mark.parametrize("pairs", [1, 4, 64, 1000])
def test_splits_cover_every_position(positions, pairs):
    splits, step = split(positions, pairs)
    assert (splits - 1) * step < positions <= splits * step
    assert step % 64 == 0
