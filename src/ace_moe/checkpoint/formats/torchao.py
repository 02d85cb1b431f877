"""torchao's safetensors: `_weight_qdata`, `_weight_scale` and, for integers, `_weight_zero_point`.

    W = (q − z) · s        one factor for each block of `block_size`

Which tensor class a weight is, with its block size, stands in the file's own metadata, under the weight's name.
"""

from __future__ import annotations

import json
from functools import partial

from .scaled import Sharing, decode
from .stored import Facts, Headers, Stored, unreadable

KINDS = {"Int8Tensor": "I8", "Float8Tensor": "F8_E4M3"}


def find(key: str, headers: Headers, facts: Facts) -> Stored | None:
    if not key.endswith("_qdata"):
        return None
    path, _, leaf = key.removesuffix("_qdata").rpartition(".")
    name, weight = f"{path}.{leaf.removeprefix('_')}", headers[key]
    stem = key.removesuffix("qdata")
    try:
        said = json.loads(facts.metadata[name])
        kind, block = said["_type"], [int(b) for b in said["_data"]["block_size"]]
    except (KeyError, ValueError, TypeError):
        return unreadable(name, key, weight, "of torchao, and the file's metadata does not say which of its types")
    if KINDS.get(kind) != weight.dtype:
        return unreadable(name, key, weight, f"of torchao's {kind}, which is not read")
    scale, zero = headers.get(f"{stem}scale"), f"{stem}zero_point"
    grid = tuple(-(-size // b) for size, b in zip(weight.shape, block, strict=False))
    if scale is None or scale.shape != grid or len(weight.shape) not in (2, 3):
        return unreadable(name, key, weight, f"of torchao, whose scale is {scale}, not {list(grid)}")
    keys = (key, f"{stem}scale", zero) if zero in headers and headers[zero].shape == grid else (key, f"{stem}scale")
    stack = weight.shape[0] if len(weight.shape) == 3 else None
    if stack and block[0] != 1:
        return unreadable(name, key, weight, "of torchao with factors that experts share")
    sharing = Sharing((grid[-2], grid[-1]), (block[-2], block[-1]), halves=False)
    what = f"torchao {'int8' if kind == 'Int8Tensor' else 'fp8'}"
    return Stored(name, what, keys, partial(decode, sharing=sharing), stack)
