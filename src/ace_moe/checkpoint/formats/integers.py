"""`pack-quantized` of compressed-tensors: integers of b bits in int32 words, the lowest bits first.

    W = (u − z) · s        z = 2^(b−1) where there is no `weight_zero_point`

`weight_packed` [n, ⌈k·b/32⌉] is packed along rows, `weight_zero_point` [⌈n·b/32⌉, G] along columns; `weight_scale` is [n, G]
and column j belongs to group j // (k/G), or to `weight_g_idx`[j] where there is one that is set (act-order). `weight_shape`
holds (n, k). Bits other than 2, 4, 8 lie across words in recent files and not in old ones: the width tells which.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...errors import CheckpointError
from .stored import FLOATS, Facts, Headers, Stored, beside, named_groups, unpacked, unreadable

USUAL = (2, 4, 8)


def find(key: str, headers: Headers, facts: Facts) -> Stored | None:
    if not key.endswith(".weight_packed") or headers[key].dtype != "I32":
        return None
    name, packed = key.removesuffix("_packed"), headers[key]
    parts = {p: beside(name, headers, f"weight_{p}") for p in ("scale", "shape", "zero_point", "g_idx")}
    if parts["scale"] is None or headers[parts["scale"]].dtype not in FLOATS or parts["shape"] is None:
        return unreadable(name, key, packed, "without weight_scale and weight_shape")
    scale = headers[parts["scale"]].shape
    if len(packed.shape) != 2 or len(scale) != 2 or scale[0] != packed.shape[0]:
        return unreadable(name, key, packed, f"with {parts['scale']} {list(scale)}, not factors for each row")
    present = {p: k for p, k in parts.items() if k is not None}
    decode = partial(_decode, roles=tuple(present), allowed=frozenset(map(int, facts.all("num_bits"))), key=key)
    return Stored(name, "int packed", (key, *present.values()), decode)


def _decode(words: Tensor, *parts: Tensor, roles: tuple[str, ...], allowed: frozenset[int], key: str) -> Tensor:
    """Decode to [n, k] in fp32."""
    part = dict(zip(roles, parts, strict=True))
    (n, k), scale = part["shape"].tolist(), part["scale"].float()
    bits, dense = _bits(words.shape[1], k, allowed, key)
    groups = _groups(part.get("g_idx"), k, scale.shape[1], key, words.device)
    values = _integers(words, bits, dense)[:n, :k].float()
    zeros, middle = part.get("zero_point"), 1 << (bits - 1)
    if zeros is None:
        return (values - middle) * scale[:, groups]
    packed = zeros.dtype == torch.int32  # else they are plain integers, of signed values
    zeros = _integers(zeros.mT.contiguous(), bits, dense).mT[:n] if packed else zeros.int() + middle
    return (values - zeros.float()[:, groups]) * scale[:, groups]


def _bits(words: int, k: int, allowed: frozenset[int], key: str) -> tuple[int, bool]:
    """Find the bits that fill this many words with k values, and if values lie across words."""
    ways = {(b, True) for b in range(1, 9) if -(-k * b // 32) == words}
    ways |= {(b, 32 % b == 0) for b in range(1, 9) if -(-k // (32 // b)) == words}
    ways = {w for w in ways if w[0] in (allowed or USUAL)} or (set() if allowed else ways)
    if len(ways) != 1:
        raise CheckpointError(
            f"{key}: {words} words hold {k} values in {'no' if not ways else 'more than one'} known way "
            f"(bits by the configuration: {sorted(allowed) or 'not said'}). Build the plan from the unquantised checkpoint."
        )
    return ways.pop()


def _integers(words: Tensor, bits: int, dense: bool) -> Tensor:
    """Unpack [n, w] → [n, values]; more values than there are weights where the last word is not full."""
    if 32 % bits == 0 or not dense:
        return unpacked(words, bits)
    stream = unpacked(words, 1)
    whole = stream.shape[-1] // bits
    each = stream[..., : whole * bits].unflatten(-1, (whole, bits))
    return (each << torch.arange(bits, dtype=torch.int32, device=words.device)).sum(-1)


def _groups(g_idx: Tensor | None, k: int, count: int, key: str, device: torch.device) -> Tensor:
    """Name the group of each column [k]."""
    if g_idx is not None and not (g_idx < 0).any():
        return named_groups(g_idx, k, count, key)
    if count > 1 and k % count:
        raise CheckpointError(
            f"{key}: {k} columns are not {count} groups of one size. Give the unquantised checkpoint."
        )
    return torch.arange(k, device=device) // (k // count)
