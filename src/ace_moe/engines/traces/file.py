"""The trace as a safetensors file: each layer's bytes sorted by place and deflated, under 2.2 bytes a slot.

Tensors `layers.<n>` (uint8: steps between a token's ascending ids, then gates in bfloat16) and `tokens` (requests, phases,
budgets); JSON metadata under the key `trace`. Byte planes of one kind stand together, which is what deflate needs.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...errors import TraceError, brief
from ...files import expand, write_whole
from ...plan import Fingerprint
from .record import Slots, Trace

KEY, SCHEMA = "trace", 1
MOST_METADATA, MOST_SLOTS = 64 << 20, 1 << 33
AGAIN = "It was cut or is no trace; make one with `ace trace` or `ace serve --trace`."


def save_trace(trace: Trace, path: str | Path) -> Path:
    """Whole or not at all, for its owner's eyes alone: routing can betray text."""
    tensors = {f"layers.{key}": _packed(*_planes(slots)) for key, slots in trace.layers.items()}
    tensors["tokens"] = _packed(trace.requests.int(), trace.phases, trace.budgets)
    facts = {
        "schema": SCHEMA,
        "model": trace.model,
        "fingerprint": None if trace.fingerprint is None else trace.fingerprint.to_json(),
        "skips": [dict(skip) if isinstance(skip, Mapping) else skip for skip in trace.skips],
        "tokens": len(trace),
        "slots": {key: slots.ids.shape[-1] for key, slots in trace.layers.items()},
    }
    return write_whole(path, save(tensors, metadata={KEY: json.dumps(facts)}), "The trace", private=True)


def _planes(slots: Slots) -> tuple[Tensor, Tensor]:
    """Steps between ascending ids and the gates' bits, [T, k] int16 each, slot by slot."""
    first = slots.ids.new_zeros(len(slots.ids), 1)
    return slots.ids.diff(dim=-1, prepend=first).T, slots.gates.view(torch.int16).T


def _packed(*values: Tensor) -> Tensor:
    """Every value's first bytes, then its second ones …, deflated."""
    planes = [v.contiguous().flatten().view(torch.uint8).view(v.numel(), -1).T.contiguous() for v in values]
    packed = zlib.compress(b"".join(p.numpy().tobytes() for p in planes), 9)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


# ---- reading --------------------------------------------------------------------------------------------------------


def load_trace(path: str | Path) -> Trace:
    """Read and check everything; a file that is wrong in any way is refused with the reason."""
    path = expand(path)
    if not os.path.isfile(path):
        raise TraceError(f"There is no trace at {path}. Make one with `ace trace MODEL --text FILE -o {path.name}`.")
    try:
        with path.open("rb") as file:
            if int.from_bytes(file.read(8), "little") > MOST_METADATA:
                raise ValueError("its header is too long")
        with safe_open(path, "pt") as handle:
            return _read(handle).check()
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(f"{path} is not a readable trace ({brief(error)}). {AGAIN}") from error
    except (RuntimeError, OverflowError, zlib.error) as error:
        raise TraceError(f"{path} is damaged ({brief(error)}). {AGAIN}") from error


def is_trace(path: Path) -> bool:
    """By its header alone."""
    try:
        with safe_open(path, "pt") as handle:
            return KEY in (handle.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return False


def _read(handle: safe_open) -> Trace:
    facts: dict[str, Any] = json.loads((handle.metadata() or {})[KEY])
    if facts["schema"] != SCHEMA:
        raise TraceError(f"it has schema {facts['schema']!r:.20}, this release reads {SCHEMA}. Trace again.")
    tokens, widths = int(facts["tokens"]), {key: int(k) for key, k in facts["slots"].items()}
    if not widths or tokens < 1 or min(widths.values()) < 1 or tokens * sum(widths.values()) > MOST_SLOTS:
        raise ValueError(f"{tokens} tokens with {sum(widths.values())} slots")
    fingerprint = None if facts["fingerprint"] is None else Fingerprint.from_json(facts["fingerprint"])
    if fingerprint is not None and {k: v["top_k"] for k, v in fingerprint.structure.items()} != widths:
        raise ValueError("its layers are not those of its model")
    layers = {key: _slots(handle.get_tensor(f"layers.{key}"), tokens, k) for key, k in widths.items()}
    requests, phases, budgets = _unpacked(handle.get_tensor("tokens"), tokens, (torch.int32, torch.uint8, torch.uint8))
    return Trace(layers, requests, phases, budgets, tuple(facts["skips"]), fingerprint, str(facts["model"]))


def _slots(packed: Tensor, tokens: int, k: int) -> Slots:
    steps, bits = _unpacked(packed, tokens * k, (torch.int16, torch.int16))
    ids = steps.view(k, tokens).T.cumsum(-1, dtype=torch.int16)
    return Slots(ids.contiguous(), bits.view(k, tokens).T.contiguous().view(torch.bfloat16))


def _unpacked(packed: Tensor, count: int, kinds: tuple[torch.dtype, ...]) -> list[Tensor]:
    """`count` values of each kind. No more is inflated than that takes, whatever the file holds."""
    sizes = [count * kind.itemsize for kind in kinds]
    inflate = zlib.decompressobj()
    found = inflate.decompress(packed.numpy().tobytes(), sum(sizes) + 1)
    if len(found) != sum(sizes) or not inflate.eof:
        raise ValueError(f"{len(found)} bytes where {sum(sizes)} should be")
    parts = torch.frombuffer(bytearray(found), dtype=torch.uint8).split(sizes)
    return [part.view(kind.itemsize, count).T.flatten().view(kind) for part, kind in zip(parts, kinds, strict=True)]
