"""What a search has measured, beside the plan until its choice is in it: a search that was stopped goes on where it was."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files import expand, replace_whole

Row = list[list[float]]  # by budget: KL, agreement and loss, summed over a window's tokens, and the realised ratio


class Journal:
    """`.PLAN.tune`, valid for one model, text, way of reading it and list of budgets; without a path it is in memory alone."""

    def __init__(self, plan: str | Path | None, identity: dict[str, Any]):
        path = None if plan is None else expand(plan)
        self.path = None if path is None else path.with_name(f".{path.name}.tune")
        self.identity = json.loads(json.dumps(identity))
        found = self._read()
        self.rows: dict[str, list[Row]] = found.get("rows", {})  # by candidate, then by window
        self.taus: dict[str, list[float]] = found.get("taus", {})  # by candidate, then by budget
        self.numbers: dict[str, dict[str, float]] = found.get("numbers", {})  # tables with one number a layer

    def _read(self) -> dict[str, Any]:
        """Nothing where the file is of another search, or no file of ours."""
        if self.path is None:
            return {}
        with suppress(OSError, ValueError, AttributeError):
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found.get("identity") == self.identity:
                return found
        return {}

    @property
    def windows(self) -> int:
        """Measurements of a window that are there."""
        return sum(map(len, self.rows.values()))

    def save(self) -> None:
        """A help for later: where it cannot be written, the work goes on without."""
        if self.path is not None:
            kept = {name: getattr(self, name) for name in ("identity", "rows", "taus", "numbers")}
            with suppress(OSError):
                replace_whole(self.path, json.dumps(kept).encode())

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
