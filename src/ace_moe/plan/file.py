"""The plan as a file: safetensors whose header begins with the checksum of everything; written whole or not at all.

Read from the outside in, so that what is wrong costs no memory: header size → checksum → metadata → names and shapes of
tensors → their values. Files of schema 1 and 2 have no checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import BUILD, PlanError, brief
from ..schema import items, maybe, record, text, thing, values
from .entries import THRESHOLD, Threshold
from .fingerprint import Fingerprint
from .lookup import CURVE, Curve, workloads_of
from .shapes import (
    AGAIN,
    DECLARED,
    Shapes,
    Structure,
    Tables,
    check_declared,
    check_factor_names,
    check_layers,
    check_shape,
    check_values,
)

SCHEMA, READS = 3, (1, 2, 3)
METADATA = record(
    {
        "model": text,
        "fingerprint": thing,
        "undefined": values(text),
        "other_weights": items(text),
        "thresholds": items(THRESHOLD),
    },
    {
        "calibrations": thing,
        "shapes": DECLARED,
        "guarded": values(items(text)),
        "curves": items(CURVE),
        "recommendation": maybe(record({"settings": thing})),
        "default_workload": maybe(text),
        "made": items(thing),
    },
    closed=True,
)
OPENING = b'{"__metadata__":{"ace":"{\\"schema\\": 3, \\"checksum\\": \\"'  # of the header; the checksum follows
BLANK = "0" * 64
START = 8 + len(OPENING)
MOST_BYTES = 4 << 20  # of metadata; the largest plans we know have under 1 MiB
MOST_POINTS = 1 << 16  # of a curve
TENSOR = re.compile(r"layers\.(?P<key>.+)\.(?P<table>[a-z_][a-z0-9_]*)")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
NO_PLAN = f"It is truncated or not a plan; remove it and build it again with {BUILD}."


# ---- writing ------------------------------------------------------------------------------------------------------


def serialise(tables: Tables, points: Mapping[str, Tensor], ace: Mapping[str, Any]) -> bytes:
    """Build the file as bytes, with its checksum."""
    tensors = {f"layers.{key}.{name}": table for key, layer in tables.items() for name, table in layer.items()}
    blobs = {n: t.detach().float().cpu().contiguous() for n, t in sorted({**tensors, **points}.items())}
    header: dict[str, Any] = {"__metadata__": {"ace": json.dumps({"schema": SCHEMA, "checksum": BLANK, **ace})}}
    end = 0
    for name, blob in blobs.items():
        begin, end = end, end + blob.nbytes
        header[name] = {"dtype": "F32", "shape": list(blob.shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # as safetensors aligns what follows
    return seal(b"".join([len(head).to_bytes(8, "little"), head, *(blob.numpy().tobytes() for blob in blobs.values())]))


def seal(data: bytes) -> bytes:
    """Put the checksum of all other bytes into its place."""
    front, back = data[:START], data[START + len(BLANK) :]
    return front + hashlib.sha256(front + BLANK.encode() + back).hexdigest().encode() + back


# ---- reading ------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """Read and check all fields of a `Plan`; a file that is wrong in any way is refused with the reason."""
    if not os.path.isfile(path):
        raise PlanError(f"There is no plan at {path}. Make one with `ace plan MODEL -o {path.name}`.")
    try:
        sealed = _check_bytes(path)
        with _open(path) as handle:
            return _fields(handle, sealed)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except (SafetensorError, OSError) as error:
        raise PlanError(f"{path}: not a readable safetensors file ({brief(error)}). {NO_PLAN}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise PlanError(f"{path}: the plan's metadata is damaged ({brief(error)}). {AGAIN}") from error


def is_plan(path: Path) -> bool | None:
    """Tell by its header alone if a safetensors file is a plan; None if it is not a safetensors file."""
    try:
        _check_size(path)
        with _open(path) as handle:
            return "ace" in (handle.metadata() or {})
    except (PlanError, SafetensorError, OSError):
        return None


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except ValueError as error:
        raise SafetensorError(brief(error)) from error


def _check_size(path: Path) -> None:
    """Refuse a header too large to parse: the file begins with its length, and parsing takes a few times that."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MOST_BYTES:
        raise PlanError(
            f"{length / (1 << 20):,.0f} MiB of metadata, more than the {MOST_BYTES >> 20} MiB of a plan. {NO_PLAN}"
        )


def _check_bytes(path: Path) -> bool:
    """Check the checksum; False for a file that has none."""
    _check_size(path)
    with path.open("rb") as file:
        front, stored = file.read(START), file.read(len(BLANK))
        if front[8:] != OPENING:
            return False
        digest = hashlib.sha256(front + BLANK.encode())
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest().encode() != stored:
        raise PlanError(f"the file is damaged, truncated or edited: its checksum is of other contents. {AGAIN}")
    return True


def _fields(handle: safe_open, sealed: bool) -> dict[str, Any]:
    """Check the metadata against itself and against the tensors, from the outside in."""
    ace = _metadata(handle, sealed)
    METADATA(ace, "metadata")
    fingerprint = Fingerprint.from_json(ace["fingerprint"])
    listed, guarded, shapes = ace.get("curves", []), ace.get("guarded", {}), ace.get("shapes", {})
    points = {name for name in handle.keys() if re.fullmatch(r"curves\.\d+", name)}  # noqa: SIM118
    _check_curves(handle, points, [facts["tensor"] for facts in listed])
    tables = _tables(handle, set(handle.keys()) - points, fingerprint.structure, shapes)
    curves = tuple(Curve.from_json(facts, handle.get_tensor(facts["tensor"]).clone()) for facts in listed)
    thresholds = tuple(Threshold.from_json(entry) for entry in ace["thresholds"])
    factors = {t.factor: "a threshold" for t in thresholds} | {c.settings["factor"]: "a curve" for c in curves}
    for name, layers in guarded.items():
        if foreign := set(layers) - set(fingerprint.structure):
            raise ValueError(f"guarded: {name} names layer {min(foreign)!r:.40}, which the model does not have")
    check_factor_names({n: who for n, who in factors.items() if n} | dict.fromkeys(guarded, "`guarded`"), tables)
    default = ace.get("default_workload")
    if default is not None and default not in {w.sha256 for w in workloads_of(thresholds, curves)}:
        raise ValueError(f"default_workload {default!r:.40} is not the hash of one of the plan's texts")
    return {
        "tables": tables,
        "fingerprint": fingerprint,
        "model": ace["model"],
        "undefined": ace["undefined"],
        "thresholds": thresholds,
        "curves": curves,
        "default_workload": default,
        "other_weights": tuple(ace["other_weights"]),
        "calibrations": ace.get("calibrations", {}),
        "shapes": {name: tuple(dims) for name, dims in shapes.items()},
        "guarded": {name: tuple(layers) for name, layers in guarded.items()},
        "recommendation": ace.get("recommendation"),
        "made": tuple(ace.get("made", ())),
    }


def _tables(handle: safe_open, tensors: set[str], structure: Structure, declared: Shapes) -> Tables:
    """Read every table of every layer, once names and shapes are right."""
    names = _by_layer(tensors)
    check_declared(declared)
    check_layers({key: set(layer) for key, layer in names.items()}, structure)
    for key, layer in names.items():
        for name, tensor in layer.items():
            check_shape(structure, declared, key, name, *_dtype_and_shape(handle, tensor))
    # the file sorts layers as text: 10 before 2
    tables = {key: {n: handle.get_tensor(t).clone() for n, t in names.get(key, {}).items()} for key in structure}
    check_values(tables, declared)
    return tables


def _metadata(handle: safe_open, sealed: bool) -> dict[str, Any]:
    """Read the metadata in the form of the newest schema. Schema 1 knew the router rows as `content`, and no experts."""
    raw = (handle.metadata() or {}).get("ace")
    if raw is None:
        raise PlanError(f"this safetensors file is not a plan (no `ace` metadata). Make one with {BUILD}.")
    ace: dict[str, Any] = json.loads(raw)
    schema = ace.pop("schema", None)
    if schema not in READS:
        raise PlanError(
            f"the plan has schema {schema!r:.40}, this release reads {', '.join(map(str, READS))}. Remove the file and build it "
            f"again with {BUILD}, or use the release that wrote it."
        )
    if sealed != (schema == SCHEMA):
        raise PlanError(f"a plan of schema {SCHEMA} begins with its checksum, and no other does. {AGAIN}")
    if sealed:
        ace.pop("checksum")
    if schema == 1:
        old = ace["fingerprint"]
        routers = {"exact": old.pop("content"), "coarse": None}
        ace["fingerprint"] = {**old, "routers": routers, "experts": {}}
    return ace


# ---- tensors, from the header alone ---------------------------------------------------------------------------------------


def _check_curves(handle: safe_open, tensors: set[str], listed: list[str]) -> None:
    """Refuse curves whose points are missing, listed twice, not listed or of another shape."""
    if sorted(tensors) != sorted(listed):
        odd = min(tensors ^ set(listed) or listed)
        raise PlanError(f"tensor {odd} and the list of curves disagree. The file was edited or cut. {AGAIN}")
    for tensor in tensors:
        dtype, shape = _dtype_and_shape(handle, tensor)
        if dtype != "float32" or len(shape) != 2 or shape[0] != 2 or not 2 <= shape[1] <= MOST_POINTS:
            raise PlanError(f"{tensor} is {dtype} {list(shape)}, not float32 [2, points]. {AGAIN}")


def _by_layer(tensors: set[str]) -> dict[str, dict[str, str]]:
    """Sort names of tensors: layer → table → name."""
    names: dict[str, dict[str, str]] = {}
    for tensor in sorted(tensors):
        match = TENSOR.fullmatch(tensor)
        if not match:
            raise PlanError(
                f"tensor {tensor!r} is not `layers.<n>.<table>`; the file is not a plan. Make one with {BUILD}."
            )
        key, table = match["key"], match["table"]
        key = str(int(key)) if key.isdigit() else key
        if table in names.setdefault(key, {}):
            raise PlanError(f"layer {key} has two tables {table}; the file was edited. {AGAIN}")
        names[key][table] = tensor
    return names


def _dtype_and_shape(handle: safe_open, tensor: str) -> tuple[str, tuple[int, ...]]:
    """Look dtype and shape up in the header."""
    part = handle.get_slice(tensor)
    return DTYPES.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape())
