"""Four-bit floats (E2M1, two in a byte, the low nibble first) with a factor for each group of a row.

    MXFP4   W = e2m1 · 2^(s − 127)        groups of 32
    NVFP4   W = e2m1 · s / global         groups of 16, compressed-tensors: `weight_global_scale` divides
            W = e2m1 · s · scale_2        ModelOpt: `weight_scale_2` multiplies

gpt-oss stores a whole layer as `X_blocks` [E, n, k/32, 16] and `X_scales` [E, n, k/32]; in memory the model has the
transpose [E, k, n]. DeepSeek-V4 has `weight` as I8 with `scale`, compressed-tensors `weight_packed`, ModelOpt `weight`.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from .stored import Facts, Headers, Stored, beside, e2m1, e8m0, unreadable, up

BYTES = ("U8", "I8", "F4")
GROUP = {"U8": 32, "F8_E8M0": 32, "F8_E4M3": 16}


def find(key: str, headers: Headers, facts: Facts) -> Stored | None:
    if key.endswith("_blocks"):
        return _gpt_oss(key, headers)
    name, weight = key.removesuffix("_packed"), headers[key]
    scale = beside(name, headers, "weight_scale", "scale", "scale_inv", "weight_scale_inv")
    if weight.dtype not in BYTES or len(weight.shape) not in (2, 3) or scale is None:
        return None
    group = GROUP.get(headers[scale].dtype)
    if group is None:
        return None
    *rows, k = weight.shape
    k *= 1 if weight.dtype == "F4" else 2  # values, not bytes; the header of an F4 tensor counts values already
    if headers[scale].shape != (*rows, k // group) or k % group:
        return unreadable(
            name, key, weight, f"with {scale} {headers[scale]}, not a factor for each {group} of {[*rows, k]}"
        )
    stack = rows[0] if len(rows) == 2 else None
    if group == 32:
        return Stored(name, "mxfp4", (key, scale), lambda w, s: _grouped(w, e8m0(s), 32), stack)
    return _nv(name, key, scale, stack, headers)


def _grouped(packed: Tensor, factors: Tensor, group: int) -> Tensor:
    """Decode FP4 bytes with a factor for each group of a row."""
    values = e2m1(packed)
    return values * up(factors, group, -1, values.shape[-1])


def _nv(name: str, key: str, scale: str, stack: int | None, headers: Headers) -> Stored:
    """A matrix or stack in NVFP4, whose one factor for the whole tensor divides or multiplies."""
    divides = beside(name, headers, "weight_global_scale")
    multiplies = beside(name, headers, "weight_scale_2")
    whole = divides or multiplies
    if whole is None or (divides and multiplies):
        return unreadable(
            name, key, headers[key], "in NVFP4 without one factor for the whole tensor (weight_global_scale)"
        )
    count = math.prod(headers[whole].shape)
    if count not in (1, stack or 1) or headers[whole].dtype != "F32":
        return unreadable(
            name, key, headers[key], f"with {whole} {headers[whole]}, not one fp32 number for each matrix"
        )
    decode = partial(_nv_decode, divides=divides is not None)
    return Stored(name, "nvfp4", (key, scale, whole), decode, stack, frozenset({whole} if count == 1 else ()))


def _nv_decode(packed: Tensor, scale: Tensor, whole: Tensor, *, divides: bool) -> Tensor:
    factor = whole.float().reshape(())
    return _grouped(packed, scale.float() / factor if divides else scale.float() * factor, 16)


def _gpt_oss(key: str, headers: Headers) -> Stored | None:
    """A whole layer's experts as gpt-oss stores them."""
    name = key.removesuffix("_blocks")
    scales, blocks = headers.get(f"{name}_scales"), headers[key]
    if scales is None or (blocks.dtype, scales.dtype) != ("U8", "U8"):
        return None
    if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, 16):
        return unreadable(name, key, blocks, f"with {name}_scales {scales}, not a factor for each 16 bytes")
    # of one expert: w [n, k/32, 16] and s [n, k/32] → [k, n]
    return Stored(
        name,
        "mxfp4",
        (key, f"{name}_scales"),
        lambda w, s: _grouped(w.flatten(-2), e8m0(s), 32).mT,
        blocks.shape[0],
    )
