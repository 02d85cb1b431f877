"""One self-contained page from results: everything it needs is in the file, so it opens from disk without a network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from ...errors import ResultError
from ...files import hashes, write_whole
from ...provenance import Record, provenance
from ...provenance import read as record_of
from ..compare.verdict import advise, against
from ..store import BENCH, COMPARE, EVAL, SIMULATE, THRESHOLDS, Results
from .contents import KINDS, read

SCRIPTS = ("base.js", "save.js", "compare.js", "maps.js", "studies.js", "steps.js", "main.js")
NOTES = (
    "Intervals are 95 % bootstrap intervals over windows or questions, widened for few of them; differences are paired. The "
    "realised ratio is counted while the model runs, not assumed.",
)
MARK = '<script type="application/json" id="data">'  # what every page of ours has
BY_WINDOW = ("nll", "targets", "kl_by_window")  # for statistics; the page has their outcome


def write_page(paths: Sequence[Path], output: Path, rival: str | None = None, title: str | None = None) -> None:
    """Write the page for these results files, of any mix of commands."""
    found: dict[str, list[Results]] = {kind: [] for kind in KINDS}
    for path in paths:
        kind, results = read(path)
        found[kind].append(results)
    write_whole(output, page(found, rival, title, provenance(inputs=hashes(paths))).encode(), "The page")


def is_page(path: Path) -> bool:
    """True for a file that is a page made here."""
    return MARK.encode() in path.read_bytes()


def page(
    found: Mapping[str, Sequence[Results]],
    rival: str | None = None,
    title: str | None = None,
    record: Record | None = None,
) -> str:
    """The page for results by kind; `record` says what made it."""
    every = [results for kind in KINDS for results in found.get(kind, ())]
    compared = found.get(COMPARE, ())
    models = [results.get("model", "") for results in every]  # a name, or an object with one; random weights have none
    names = dict.fromkeys(model if isinstance(model, str) else model["name"] for model in models)
    title = title or " · ".join(filter(None, names)) or "ace-moe"
    rivals: list[Results] = []
    for results in compared[:1]:
        methods = [cell["method"] for cell in results["cells"]]
        if not methods:
            raise ResultError(
                "These results have no finished cell yet. Run `ace compare` again; it goes on where it was."
            )
        rivals = against(results, rival or ("ace" if "ace" in methods else methods[0]))
    data = {
        "title": title,
        "lead": _lead(every[0]),
        "compare": [{**_shown(results), "advice": advise(results)} for results in compared],
        "rivals": rivals,
        **{kind.split()[-1]: list(found.get(kind, ())) for kind in (THRESHOLDS, EVAL, SIMULATE, BENCH)},
        "notes": [*NOTES, *map(_made_by, [*every, *([{"provenance": record}] if record else [])])],
        "provenance": record,
        "commands": list(dict.fromkeys(results["command"] for results in every)),
    }
    embedded = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")  # cannot end its element
    parts = {"title": html.escape(title), "data": embedded, "style": asset("style.css")}
    parts["script"] = "\n".join(map(asset, SCRIPTS))
    head, *rest = asset("page.html").split("{{")  # each {{name}} once; what is filled in is not looked at again
    pieces = [piece.partition("}}") for piece in rest]
    return head + "".join(parts[name] + tail for name, _, tail in pieces)


def _lead(results: Results) -> str:
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


def _shown(results: Results) -> Results:
    """A comparison without its losses by window."""
    cells = [{name: value for name, value in cell.items() if name not in BY_WINDOW} for cell in results["cells"]]
    dense = {name: value for name, value in results["dense"].items() if name != "nll"}
    return {**results, "cells": cells, "dense": dense}


def _made_by(results: Results) -> str:
    """Say in a line what made a file; what the file does not say is unknown."""
    record = record_of(results)
    inputs = record["inputs"] if isinstance(record["inputs"], dict) else {}
    of = ", ".join(f"{name} {digest[:12]}" for name, digest in inputs.items())
    name = " ".join(record["command"].split()[:2])
    what = f"{name}: ace-moe {record['version']}, commit {str(record['commit'])[:12]}"
    changed = " with changes" if record["changed"] is True else ""
    return f"{what}{changed}, {record['device']}, {record['date']}{f'; sha256 of {of}' if of else ''}."


def asset(name: str) -> str:
    """The text of a file the page is made of."""
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")
