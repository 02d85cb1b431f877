"""The plan as a file: written whole or not at all, and refused with the reason if it is wrong in any way."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import OutputError, PlanError, brief
from ..files import expand, replace_whole
from .entries import expect

SCHEMA = 1
TENSOR = re.compile(r"layers\.(?P<key>.+)\.(?P<table>[a-z_]+)")
CORE = {"gsp", "rcr"}  # tables every plan has, unless it says why not
Tables = dict[str, dict[str, Tensor]]


def write(path: str | Path, tables: Tables, metadata: Mapping[str, Any]) -> Path:
    """Write the whole file beside the target, flush it, then move it over the target."""
    path = expand(path)
    tensors = {
        f"layers.{key}.{name}": values.detach().float().cpu().contiguous()
        for key, layer in tables.items()
        for name, values in layer.items()
    }
    data = save(tensors, metadata={"ace": json.dumps({"schema": SCHEMA, **metadata})})
    try:
        replace_whole(path, data)
    except OSError as error:
        raise OutputError(
            f"The plan could not be written to {path} ({error.strerror or brief(error)}). Nothing was changed there; "
            "choose another place, or free space and run again."
        ) from error
    return path


# ---- reading ------------------------------------------------------------------------------------------------------


def open_file(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not os.path.isfile(path):
        raise PlanError(f"There is no plan at {path}. Make one with `ace tables MODEL -o {path.name}`.")
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise PlanError(
            f"{path} is not a readable safetensors file ({brief(error)}). It is truncated or no plan; build it again with "
            "`ace tables`."
        ) from error


def parse(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], Tables]:
    """The checked metadata and the tables by layer; whatever else is wrong raises the error of its type."""
    if "ace" not in metadata:
        raise PlanError(
            "this safetensors file is not a plan (no `ace` metadata). Make one with `ace tables MODEL -o FILE`."
        )
    ace = json.loads(metadata["ace"])
    if ace.get("schema") != SCHEMA:
        raise PlanError(
            f"the plan has schema {ace.get('schema')!r}, this release reads {SCHEMA}. Build it again with `ace tables`, "
            "or use the release that wrote it."
        )
    structure = _checked(ace)
    tables = _tables(tensors)
    _check_tables(tables, structure, ace["undefined"])
    return ace, {key: tables.get(key, {}) for key in structure}  # the file sorts layers as text: 10 before 2


def _checked(ace: Mapping[str, Any]) -> dict[str, Any]:
    """The layers of the fingerprint, after the types of everything that is read later without a check."""
    structure, content = ace["fingerprint"]["structure"], ace["fingerprint"]["content"]
    if not structure:
        raise ValueError("no layers")
    for key, layer in structure.items():
        expect(layer["experts"], int, f"experts of layer {key}")
        expect(layer["top_k"], int, f"top_k of layer {key}")
        if not 1 <= layer["top_k"] <= layer["experts"]:
            raise ValueError(f"layer {key} has {layer['top_k']} slots for {layer['experts']} experts")
    for name, value in (("model", ace["model"]), ("content", content), *ace["undefined"].items()):
        expect(value, str, name)
    expect(ace["other_weights"], list, "other_weights")
    expect(ace.get("calibrations", {}), dict, "calibrations")
    return structure


def _tables(tensors: Mapping[str, Tensor]) -> Tables:
    tables: Tables = {}
    for name, values in tensors.items():
        match = TENSOR.fullmatch(name)
        if not match:
            raise PlanError(
                f"tensor {name!r} is not `layers.<n>.<table>`; the file is no plan of ours. Make one with `ace tables`."
            )
        key = match["key"]
        canonical = str(int(key)) if key.isdigit() else key
        if match["table"] in tables.setdefault(canonical, {}):
            raise PlanError(
                f"layer {canonical} has two tables {match['table']}; the file was edited. Build it again with `ace tables`."
            )
        tables[canonical][match["table"]] = values
    return tables


def _check_tables(tables: Tables, structure: Mapping[str, Any], undefined: Mapping[str, str]) -> None:
    wanted = (CORE | {name for layer in tables.values() for name in layer}) - set(undefined)
    missing = [key for key in structure if not wanted <= set(tables.get(key, ()))]
    foreign = [key for key in tables if key not in structure]
    if missing or foreign:
        raise PlanError(
            f"tables and layer list disagree (missing: {', '.join(missing[:5]) or 'none'}; foreign: "
            f"{', '.join(foreign[:5]) or 'none'}). The file was edited or cut; build it again with `ace tables`."
        )
    levels = 1 + sum(layer["top_k"] - 1 for layer in structure.values())
    for key, layer in tables.items():
        for name, values in layer.items():
            _check_values(f"layers.{key}.{name}", values, structure[key], None if name in CORE else levels)


def _check_values(name: str, values: Tensor, layer: Mapping[str, Any], levels: int | None) -> None:
    """Tables beside the core's may have one value, one per expert, pair, slot, or level of a budget shared by layers."""
    experts = layer["experts"]
    fits = values.shape == (experts,) if levels is None else set(values.shape) <= {experts, layer["top_k"], levels}
    if values.dtype != torch.float32 or not fits:
        raise PlanError(
            f"{name} is {str(values.dtype).removeprefix('torch.')} {list(values.shape)}, not float32 [{experts}]. Build it "
            "again with `ace tables`."
        )
    if not values.isfinite().all() or (values < 0).any():
        raise PlanError(f"{name} has NaN, infinite or negative values. Build it again with `ace tables`.")
