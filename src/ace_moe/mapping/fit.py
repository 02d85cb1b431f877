"""Budget ↔ threshold, as arithmetic: a histogram of contributions, its quantile_fits, correction, binary search.

A budget is what the user asks for (the fraction of routed slots to skip), τ is what the rule uses. One unlabelled pass
of the dense model fills a histogram and gives τ for every budget at once. A skipped model sees other hidden states than
the dense one, so its realised ratio drifts; correction passes run the skipped model and move τ until the ratio fits.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import BudgetError, no_numbers, out_of_reach
from ..plan import Curve, Workload
from ..plan.lookup import shaping
from ..policies import Policy

BINS = 1 << 20  # a power of two: scaling a float by it is exact, so "bin < b" and "contribution < b / BINS" agree


class Histogram:
    """Contributions of any number of slots in bounded memory. Protected slots (+∞) count as routed, not as candidates.

    Counts grow on the device of the slots and nothing waits for it: values that are no numbers are noticed on reading.
    """

    def __init__(self) -> None:
        self.bins = torch.zeros(BINS + 3, dtype=torch.int64)  # [0, 1], one for protected slots, one for NaN
        self._known: tuple[int, Tensor] | None = None

    def add(self, protected: Tensor, token_mask: Tensor | None = None) -> None:
        """protected [T, k] with values in [0, 1] or +∞; token_mask [T] is False at padding."""
        index = torch.where(protected.isinf(), BINS + 1, (protected.clamp(0, 1) * BINS).long())
        index = torch.where(protected.isnan(), BINS + 2, index)
        real = torch.ones_like(index) if token_mask is None else token_mask.long().unsqueeze(-1).expand_as(index)
        self.bins = self.bins.to(index.device)
        self.bins.scatter_add_(0, index.flatten(), real.flatten())
        self._known = None

    def _read(self) -> tuple[int, Tensor]:
        """(routed slots, candidates under each bin edge [BINS + 2] on the CPU)."""
        if self._known is None:
            bins = self.bins.cpu()
            if bins[-1]:
                raise no_numbers("gates")
            self._known = int(bins.sum()), torch.cat([bins.new_zeros(1), bins[:-2].cumsum(0)])
        return self._known

    @property
    def routed(self) -> int:
        return self._read()[0]

    @property
    def candidates(self) -> int:
        return int(self._read()[1][-1])

    @property
    def limit(self) -> float:
        """The largest ratio the safeguards leave room for."""
        return self.candidates / self.routed if self.routed else 0.0

    def ratios(self) -> np.ndarray:
        """[BINS + 2]: the ratio at each bin edge."""
        return (self._read()[1].double() / self._some_routed()).numpy()

    def _some_routed(self) -> int:
        if not self.routed:
            raise BudgetError("The pass saw no routed slot; the text is empty or the model has no MoE layer attached.")
        return self.routed

    def ratio(self, threshold: float) -> float:
        """Fraction of routed slots with contribution < τ, for a τ on a bin edge."""
        edge = min(BINS + 1, max(0, math.ceil(threshold * BINS)))
        return int(self._read()[1][edge]) / self.routed if self.routed else 0.0

    def threshold(self, budget: float) -> float:
        """The bin edge whose count is closest to the budget's (ties between slots cannot be split)."""
        wanted = min(round(budget * self._some_routed()), self.candidates)
        below = self._read()[1]
        edge = int(torch.searchsorted(below, wanted))  # first edge with at least `wanted` under it
        if edge > 0 and wanted - int(below[edge - 1]) < int(below[edge]) - wanted:
            edge -= 1
        count = int(below[edge])
        first, last = int(torch.searchsorted(below, count)), int(torch.searchsorted(below, count, right=True)) - 1
        return (first + last) // 2 / BINS if count else 0.0  # the middle of the gap between two values


@dataclass(frozen=True)
class Fit:
    """What became of one budget: its τ, the ratio τ realises, and how many passes of the model that took."""

    budget: float
    threshold: float
    realised: float
    passes: int
    corrected: bool


class Dense(Protocol):
    """What is known of the unskipped model: a histogram, or the curve that was kept of one."""

    @property
    def limit(self) -> float: ...
    def ratio(self, threshold: float) -> float: ...
    def threshold(self, budget: float) -> float: ...


def quantile_fits(dense: Dense, budgets: Sequence[float]) -> list[Fit]:
    """τ for each budget from one pass of the dense model. `realised` is what the dense pass promises."""
    fits = []
    for budget in budgets:
        tau = dense.threshold(budget)
        if budget > dense.limit:
            raise out_of_reach(budget, dense.limit, "on this text")
        fits.append(Fit(budget, tau, dense.ratio(tau), 0, corrected=False))
    return fits


# ---- a histogram as a curve: few points, so that a line between them is as good ------------------------------------------------

CLOSE = 1e-4  # of ratio: how far the line may be from the histogram
STEP = 1e-3  # a larger jump between two bins is kept as it is
MOST = 2040  # points: under 16 KiB
Vertex = tuple[int, float]  # bin edge, ratio


def curve_of(seen: Histogram, policy: Policy, workload: Workload) -> Curve:
    """What a dense pass saw, as a plan keeps it."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return Curve(shaping(policy.settings), workload, points(seen), today)


def points(seen: Histogram) -> Tensor:
    """[2, N]: τ and ratio. Where slots are tied so often that this is too much, the line is less close."""
    ratios, close = seen.ratios(), CLOSE
    while len(line := _line(ratios, close)) > MOST:
        close *= 1.05
    edges, values = zip(*line, strict=True)
    taus = torch.tensor(edges, dtype=torch.float64) / BINS
    return torch.stack([taus, torch.tensor(values, dtype=torch.float64)]).float()


def _line(ratios: np.ndarray, close: float) -> list[Vertex]:
    """Through the ratios [BINS + 2]: both ends of large steps, the first edge of the end, and little between them."""
    steps = np.flatnonzero(np.diff(ratios) > STEP)
    end = int(np.searchsorted(ratios, ratios[-1]))  # from here on nothing more is skipped
    fixed = sorted({0, end, len(ratios) - 1, *steps.tolist(), *(steps + 1).tolist()})
    line = [(0, float(ratios[0]))]
    for first, last in itertools.pairwise(fixed):
        line += _stretch(ratios, first, last, close) if ratios[last] > ratios[first] and last - first > 1 else []
        line.append((last, float(ratios[last])))
    return line


def _stretch(ratios: np.ndarray, first: int, last: int, close: float) -> list[Vertex]:
    """Vertices inside a stretch. A line swings about its last vertex as long as it comes close to every edge it passes."""
    made: list[Vertex] = []
    (at, value), low, high = (first, float(ratios[first])), -math.inf, math.inf
    before = first
    for edge in _telling(ratios, first, last, close):
        wanted, room = float(ratios[edge]), 0.0 if edge == last else close
        down, up = (wanted - room - value) / (edge - at), (wanted + room - value) / (edge - at)
        if max(low, down) > min(high, up):
            slope = min(max((float(ratios[before]) - value) / (before - at), low, 0.0), high)
            value = min(value + slope * (before - at), float(ratios[last]))
            at, low, high = before, -math.inf, math.inf
            made.append((at, value))
            down, up = (wanted - room - value) / (edge - at), (wanted + room - value) / (edge - at)
        low, high, before = max(low, down), min(high, up), edge
    return made


def _telling(ratios: np.ndarray, first: int, last: int, close: float) -> list[int]:
    """Edges in front of and behind every jump that matters: small ones are taken together, so a long text costs no more."""
    levels = np.floor((ratios[first : last + 1] - ratios[first]) / (close / 50))
    jumps = np.flatnonzero(np.diff(levels)) + first
    return sorted({last, *jumps.tolist(), *(jumps + 1).tolist()} - {first})
