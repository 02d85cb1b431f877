"""What unfinished work has found, in a file beside its plan until it is done: work that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..errors import AceError
from ..files import expand, replace_whole
from .fit import Histogram
from .passes import Passes

Row = list[list[float]]  # by budget: KL, agreement and loss, summed over a window's tokens, and the realised ratio


class Beside:
    """`.PLAN.<ending>`; without a plan there is no file."""

    def __init__(self, plan: str | Path | None, ending: str):
        path = None if plan is None else expand(plan)
        self.path = None if path is None else path.with_name(f".{path.name}.{ending}")

    def write(self, data: bytes) -> None:
        """A help for later: where it cannot be written, the work goes on without."""
        if self.path is not None:
            with suppress(OSError):
                replace_whole(self.path, data)

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class Partial(Beside):
    """The dense pass of a mapping, valid for one model, policy, text and way of reading it."""

    def __init__(self, plan: str | Path):
        super().__init__(plan, "partial")

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Kept where a run was stopped; work that ended, or was refused, leaves nothing behind."""
        if kind is None or issubclass(kind, AceError):
            self.remove()

    def load(self, passes: Passes) -> Histogram | None:
        """The histogram, if the file is of this very pass."""
        with suppress(SafetensorError, OSError, ValueError), safe_open(self.path, "pt") as file:
            if (file.metadata() or {}).get("key") == _key(passes):
                seen = Histogram()
                seen.bins = file.get_tensor("bins").clone()
                return seen
        return None

    def save(self, passes: Passes, seen: Histogram) -> None:
        self.write(save({"bins": seen.bins.cpu()}, metadata={"key": _key(passes)}))


def _key(passes: Passes) -> str:
    """Everything the histogram depends on."""
    settings = {k: v for k, v in passes.policy.settings.items() if k != "gain"}
    facts = {
        "model": passes.deciders.plan.fingerprint.routers.exact,
        "dtype": str(passes.model.dtype),
        "device": passes.model.device.type,
        "settings": settings,
        "text": passes.windows.workload.sha256,
        "window": passes.windows.ids.shape[1],  # the hash is of the tokens, however they are cut
        "batch": passes.batch,
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Journal(Beside):
    """What a search has measured, valid for one model, text, way of reading it and list of budgets."""

    def __init__(self, plan: str | Path | None, identity: dict[str, Any]):
        super().__init__(plan, "tune")
        self.identity = json.loads(json.dumps(identity))
        found = self._read()
        self.rows: dict[str, list[Row]] = found.get("rows", {})  # by candidate, then by window
        self.taus: dict[str, list[float]] = found.get("taus", {})  # by candidate, then by budget
        self.numbers: dict[str, dict[str, float]] = found.get("numbers", {})  # tables with one number a layer

    def _read(self) -> dict[str, Any]:
        """Nothing where the file is of another search, or no file of ours."""
        if self.path is not None:
            with suppress(OSError, ValueError, AttributeError):
                found = json.loads(self.path.read_text(encoding="utf-8"))
                return found if found.get("identity") == self.identity else {}
        return {}

    @property
    def windows(self) -> int:
        """Measurements of a window that are there."""
        return sum(map(len, self.rows.values()))

    def save(self) -> None:
        kept = {name: getattr(self, name) for name in ("identity", "rows", "taus", "numbers")}
        self.write(json.dumps(kept).encode())
