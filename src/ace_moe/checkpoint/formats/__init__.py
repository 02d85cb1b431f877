"""Formats on disk, one file for each: which tensors belong together, and what numbers they mean.

A format is a function that is asked for every tensor on disk whether it is its main one, and answers with a `Stored`. What
is on disk decides, tensor by tensor; the configuration is asked where disk cannot tell. What no format knows is not guessed.
"""

from __future__ import annotations

import re
from collections import defaultdict

from . import bitsandbytes, fp4, gptq, integers, scaled, torchao
from .stored import PLAIN, Facts, Find, Get, Header, Headers, Stored, config_of, facts_of, unreadable

__all__ = ["PLAIN", "Facts", "Get", "Header", "Headers", "Stored", "config_of", "facts_of", "strays", "understand"]

FORMATS: tuple[Find, ...] = tuple(f.find for f in (bitsandbytes, torchao, gptq, integers, fp4, scaled))
# belongs to activations or the cache of keys and values, or repeats what shapes say
NOT_WEIGHTS = re.compile(
    r"(^|[._])(input_scale|input_scale_inv|activation_scale|input_global_scale|input_zero_point|output_scale|qscale_act"
    r"|[kvq]_scale|k_proj\.output_scale|v_proj\.output_scale|prob_scale|input_amax|weight_shape)$"
)
NO_WEIGHT = {".weight_packed": ".weight", "_blocks": "", ".compressed": ".weight"}  # what stands in a weight's place
COMPANION = re.compile(r"scale|zero|absmax|packed|g_idx|quant|SCB|blocks|bitmask|compressed|codebook|lut|meta", re.I)


def understand(headers: Headers, facts: Facts) -> dict[str, Stored]:
    """Sort tensors by the name they would have unquantised; those nobody claims are plain, or have a `problem`."""
    candidates: list[tuple[str, Stored]] = []
    if any(header.dtype not in PLAIN for header in headers.values()):  # else nothing is packed
        for key in headers:
            packed = next((stored for find in FORMATS if (stored := find(key, headers, facts)) is not None), None)
            if packed is not None:
                candidates.append((key, packed))
    claimed = {key for _, stored in candidates for key in stored.keys}
    for key, header in headers.items():
        if key not in claimed and not NOT_WEIGHTS.search(key):
            candidates.append((key, _plain(key, header)))
    tensors: dict[str, Stored] = {}
    for key, stored in candidates:
        name = stored.name
        if name in tensors:
            stored = unreadable(name, key, headers[key], f"and not the only tensor that would be {name}")
        tensors[name] = stored
    return tensors


def _plain(key: str, header: Header) -> Stored:
    """Take a tensor as it is; one whose numbers mean something else is filed under the weight in whose place it stands."""
    experts = header.shape[0] if len(header.shape) == 3 else None
    if header.dtype in PLAIN and not key.endswith(".compressed"):
        return Stored(key, "plain", (key,), experts=experts)
    name = next((key.removesuffix(end) + name for end, name in NO_WEIGHT.items() if key.endswith(end)), key)
    unknown = f"{key} is {header}, and no tensor beside it says in a known way what its numbers mean"
    return Stored(name, "plain", (key,), experts=experts, problem=unknown)


def strays(tensors: dict[str, Stored]) -> dict[str, list[str]]:
    """List tensors nobody claimed that look like companions, by the path in front of their last name."""
    by_path: dict[str, list[str]] = defaultdict(list)
    for name, stored in tensors.items():
        if stored.format == "plain" and COMPANION.search(name.rpartition(".")[2]):
            by_path[name.rpartition(".")[0]].append(name)
    return by_path
