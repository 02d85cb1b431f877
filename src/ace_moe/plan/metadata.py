"""The JSON of a plan: any schema this release reads becomes the fields of a `Plan`, checked.

Whatever is wrong raises the error of its type (KeyError, TypeError, ValueError …); `Plan.load` puts the advice to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import PlanError
from .curves import check_listed
from .entries import Kinds, Threshold, expect, expect_each
from .fingerprint import Fingerprint
from .shapes import check_declared

SCHEMA, READS = 2, (1, 2)
MOST_BYTES = 4 << 20  # of metadata; the largest plans we know have under 1 MiB
EMPTY: dict[str, Any] = {"calibrations": {}, "shapes": {}, "guarded": {}, "curves": [], "made": []}  # where not written
KINDS: Kinds = {"undefined": dict, "other_weights": list, "thresholds": list, "model": str}


def text_of(header: Mapping[str, str] | None) -> str:
    """The `ace` part of a safetensors header."""
    found = (header or {}).get("ace")
    if found is None:
        raise PlanError(
            "this safetensors file is not a plan (no `ace` metadata). Make one with `ace tables MODEL -o FILE`."
        )
    return found


def fields_of(text: str) -> dict[str, Any]:
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
        "calibrations": ace["calibrations"],
        "shapes": {name: tuple(dims) for name, dims in check_declared(ace["shapes"]).items()},
        "guarded": {name: tuple(layers) for name, layers in ace["guarded"].items()},
        "recommendation": _recommendation(ace.get("recommendation")),
        "curves": check_listed(ace["curves"]),
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
