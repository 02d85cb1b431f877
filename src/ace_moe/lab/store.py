"""Results files: JSON that is always whole, is continued by a later run, and loses nothing when several commands write it."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ResultError, brief
from ..files import clear_unfinished, expand, locked, replace_here, unwritable
from ..provenance import UNKNOWN, Record, differing

SCHEMA = 1
COMPARE, THRESHOLDS, TABLES, PERPLEXITY = "compare", "study thresholds", "study tables", "perplexity"
EVAL, SIMULATE, BENCH = "eval", "simulate", "bench"
Results = dict[str, Any]


def read_results(path: str | Path, kind: str) -> Results:
    """Read a file that must hold results of this kind."""
    path = expand(path)
    if not path.is_file():
        raise ResultError(f"There are no results at {path}. Make them with `ace {kind}`.")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ResultError(
            f"{path} is not a readable JSON file ({brief(error)}). Give a file that `ace {kind}` wrote."
        ) from error
    if not isinstance(results, dict) or results.get("kind") != kind:
        raise ResultError(f"{path} holds no results of `ace {kind}`. Give a file that this command wrote.")
    if results.get("schema") != SCHEMA:
        raise ResultError(
            f"{path} has schema {results.get('schema')!r}, this release reads {SCHEMA}. Run `ace {kind}` again into a new "
            "file."
        )
    return results


@dataclass(frozen=True)
class ResultsFile:
    """The results file of one measurement: a file that holds another one is refused, here and at every write."""

    path: Path
    kind: str
    identity: Mapping[str, Any]  # what must be the same for a file to be continued

    def read(self) -> Results:
        """Read what earlier runs left, or begin new results if there is no file."""
        if not expand(self.path).exists():
            return {"schema": SCHEMA, "kind": self.kind, "identity": dict(self.identity)}
        results = read_results(self.path, self.kind)
        for name, value in self.identity.items():
            there = results.get("identity", {}).get(name, None if value is None else UNKNOWN)
            if there != value:
                raise ResultError(
                    f"{self.path} holds another measurement: {name} is {there!r:.60} there and {value!r:.60} now. Choose "
                    "another file with --out, or delete this one."
                )
        return results

    @contextmanager
    def changed(self) -> Iterator[Results]:
        """Yield what the file holds now, locked, and write it whole at the end; an error inside leaves the file as it was."""
        real = Path(os.path.realpath(expand(self.path)))
        try:
            with locked(real.parent) as alone:
                results = self.read()
                yield results
                data = json.dumps(results, separators=(",", ":"), allow_nan=False).encode()
                if alone:
                    clear_unfinished(real)
                replace_here(real, data)
        except OSError as error:
            raise unwritable(expand(self.path), error, "The results") from error


def put(rows: list[Results], row: Results, key: Sequence[str], newer: bool = False) -> None:
    """Add a row unless one has the same key; `newer`: then it takes that one's place, as a time that is measured again."""
    same = [n for n, other in enumerate(rows) if all(other[name] == row[name] for name in key)]
    if not same:
        rows.append(row)
    elif newer:
        rows[same[0]] = row


def begin_run(results: Results, facts: Results) -> int:
    """Put what a run knows of itself into the file and return the run's number, which its cells carry.

    `facts` are the command, the `provenance`, and what describes model and text. Other versions than the last run's are
    worth a warning.
    """
    record: Record = facts.get("provenance", {})
    runs = results.setdefault("runs", [])
    if runs and (versions := differing(runs[-1], record)):
        warnings.warn(f"this file is continued under other versions: {versions}", stacklevel=2)
    if not runs or {**runs[-1], "date": None} != {**record, "date": None}:
        runs.append(record)
    commands = results["command"].split(" && ") if "command" in results else []
    commands += [facts["command"]] if facts.get("command") and facts["command"] not in commands else []
    results |= {name: value for name, value in facts.items() if name != "provenance"}
    results["command"] = " && ".join(commands)
    return len(runs) - 1
