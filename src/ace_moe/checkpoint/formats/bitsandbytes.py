"""bitsandbytes: 4 bit (nf4, fp4; nested or not) and int8.

    4 bit   W = quant_map[code] · absmax[i // blocksize]   over the flattened matrix, the high nibble first
    nested  absmax = nested_quant_map[absmax] · nested_absmax[i // nested_blocksize] + nested_offset
    int8    W = w · SCB / 127

The shape of a 4-bit matrix and its block sizes are JSON in the bytes of `weight.quant_state.bitsandbytes__nf4` (or `__fp4`).
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from ...errors import CheckpointError, brief
from .stored import Facts, Headers, Stored, unreadable, up

STATE = "quant_state.bitsandbytes__"


def find(key: str, headers: Headers, facts: Facts) -> Stored | None:
    weight, stem = headers[key], key.removesuffix("weight")
    if weight.dtype == "I8" and key.endswith(".weight") and f"{stem}SCB" in headers:
        return _int8(key, f"{stem}SCB", headers)
    state = next((f"{key}.{STATE}{kind}" for kind in ("nf4", "fp4") if f"{key}.{STATE}{kind}" in headers), None)
    if state is None:
        return None
    parts = [f"{key}.{p}" for p in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")]
    nested = headers.get(parts[0]) is not None and headers[parts[0]].dtype == "U8"
    needed = parts if nested else parts[:2]
    missing = [p for p in needed if p not in headers]
    if missing or weight.dtype != "U8":
        return unreadable(key, key, weight, f"of bitsandbytes, whose {missing[0] if missing else 'bytes'} is missing")
    return Stored(key, f"bitsandbytes {state[-3:]}", (key, state, *needed), _four_bit)


def _int8(key: str, scale: str, headers: Headers) -> Stored:
    """An int8 matrix with one factor for each row."""
    weight, own = headers[key], headers[scale]
    if len(weight.shape) != 2 or own.shape not in ((weight.shape[0],), (weight.shape[0], 1)) or own.dtype != "F32":
        return unreadable(key, key, weight, f"with {scale} {own}, not one number for each row")
    form = f"{key.removesuffix('weight')}weight_format"
    keys = (key, scale, form) if form in headers else (key, scale)
    return Stored(key, "bitsandbytes int8", keys, _rows)


def _rows(weight: Tensor, scale: Tensor, form: Tensor | None = None) -> Tensor:
    if form is not None and int(form):
        raise CheckpointError("bitsandbytes int8 in tiles of a GPU (weight_format ≠ 0): save the model again in rows.")
    return weight.float() * (scale.float().reshape(-1, 1) / 127)


def _four_bit(packed: Tensor, state: Tensor, absmax: Tensor, table: Tensor, *nested: Tensor) -> Tensor:
    """Decode a matrix to fp32, in the shape its state names."""
    facts = _state(state)
    if nested:
        own, codes = nested
        base = up(own.float(), int(facts["nested_blocksize"]), 0, absmax.numel())
        absmax = codes.float()[absmax.flatten().int()] * base + float(facts["nested_offset"])
    codes = packed.flatten()
    values = table.float()[torch.stack((codes >> 4, codes & 15), -1).flatten().int()]
    count = int(torch.Size(facts["shape"]).numel())
    return (values[:count] * up(absmax.float().flatten(), int(facts["blocksize"]), 0, count)).reshape(facts["shape"])


def _state(state: Tensor) -> dict:
    try:
        return json.loads(bytes(state.tolist()))
    except ValueError as error:
        raise CheckpointError(
            f"A bitsandbytes quant_state is not JSON ({brief(error)}). Download the file again."
        ) from error
