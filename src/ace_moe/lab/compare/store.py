"""Results on disk: one JSON file that is always whole, and that a later run continues if it measures the same thing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ResultError, brief
from ...files import expand, write_whole
from ...provenance import UNKNOWN, Record, differing

SCHEMA = 1


def write_json(path: str | Path, value: Mapping[str, Any]) -> None:
    """The file whole, or what was there before."""
    write_whole(path, json.dumps(value, separators=(",", ":"), allow_nan=False).encode(), "The results")


def read_json(path: str | Path, kind: str) -> dict[str, Any]:
    """The results in a file, if they are of this kind."""
    path = expand(path)
    if not path.is_file():
        raise ResultError(f"There are no results at {path}. Make them with `ace {kind}`.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ResultError(
            f"{path} is not a readable JSON file ({brief(error)}). Give a file that `ace {kind}` wrote."
        ) from error
    if not isinstance(value, dict) or value.get("kind") != kind:
        raise ResultError(f"{path} holds no results of `ace {kind}`. Give a file that this command wrote.")
    if value.get("schema") != SCHEMA:
        raise ResultError(
            f"{path} has schema {value.get('schema')!r}, this release reads {SCHEMA}. Run `ace {kind}` again into a new file."
        )
    return value


def open_results(path: str | Path, kind: str, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier run left at `path`, to be continued; new results if there is no file."""
    if not expand(path).exists():
        return {"schema": SCHEMA, "kind": kind, "identity": dict(identity)}
    found = read_json(path, kind)
    for name, value in identity.items():
        had = found.get("identity", {}).get(name, None if value is None else UNKNOWN)
        if had != value:
            raise ResultError(
                f"{path} holds another measurement: {name} is {had!r:.60} there and {value!r:.60} now. Choose another file "
                "with --out, or delete this one."
            )
    return found


def begin_run(results: dict[str, Any], record: Record) -> int:
    """The number of this run in the file, which its cells carry. Other versions than before are worth a notice, no more."""
    runs = results.setdefault("runs", [])
    for earlier in runs[-1:]:
        if differs := differing(earlier, record):
            warnings.warn(f"this file is continued under other versions: {differs}", stacklevel=2)
    if not any({**earlier, "date": None} == {**record, "date": None} for earlier in runs[-1:]):
        runs.append(record)
    return len(runs) - 1
