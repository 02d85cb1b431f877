"""One self-contained page from results: everything it needs is in the file, so it opens from disk without a network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...errors import ResultError
from ...files import hashes, write_whole
from ...provenance import Record, provenance
from ...provenance import read as known
from ..compare.advice import advise
from ..compare.compare import against
from .results import BENCH, COMPARE, EVAL, KINDS, SIMULATE, THRESHOLDS, Results, read

SCRIPTS = ("base.js", "save.js", "compare.js", "maps.js", "studies.js", "steps.js", "main.js")
NOTES = (
    "Intervals are 95 % bootstrap intervals over windows or questions, widened for few of them; differences are paired. The "
    "realised ratio is counted while the model runs, not assumed.",
)
MARK = '<script type="application/json" id="data">'  # what every page of ours has


def write_page(paths: Sequence[Path], output: Path, rival: str | None = None, title: str | None = None) -> None:
    """The page for these results files, of any mix of commands."""
    found: dict[str, list[Results]] = {kind: [] for kind in KINDS}
    for path in paths:
        kind, results = read(path)
        found[kind].append(results)
    record = provenance(inputs=hashes(paths))
    write_whole(output, page(found, rival, title, record).encode(), "The page")


def is_page(path: Path) -> bool:
    """Whether a file is a page that was made here."""
    return MARK.encode() in path.read_bytes()


def page(
    found: Mapping[str, Sequence[Results]],
    rival: str | None = None,
    title: str | None = None,
    record: Record | None = None,
) -> str:
    """The page for results by kind."""
    every = [r for kind in KINDS for r in found.get(kind, ())]
    compare = found.get(COMPARE, ())
    title = title or " · ".join(dict.fromkeys(name for r in every if (name := model_of(r)))) or "ace-moe"
    data = {
        "title": title,
        "lead": lead(every[0]),
        "compare": [{**without_windows(r), "advice": advise(r)} for r in compare],
        "rivals": [row for r in compare[:1] for row in against(r, rival or default_rival(r))],
        **{kind.split()[-1]: list(found.get(kind, ())) for kind in (THRESHOLDS, EVAL, SIMULATE, BENCH)},
        "notes": [*NOTES, *map(made_by, [*every, *([{"provenance": record}] if record else [])])],
        "provenance": record,
        "commands": list(dict.fromkeys(r["command"] for r in every)),
    }
    looks = {"style": asset("style.css"), "script": "\n".join(map(asset, SCRIPTS))}
    return fill("page.html", title=html.escape(title), data=embed(data), **looks)


def model_of(results: Results) -> str:
    """A benchmark of random weights has no model."""
    found = results.get("model", "")
    return found if isinstance(found, str) else found["name"]


def lead(results: Results) -> str:
    """One sentence on what was measured, and on what."""
    if "environment" not in results:
        return results["command"]
    used = results["environment"]
    versions = f"ace-moe {used['ace_moe']}, torch {used['torch']}, transformers {used['transformers']}"
    if "workload" not in results:
        return f"{versions}."
    text = results["workload"]
    size = f"{text['windows']} windows of {text['window']:,} tokens"
    return f"{results['model']['architecture']} on {text['name']}, {size}, on {used['device']}. {versions}."


def made_by(results: Results) -> str:
    """Who made a file, in a line; what an earlier release did not write is unknown."""
    record = known(results)
    inputs = record["inputs"] if isinstance(record["inputs"], dict) else {}
    of = ", ".join(f"{name} {digest[:12]}" for name, digest in inputs.items())
    name = " ".join(record["command"].split()[:2])
    what = f"{name}: ace-moe {record['version']}, commit {str(record['commit'])[:12]}"
    changed = " with changes" if record["changed"] is True else ""
    return f"{what}{changed}, {record['device']}, {record['date']}{f'; sha256 of {of}' if of else ''}."


def default_rival(results: Results) -> str:
    measured = [cell["method"] for cell in results["cells"]]
    if not measured:
        raise ResultError("These results have no finished cell yet. Run `ace compare` again; it goes on where it was.")
    return "ace" if "ace" in measured else measured[0]


def without_windows(results: Results) -> Results:
    """Losses by window are for statistics; the page has their outcome."""
    left_out = ("nll", "targets", "kl_by_window")
    cells = [{k: v for k, v in cell.items() if k not in left_out} for cell in results["cells"]]
    return {**results, "cells": cells, "dense": {k: v for k, v in results["dense"].items() if k != "nll"}}


# ---- putting the file together ------------------------------------------------------------------------------------


def asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def embed(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def fill(template: str, **parts: str) -> str:
    """Each {{name}} of the template once; what is filled in is not looked at again."""
    head, *rest = asset(template).split("{{")
    pieces = [piece.partition("}}") for piece in rest]
    return head + "".join(parts[name] + tail for name, _, tail in pieces)
