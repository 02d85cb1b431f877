"""The dense pass of a mapping that was stopped: kept beside the plan until its last budget is found."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..errors import AceError
from ..files import expand, replace_whole
from .mapping import Histogram
from .passes import Passes


class Partial:
    """`.PLAN.partial`, valid for one model, policy, text and way of reading it."""

    def __init__(self, plan: str | Path):
        path = expand(plan)
        self.path = path.with_name(f".{path.name}.partial")

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Kept where a run was stopped; work that ended, or was refused, leaves nothing behind."""
        if kind is None or issubclass(kind, AceError):
            self.remove()

    def load(self, passes: Passes) -> Histogram | None:
        """The histogram, if the file is of this very pass."""
        try:
            with safe_open(self.path, "pt") as file:
                if (file.metadata() or {}).get("key") != _key(passes):
                    return None
                seen = Histogram()
                seen.bins = file.get_tensor("bins").clone()
                return seen
        except (SafetensorError, OSError, ValueError):
            return None

    def save(self, passes: Passes, seen: Histogram) -> None:
        """A help for later: where it cannot be written, the work goes on without."""
        with suppress(OSError):
            replace_whole(self.path, save({"bins": seen.bins.cpu()}, metadata={"key": _key(passes)}))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _key(passes: Passes) -> str:
    """Everything the histogram depends on."""
    settings = {k: v for k, v in passes.policy.settings.items() if k != "gain"}
    facts = {
        "model": passes.runtime.plan.fingerprint.routers.exact,
        "dtype": str(passes.model.dtype),
        "device": passes.model.device.type,
        "settings": settings,
        "text": passes.windows.workload.sha256,
        "batch": passes.batch,
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
