"""Cells filled in: a number in the file that its command wrote, or the reason why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .tables import CommandStep, PaperCell, PaperTable

Found = dict[str, Any]
WAITING = "not measured yet"


def stored(folder: Path, step: CommandStep) -> Any:
    """Read what the step has written so far; None where there is nothing, or no JSON."""
    try:
        return json.loads((folder / step.file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def done(folder: Path, step: CommandStep, ran: Mapping[str, Any]) -> bool:
    """True if the step needs no run: the same command has ended, and what it wrote is there and whole."""
    if ran.get(step.name) != list(step.argv) or not (folder / step.file).is_file():
        return False
    if not step.file.endswith(".json"):
        return True
    found = stored(folder, step)
    try:
        return found is not None and step.whole(found)
    except (KeyError, TypeError):
        return False


def filled(folder: Path, table: PaperTable, refused: Mapping[str, str]) -> list[Found]:
    """Fill every cell of a table with its value, or with the reason why it has none."""
    files = {step.name: stored(folder, step) for step in table.steps}
    rows = []
    for cell in table.cells:
        value, why = _value(files[cell.step], cell, refused)
        rows.append({"row": cell.row, "column": cell.column, "value": value, "refused": why, "paper": cell.paper})
    return rows


def _value(found: Any, cell: PaperCell, refused: Mapping[str, str]) -> tuple[float | None, str | None]:
    try:
        value = None if found is None else READERS[str(found.get("kind", "bench"))](found, *cell.place)
    except (KeyError, TypeError, IndexError):
        value = None
    if value is not None:
        return value, None
    by_method = (found or {}).get("refused", {}).get(cell.place[0]) if isinstance(found, dict) else None
    return None, refused.get(cell.step) or (by_method["reason"] if by_method else WAITING)


def _compared(found: Found, method: str, gain: str = "", budget: float = 0.0) -> float | None:
    if method == "dense":
        return found["dense"]["perplexity"]
    cells = (c for c in found["cells"] if (c["method"], c["gain"], c["budget"]) == (method, gain, budget))
    return next((c["perplexity"] for c in cells), None)


def _answered(found: Found, budget: float) -> float | None:
    """The mean over tasks, in per cent."""
    values = [c["value"] for c in found["cells"] if c["skip"] == budget]
    return 100 * sum(values) / len(values) if values else None


def _mapped(found: Found, what: str, name: str, budget: float = 0.0) -> float | None:
    if what == "cost":
        return next((row["seconds"] / 60 for row in found["cost"] if row["way"] == name), None)
    rows = (r for r in found["workloads"] if (r["workload"], r["budget"]) == (name, budget))
    return next((r["threshold"] for r in rows), None)


def _timed(found: Found, what: str, tokens: int, batch: int, path: str, ratio: float) -> float | None:
    wanted = (what, tokens, batch, path, ratio)
    rows = (r for r in found["rows"] if tuple(r[n] for n in ("what", "tokens", "batch", "path", "requested")) == wanted)
    return next((r["wall_ms"] if r["gpu_ms"] is None else r["gpu_ms"] for r in rows), None)


READERS: dict[str, Callable[..., float | None]] = {
    "compare": _compared,
    "eval": _answered,
    "study thresholds": _mapped,
    "bench": _timed,
}
