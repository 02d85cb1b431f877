"""The plan as a file: written whole or not at all; read from the outside in, so that what is wrong costs no memory.

Header size → metadata → names and shapes of tensors → their values.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import PlanError, brief
from . import curves
from .entries import Kinds, Threshold, expect, expect_each
from .fingerprint import Fingerprint
from .shapes import Expected, Tables, check_declared, check_factor_names, check_layers, check_values

SCHEMA, READS = 2, (1, 2)
MOST_BYTES = 4 << 20  # of metadata; the largest plans we know have under 1 MiB
EMPTY: dict[str, Any] = {"calibrations": {}, "shapes": {}, "guarded": {}, "curves": [], "made": []}  # where not written
KINDS: Kinds = {"undefined": dict, "other_weights": list, "thresholds": list, "model": str}
TENSOR = re.compile(r"layers\.(?P<key>.+)\.(?P<table>[a-z_][a-z0-9_]*)")
CURVE = re.compile(r"curves\.\d+")
MOST_POINTS = 1 << 16  # of a curve
NO_PLAN = "It is truncated or no plan; build it again with `ace tables`."
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
Names = dict[str, dict[str, str]]  # layer → table → name of its tensor


def serialised(tables: Tables, lines: Mapping[str, Tensor], ace: Mapping[str, Any]) -> bytes:
    """The file, before it is written."""
    tensors = {
        f"layers.{key}.{name}": _own(values.float()) for key, layer in tables.items() for name, values in layer.items()
    }
    kept = {name: _own(points) for name, points in lines.items()}
    return save({**tensors, **kept}, metadata={"ace": json.dumps({"schema": SCHEMA, **ace})})


def _own(values: Tensor) -> Tensor:
    """A copy: layers may share one tensor, which safetensors refuses."""
    return values.detach().cpu().clone(memory_format=torch.contiguous_format)


# ---- reading ------------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: Path) -> Iterator[safe_open]:
    """The file with its header read and nothing else."""
    if not os.path.isfile(path):
        raise PlanError(f"There is no plan at {path}. Make one with `ace tables MODEL -o {path.name}`.")
    try:
        _check_header(path)
        with _open(path) as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except ValueError as error:  # apart from ours, which come from inside the file
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> PlanError:
    return PlanError(f"{path} is not a readable safetensors file ({brief(error)}). {NO_PLAN}")


def is_plan(path: Path) -> bool | None:
    """Whether a safetensors file is a plan, by its header alone; None if it is no safetensors file."""
    try:
        _check_header(path)
        with _open(path) as handle:
            return "ace" in (handle.metadata() or {})
    except (PlanError, SafetensorError, OSError):
        return None


def _check_header(path: Path) -> None:
    """A safetensors file begins with the length of its header, metadata included; parsing one takes a few times that."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MOST_BYTES:
        raise PlanError(
            f"{path} has {length / (1 << 20):,.0f} MiB of metadata, more than the {MOST_BYTES >> 20} MiB of a plan. "
            f"{NO_PLAN}"
        )


def read(handle: safe_open) -> dict[str, Any]:
    """All fields of a `Plan`, checked; whatever is wrong raises the error of its type."""
    fields = _fields(_text(handle.metadata()))
    structure, shapes = fields["fingerprint"].structure, fields["shapes"]
    lines = {name for name in handle.keys() if CURVE.fullmatch(name)}  # noqa: SIM118
    names = _by_layer(set(handle.keys()) - lines)
    _check_curves(handle, lines, fields["curves"])
    check_layers({key: set(layer) for key, layer in names.items()}, structure, fields["undefined"])
    _check_shapes(handle, names, Expected(structure, shapes))
    # the file sorts layers as text: 10 before 2
    tables = {key: {n: handle.get_tensor(t).clone() for n, t in names.get(key, {}).items()} for key in structure}
    check_values(tables, shapes)
    known = tuple(curves.from_json(found, handle.get_tensor(found["tensor"]).clone()) for found in fields["curves"])
    named = {curve.settings["factor"]: "a curve" for curve in known}
    named |= {t.factor: "a threshold" for t in fields["thresholds"]}
    named.pop(None, None)
    check_factor_names(named | dict.fromkeys(fields["guarded"], "`guarded`"), tables)
    return {**fields, "tables": tables, "curves": known}


# ---- metadata: any schema this release reads becomes the fields of a `Plan`; `Plan.load` puts the advice to what is wrong ---


def _text(header: Mapping[str, str] | None) -> str:
    """The `ace` part of a safetensors header."""
    found = (header or {}).get("ace")
    if found is None:
        raise PlanError(
            "this safetensors file is not a plan (no `ace` metadata). Make one with `ace tables MODEL -o FILE`."
        )
    return found


def _fields(text: str) -> dict[str, Any]:
    """Fields of a `Plan` but its tensors; curves as they are listed."""
    ace = EMPTY | _current(json.loads(text))
    fingerprint = Fingerprint.from_json(ace["fingerprint"])
    _check_kinds(ace)
    _check_guarded(ace["guarded"], fingerprint.structure)
    known = {
        "fingerprint": fingerprint,
        "model": ace["model"],
        "undefined": ace["undefined"],
        "thresholds": tuple(Threshold.from_json(t) for t in ace["thresholds"]),
        "other_weights": tuple(ace["other_weights"]),
        "calibrations": dict(ace["calibrations"]),
        "shapes": {name: tuple(dims) for name, dims in check_declared(ace["shapes"]).items()},
        "guarded": {name: tuple(layers) for name, layers in ace["guarded"].items()},
        "recommendation": _recommendation(ace.get("recommendation")),
        "curves": curves.check_listed(ace["curves"]),
        "default_workload": _default(ace),
        "made": tuple(ace["made"]),
    }
    return {**known, "unread": {name: value for name, value in ace.items() if name not in (*known, "schema")}}


def _current(ace: dict[str, Any]) -> dict[str, Any]:
    """The metadata in the form of the newest schema. Schema 1 knew the router rows as `content`, and no experts."""
    if ace.get("schema") not in READS:
        raise PlanError(
            f"the plan has schema {ace.get('schema')!r:.40}, this release reads {' and '.join(map(str, READS))}. Build it "
            "again with `ace tables`, or use the release that wrote it."
        )
    if ace["schema"] == SCHEMA:
        return ace
    found = ace["fingerprint"]
    routers = {"exact": found["content"], "coarse": None}
    return {**ace, "fingerprint": {"structure": found["structure"], "routers": routers, "experts": {}}}


def _check_kinds(ace: Mapping[str, Any]) -> None:
    """The types of everything that is read later without a check."""
    expect_each(ace, KINDS | {name: type(empty) for name, empty in EMPTY.items()})
    for name, value in (*ace["undefined"].items(), *(("other_weights", value) for value in ace["other_weights"])):
        expect(value, str, name)
    for record in ace["made"]:
        expect(record, dict, "made")


def _check_guarded(guarded: Mapping[str, Any], structure: Mapping[str, Any]) -> None:
    for name, layers in guarded.items():
        expect(layers, list, f"guarded: {name}")
        for key in layers:
            expect(key, str, f"guarded: {name}")
            if key not in structure:
                raise ValueError(f"guarded: {name} names layer {key!r:.40}, which the model does not have")


def _default(ace: Mapping[str, Any]) -> str | None:
    found = ace.get("default_workload")
    texts = {entry["workload"]["sha256"] for entry in (*ace["thresholds"], *ace["curves"])}
    if found is not None and found not in texts:
        raise ValueError(f"default_workload {found!r:.40} is none of the plan's texts")
    return found


def _recommendation(found: Any) -> dict[str, Any] | None:
    """Free but for its settings, which are what a user is told to take."""
    if found is not None:
        expect(found, dict, "recommendation")
        expect(found.get("settings"), dict, "recommendation: settings")
    return found


# ---- tensors, from the header alone ---------------------------------------------------------------------------------------


def _check_curves(handle: safe_open, tensors: set[str], listed: list[dict[str, Any]]) -> None:
    """From the header alone: what is listed is there, and nothing else."""
    if tensors != {found["tensor"] for found in listed}:
        odd = sorted(tensors ^ {found["tensor"] for found in listed})[0]
        raise PlanError(
            f"tensor {odd} and the list of curves disagree. The file was edited or cut; build it again with `ace tables`."
        )
    for tensor in tensors:
        dtype, shape = _said(handle, tensor)
        if dtype != "float32" or len(shape) != 2 or shape[0] != 2 or not 2 <= shape[1] <= MOST_POINTS:
            raise PlanError(f"{tensor} is {dtype} {list(shape)}, not float32 [2, points]. Map again with `ace budget`.")


def _by_layer(tensors: Iterable[str]) -> Names:
    names: Names = {}
    for tensor in sorted(tensors):
        match = TENSOR.fullmatch(tensor)
        if not match:
            raise PlanError(
                f"tensor {tensor!r} is not `layers.<n>.<table>`; the file is no plan of ours. Make one with `ace tables`."
            )
        key, table = match["key"], match["table"]
        key = str(int(key)) if key.isdigit() else key
        if table in names.setdefault(key, {}):
            raise PlanError(
                f"layer {key} has two tables {table}; the file was edited. Build it again with `ace tables`."
            )
        names[key][table] = tensor
    return names


def _check_shapes(handle: safe_open, names: Names, expected: Expected) -> None:
    """From the header alone."""
    for key, layer in names.items():
        for name, tensor in layer.items():
            expected.check(key, name, *_said(handle, tensor))


def _said(handle: safe_open, tensor: str) -> tuple[str, tuple[int, ...]]:
    """dtype and shape of a tensor that is not read."""
    found = handle.get_slice(tensor)
    return DTYPES.get(found.get_dtype(), found.get_dtype()), tuple(found.get_shape())
