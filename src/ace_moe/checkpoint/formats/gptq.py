"""GPTQ (also AutoRound's packing of it) and AWQ: `qweight`, `qzeros`, `scales` in int32 words, input features first.

    GPTQ   qweight [k·b/32, n], qzeros [G, n·b/32], scales [G, n]:  W = ((u − z[g]) · s[g])ᵀ,  g = `g_idx` [k] or i // (k/G)
    AWQ    qweight [k, n/8], qzeros [G, n/8], scales [G, n], 4 bit:  the same, nibble i of a word is column 0 2 4 6 1 3 5 7 [i]

GPTQ's first format stores zero points less one: one is added to each field of the whole word, with carries, which undoes
exactly what its writers do. Only the configuration tells it from the second (`checkpoint_format`, AutoRound's
`packing_format`), except where a file says it is symmetric: then zero points are 2^(b−1), and words show which it is.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...errors import CheckpointError
from .stored import FLOATS, Facts, Headers, Stored, named_groups, unpacked, unreadable

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
ONE = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # one in each field of a word
FIRST = ("gptq", "auto_round:auto_gptq")
SECOND = ("gptq_v2", "auto_round", "auto_round:gptqmodel")


def find(key: str, headers: Headers, facts: Facts) -> Stored | None:
    if not key.endswith(".qweight"):
        return None
    stem = key.removesuffix("qweight")
    name, weight = f"{stem}weight", headers[key]
    zeros, scales, g_idx = (headers.get(stem + part) for part in ("qzeros", "scales", "g_idx"))
    if zeros is None or scales is None or (weight.dtype, zeros.dtype) != ("I32", "I32") or scales.dtype not in FLOATS:
        return unreadable(name, key, weight, "without int32 qzeros and floating scales")
    if not len(weight.shape) == len(zeros.shape) == len(scales.shape) == 2 or zeros.shape[0] != scales.shape[0]:
        return unreadable(name, key, weight, f"with qzeros {zeros} and scales {scales}, which do not belong together")
    keys = (key, f"{stem}qzeros", f"{stem}scales")
    n, groups = scales.shape[1], scales.shape[0]
    if 8 * weight.shape[1] == n == 8 * zeros.shape[1] and g_idx is None and weight.shape[0] % groups == 0:
        if str(facts.config.get("version", "gemm")).lower() != "gemm":
            return unreadable(name, key, weight, f"of AWQ version {facts.config['version']}, which is not read")
        return Stored(name, "awq", keys, _awq)
    bits = next((b for b in ONE if n * b == 32 * zeros.shape[1]), None)
    if weight.shape[1] != n or bits is None:
        return unreadable(
            name, key, weight, f"with qzeros {zeros} and scales {scales}: neither GPTQ of 2, 4 or 8 bit nor AWQ"
        )
    k = weight.shape[0] * 32 // bits
    if g_idx is None and k % groups and -(-k // _group_size(facts)) != groups:
        return unreadable(name, key, weight, f"with scales {scales}: {k} columns are not {groups} groups")
    decode = partial(
        _gptq, bits=bits, first=_first(facts), symmetric=facts.config.get("sym"), size=_group_size(facts), key=key
    )
    return Stored(name, f"gptq {bits} bit", keys if g_idx is None else (*keys, f"{stem}g_idx"), decode)


def _group_size(facts: Facts) -> int:
    size = facts.config.get("group_size")
    return size if isinstance(size, int) and size > 0 else 1 << 62


def _first(facts: Facts) -> bool | None:
    """Tell by the configuration if zero points are stored less one; None where it does not say."""
    named = (facts.config.get(n) for n in ("packing_format", "checkpoint_format", "format"))
    kind = next((n for n in named if n), facts.method)
    return True if kind in FIRST else False if kind in SECOND else None


def _gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int,
    first: bool | None,
    symmetric: bool | None,
    size: int,
    key: str,
) -> Tensor:
    """[n, k] in fp32."""
    values = unpacked(qweight.mT.contiguous(), bits).mT.float()
    k, count = values.shape[0], scales.shape[0]
    if g_idx is None:
        groups = torch.arange(k, device=qweight.device) // (k // count if k % count == 0 else size)
    else:
        groups = named_groups(g_idx, k, count, key)
    zeros = unpacked(_second(qzeros, bits, first, symmetric, key), bits).float()
    return ((values - zeros[groups]) * scales.float()[groups]).mT


def _second(qzeros: Tensor, bits: int, first: bool | None, symmetric: bool | None, key: str) -> Tensor:
    """Turn zero points into those of the second format."""
    middle = torch.tensor(ONE[bits] << (bits - 1)).int().to(qzeros.device)  # wraps: the top bit is a sign here
    seen = True if (qzeros == middle - ONE[bits]).all() else False if (qzeros == middle).all() else None
    less = first if symmetric is False or (symmetric is None and first is not None) else seen
    if less is None or (first is not None and less != first):
        said = {True: "yes", False: "no", None: "nothing"}
        raise CheckpointError(
            f"{key}: whether its zero points are stored less one cannot be told: the configuration says {said[first]}, a "
            f"symmetric file's words would say {said[seen]} (symmetric: {symmetric}). Set checkpoint_format in config.json to "
            "gptq or gptq_v2, as its makers say."
        )
    return qzeros + ONE[bits] if less else qzeros


def _awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """[n, k] in fp32."""
    places = torch.tensor(
        [ORDER.index(c) for c in range(8)], device=qweight.device
    )  # field i is column ORDER[i] of eight
    fields = (unpacked(words, 4).unflatten(-1, (-1, 8)) for words in (qweight, qzeros))
    values, zeros = (field[..., places].flatten(-2).float() for field in fields)
    groups = torch.arange(qweight.shape[0], device=qweight.device) // (qweight.shape[0] // qzeros.shape[0])
    return ((values - zeros[groups]) * scales.float()[groups]).mT
