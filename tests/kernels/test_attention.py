"""Decode attention in Triton's interpreter against torch's."""

import os

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from ace_moe.kernels.attend import attend, attend_token, split, workspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("batch", "heads", "group"), [(1, 2, 8), (3, 1, 1), (2, 3, 5)])
@pytest.mark.parametrize(("positions", "width"), [(1, 16), (63, 32), (300, 40), (6000, 16)])
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


def turned(x, scale, cos, sin, plus, rounded):
    """x [B, 1, H, D] normed and turned as transformers does it → [B, H, 1, D]."""
    if scale is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (scale + plus)
    first, second = x.chunk(2, dim=-1)
    return (x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]).transpose(1, 2)


@pytest.mark.parametrize(("batch", "heads", "group", "width"), [(1, 2, 8, 16), (3, 1, 1, 24), (2, 3, 5, 40)])
@pytest.mark.parametrize(("positions", "place"), [(1, 0), (300, 0), (300, 130), (300, 299), (6000, 4242)])
@pytest.mark.parametrize(("normed", "plus"), [(False, False), (True, True)])
def test_a_token_is_normed_turned_and_kept_on_the_way(batch, heads, group, width, positions, place, normed, plus):
    """What lies at its place before, even NaN, is not read."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, 1, n, width, generator=g).to(DEVICE) for n in (heads * group, heads, heads))
    cos, sin = (torch.randn(batch if place else 1, 1, width, generator=g).to(DEVICE) for _ in range(2))
    scales = [torch.randn(width, generator=g).to(DEVICE) for _ in range(2)] if normed else [None, None]
    before = [torch.randn(batch, heads, positions, width, generator=g).to(DEVICE) for _ in range(2)]
    mask = torch.rand(batch, 1, 1, positions, generator=g).to(DEVICE) < 0.7
    mask[..., place] = True
    at, arrived = torch.tensor([place], device=DEVICE), workspace(torch.device(DEVICE))
    query, key = (turned(x, s, cos, sin, plus, False) for x, s in zip((q, k), scales, strict=True))
    caches = [x.index_copy(2, at, new) for x, new in zip(before, (key, v.transpose(1, 2)), strict=True)]
    expected = attend(query, *caches, mask, arrived, 0.3)
    for x in before:
        x[:, :, place] = torch.nan
    found = attend_token(
        *(x.flatten(1) for x in (q, k, v)), cos, sin, *before, at, mask, arrived, 0.3, *scales, 1e-5, plus
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for cache, kept in zip(caches, before, strict=True):
        torch.testing.assert_close(kept, cache, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(DEVICE == "cuda", reason="the cache is a file with holes")
def test_a_cache_of_more_elements_than_32_bits_count(tmp_path):
    """Many heads with a long cache each; an offset that has wrapped around lands in the empty half of the file."""
    far, file = 2**30, tmp_path / "cache"
    with file.open("wb") as made:
        made.truncate(2 * (4 * far + 128))
    flat = torch.from_file(str(file), shared=True, size=4 * far + 128, dtype=torch.float16)
    cache = flat.as_strided((1, 3, 8, 16), (0, far, 16, 1), 2 * far)
    cache.copy_(torch.randn(1, 3, 8, 16, generator=torch.Generator().manual_seed(0)))
    q = torch.randn(1, 3, 1, 16, generator=torch.Generator().manual_seed(1)).half()
    near = cache.contiguous()
    wanted = attend(q, near, near, None, workspace(torch.device(DEVICE)), 1.0)
    assert torch.equal(attend(q, cache, cache, None, workspace(torch.device(DEVICE)), 1.0), wanted)


def test_what_is_masked_is_not_read():
    """A static cache holds anything behind its last token, also NaN."""
    k = torch.full((1, 1, 200, 16), torch.nan, device=DEVICE)
    k[:, :, :130] = torch.randn(130, 16, device=DEVICE)
    mask = (torch.arange(200, device=DEVICE) < 130)[None, None, None, :]
    y = attend(torch.randn(1, 4, 1, 16, device=DEVICE), k, k.clone(), mask, workspace(torch.device(DEVICE)), 1.0)
    assert y.isfinite().all()


@pytest.mark.parametrize("positions", [1, 64, 65, 272, 1000, 40000])
@pytest.mark.parametrize("pairs", [1, 4, 64, 1000])
@pytest.mark.parametrize("row", [64, 1024])
def test_splits_cover_every_position(positions, pairs, row):
    splits, step, tile = split(positions, pairs, row)
    assert (splits - 1) * step < positions <= splits * step
    assert step % tile == 0 and tile * row <= 64 * 1024
