"""The cost of reading experts, fitted to a benchmark: time of a decode step = base(batch) + a · experts read per layer.

One slope for all batches, because an expert is read once for all of a step's tokens. It holds on the machine, the shapes and
the batches that were timed, and is not stretched beyond them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import OptionError, ResultError
from ...files import expand


@dataclass(frozen=True)
class Cost:
    """Milliseconds: `slope` for each expert a layer reads, `base` by batch for everything else."""

    slope: float
    base: dict[int, float]
    top_k: int | None = None  # slots of a token of the model that was timed

    def tpot(self, batch: int, reads: float) -> float:
        """Between two batches that were timed the base is on the line between theirs."""
        timed = sorted(self.base)
        if not timed[0] <= batch <= timed[-1]:
            raise OptionError(
                f"A batch of {batch} is outside those that were timed ({timed[0]} to {timed[-1]}). Time it with `ace bench "
                "--decode`, or leave --bench out."
            )
        return float(np.interp(batch, timed, [self.base[b] for b in timed])) + self.slope * reads


def fit(rows: Sequence[Mapping[str, Any]]) -> Cost:
    """Fit the rows of `ace bench`: steps of our own path at several ratios."""
    steps = [r for r in rows if r.get("what") == "tpot" and r.get("path") == "ace" and r.get("executed")]
    batches = sorted({int(r["batch"]) for r in steps})
    times = [float(r["wall_ms"] if r.get("gpu_ms") is None else r["gpu_ms"]) for r in steps]
    pairs = [(int(r["batch"]), float(r["executed"]), ms) for r, ms in zip(steps, times, strict=True)]
    points = {b: np.array([(reads, ms) for batch, reads, ms in pairs if batch == b]) for b in batches}
    apart = {b: p - p.mean(0) for b, p in points.items()}
    spread = sum(float((a[:, 0] ** 2).sum()) for a in apart.values())
    if not spread > 0:
        raise ResultError(
            "The benchmark has no decode steps at two ratios or more. Make it with `ace bench … --skip 0,0.6 --decode 1,4,16`."
        )
    slope = sum(float((a[:, 0] * a[:, 1]).sum()) for a in apart.values()) / spread
    base = {b: float((p[:, 1] - slope * p[:, 0]).mean()) for b, p in points.items()}
    return Cost(slope, base, len(steps[0]["shares"]) if steps[0].get("shares") else None)


def cost_of(path: Path, top_k: int) -> Cost:
    """The fit of a benchmark's file, if it is of a model with as many slots."""
    try:
        found = fit(json.loads(expand(path).read_text(encoding="utf-8"))["rows"])
    except FileNotFoundError:
        raise ResultError(f"There is no benchmark at {path}. Make one with `ace bench … -o {path.name}`.") from None
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ResultError(f"{path} holds no rows of `ace bench`. Give a file that this command wrote.") from error
    if found.top_k is not None and found.top_k != top_k:
        raise ResultError(
            f"{path} timed a model with {found.top_k} slots a token, the trace has {top_k}. Time the model that was traced, or "
            "one of its shape."
        )
    return found
