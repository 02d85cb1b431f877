"""Schemas of the results files that the page shows. Files are edited, cut and mixed up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ...errors import ResultError, brief
from ...files import expand
from ...schema import Schema, items, maybe, number, record, text, values
from ..store import BENCH, COMPARE, EVAL, SIMULATE, THRESHOLDS, Results, read_results

SHARE, ANY, COUNT = number(0, 1), number(), number(1, whole=True)
BOUNDS = items(maybe(ANY), 2, 2)
CHANGE = record({"value": ANY, "low": maybe(ANY), "high": maybe(ANY)}, {"p": ANY})
VERSIONS: dict[str, Schema] = {"ace_moe": text, "torch": text, "transformers": text}
FACTS: dict[str, Schema] = {"model": record({"name": text}), "environment": record(VERSIONS), "command": text}
MADE = record({}, {**dict.fromkeys(("command", "version", "commit", "device", "date"), text), "inputs": values(text)})
RUNS: dict[str, Schema] = {"runs": items(MADE), "provenance": MADE}
MEASURED: dict[str, Schema] = {"perplexity": number(0), "interval": BOUNDS, "nll": items(ANY, 1), "targets": COUNT}
CELL = record(
    {
        **MEASURED,
        "method": text,
        "gain": text,
        "budget": SHARE,
        "change": CHANGE,
        "realised": SHARE,
        "layers": values(maybe(ANY)),
    },
    {
        **dict.fromkeys(("kl", "agreement", "acceptance"), CHANGE),
        **{"kl_by_window": items(ANY, 1), "experts": values(items(maybe(ANY))), "threshold": ANY},
    },
)
COMPARED = record(
    {
        **FACTS,
        "model": record({"name": text, "architecture": text}),
        "environment": record({**VERSIONS, "device": text}),
        "workload": record({"name": text, "windows": COUNT, "window": COUNT}),
        "grid": record({"methods": items(text), "budgets": items(SHARE), "gains": items(text)}),
        "references": items(text),
        "dense": record(MEASURED),
        "cells": items(CELL),
        "tables": values(values(items(ANY))),
    },
    {
        "servable": values(text),
        "refused": values(record({"budgets": items(SHARE), "reason": text})),
        "oracle": values(values(values(ANY))),
        "identity": record({}, {"safeguards": record({}, {"min_active": COUNT, "min_mass": SHARE})}),
        **RUNS,
    },
)
STUDIED = record(
    {
        **FACTS,
        "budgets": items(SHARE),
        "workloads": items(record({"workload": text, "budget": SHARE, "threshold": ANY, "realised": SHARE})),
        "transfers": items(record({"from": text, "to": text, "budget": SHARE, "realised": SHARE})),
        "cost": items(record({"way": text, "passes": number(0, whole=True), "seconds": number(0), "worst": ANY})),
    },
    RUNS,
)
ANSWERED = record(
    {
        **FACTS,
        "cells": items(
            record(
                {"task": text, "metric": text, "skip": SHARE, "value": ANY, "realised": SHARE, "interval": BOUNDS}
                | {"questions": items(ANY), "change": maybe(CHANGE)}
            )
        ),
    },
    RUNS,
)
TIME = number(1e-9)
TIMED = record(
    {"command": text, "rows": items(record({"what": text, "path": text, "tokens": COUNT, "batch": COUNT}
        | {"requested": SHARE, "realised": SHARE, "wall_ms": TIME}), 1)}, {"device": text, **RUNS}
)  # fmt: skip
STEPS = record({"batch": COUNT, "skip": SHARE, "slots": SHARE, "restored": SHARE, "reads": number(0), "asked": TIME})
SIMULATED = record({"command": text, "model": text, "trace": text, "rows": items(STEPS, 1)}, RUNS)
KINDS: dict[str, Schema] = {
    **{COMPARE: COMPARED, THRESHOLDS: STUDIED, EVAL: ANSWERED},
    **{SIMULATE: SIMULATED, BENCH: TIMED},
}


def read(path: Path) -> tuple[str, Results]:
    """Read (kind, results) of a file that one of our commands wrote, and check all of it."""
    try:
        content = json.loads(expand(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    kind = content.get("kind") if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ResultError(
            f"{path} is not a results file. Give files of `ace compare`, `ace study thresholds`, `ace eval`, `ace simulate` "
            "or `ace bench`."
        )
    results = read_results(path, kind)
    try:
        KINDS[kind](results, "the file")
        _check_numbers(results)
    except (ValueError, RecursionError) as error:
        raise ResultError(
            f"{path} was changed since `ace {kind}` wrote it: {brief(error)}. Run the command again, into a new file."
        ) from error
    return kind, results


def _check_numbers(value: Any) -> None:
    """Refuse NaN: JSON has none, though Python reads and writes it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a number")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_numbers(item)
