"""A histogram as a curve: few points, so that a line between them is as good as the histogram."""

from __future__ import annotations

import datetime
import itertools
import math

import numpy as np
import torch
from torch import Tensor

from ..plan import Curve, Workload
from ..plan.curves import shaping
from ..policies import Policy
from .fit import BINS, Histogram

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
