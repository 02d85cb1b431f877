"""Inputs made from kept ones: bytes flipped, cut, doubled, and JSON changed where a parser still gets through to it."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

NUMBERS = (0, 1, -1, 2, 8, 255, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan"), 1e-320)
WORDS = (
    "",
    "a",
    "0",
    "F32",
    "I64",
    "BF16",
    "F8_E4M3",
    "layers.0.gsp",
    "../x",
    "/etc/passwd",
    "\x00",
    "\u202e",
    "both",
    "nan",
    "[" * 50,
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The input after one to four changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice((_bytes, _cut, _double, _json, _json, _json))(data, rng)
    return data


def _bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] = rng.choice((0, 0xFF, 0x22, 0x7B, 0x5B, rng.randrange(256)))
    return bytes(changed)


def _cut(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] if rng.random() < 0.5 else data[:start] + data[start + rng.randrange(64) :]


def _double(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    part = data[start : start + rng.randrange(64)]
    return data[:start] + part * rng.choice((2, 3, 50)) + data[start:]


def _json(data: bytes, rng: random.Random) -> bytes:
    """Into JSON, or into the header of a safetensors file and the plan's metadata in it; else bytes."""
    try:
        if data[:1] in (b"{", b"["):
            return json.dumps(_edited(json.loads(data), rng)).encode()
        size = struct.unpack("<Q", data[:8])[0]
        head = json.loads(data[8 : 8 + size])
        ace = head.get("__metadata__", {}).get("ace")
        if ace is not None and rng.random() < 0.7:
            head["__metadata__"]["ace"] = json.dumps(_edited(json.loads(ace), rng))
        else:
            head = _edited(head, rng)
        text = json.dumps(head).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]
    except (ValueError, struct.error, AttributeError, TypeError, RecursionError):
        return _bytes(data, rng)


def _edited(value: Any, rng: random.Random) -> Any:
    """One value somewhere replaced, removed, or put in under another name."""
    node = value
    while isinstance(node, (dict, list)) and node:
        step = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        child = node[step]
        if isinstance(child, (dict, list)) and child and rng.random() < 0.75:
            node = child
            continue
        kind = rng.random()
        if kind < 0.15:
            del node[step]
        elif kind < 0.3 and isinstance(node, dict):
            node[rng.choice(WORDS)] = child
        else:
            node[step] = _anything(rng)
        return value
    return value or _anything(rng)


def _anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(WORDS)
    if kind == 4:
        return rng.choice((None, True, False))
    made = [_anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return made if kind == 5 else {rng.choice(WORDS): item for item in made}
