"""Confidence in numbers: bootstrap intervals over windows or questions, paired differences, correlations.

One bootstrap sample draws as many windows as there are, with replacement. All samples are drawn at once, as counts, so
that a statistic of every sample is one matrix product. Comparisons are paired: both sides see the same draws, and what
makes a window hard for both cancels.

Percentile intervals of few windows are too narrow. The quantile levels are widened as a t interval would be
(Hesterberg, 2015, "expanded percentile"): at 4 windows the interval spans nearly all of them, at 100 it hardly changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from ..errors import ResultError

DRAWS, LEVEL = 4000, 0.95
FEWEST = 8  # windows for an interval of KL and its kin, which differ more than losses do; perplexity takes two


@dataclass(frozen=True)
class Interval:
    """A statistic and the bounds it is within at the given level; None where there are too few windows to tell."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return "no interval: too few windows"
        return f"95 % interval {self.low:.2f} – {self.high:.2f}"


@dataclass(frozen=True)
class Difference(Interval):
    """A difference and its p: the share of random sign flips of the windows' or questions' that give one as large."""

    p: float


# ---- means and their differences ------------------------------------------------------------------------------------


def mean_interval(values: Sequence[float] | Tensor, *, samples: int = DRAWS, seed: int = 0) -> Interval:
    """Bound the mean of one number per question, such as 1 for a right answer."""
    x = column(values)
    return interval(float(x.mean()), lambda counts: counts @ x / len(x), len(x), 1, samples, seed)


def mean_difference(values: Sequence[float], rival: Sequence[float], *, samples: int = DRAWS) -> Difference:
    """Subtract the mean of the second from the mean of the first, on the same questions."""
    x, y = paired(values, rival)
    return Difference(**vars(mean_interval(x - y, samples=samples)), p=sign_flip_p(x - y))


def token_interval(sums: Sequence[float], weights: Sequence[int]) -> Interval:
    """Bound the mean over tokens of what was summed over the tokens of each window, such as KL."""
    x, w = paired(sums, weights)
    return interval(float(x.sum() / w.sum()), lambda counts: (counts @ x) / (counts @ w), len(x), FEWEST)


def relative_change(sums: Sequence[float], rival: Sequence[float]) -> Interval:
    """Divide Σ of the first by Σ of the second on the same windows, minus 1: −0.2 is a fifth less."""
    x, y = paired(sums, rival)
    value = float(x.sum() / y.sum().clamp(min=1e-30)) - 1
    return interval(value, lambda counts: (counts @ x) / (counts @ y).clamp(min=1e-30) - 1, len(x), FEWEST)


# ---- the bootstrap --------------------------------------------------------------------------------------------------


def column(values: Sequence[float] | Tensor) -> Tensor:
    """Make a column [N] in fp64 of at least one value."""
    if not len(values):
        raise ResultError("There is nothing to take statistics of. Evaluate at least one window or question.")
    return torch.as_tensor(values, dtype=torch.float64)


def paired(values: Sequence[float], rival: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Make two columns of one length."""
    if len(values) != len(rival):
        raise ResultError(
            f"{len(values)} and {len(rival)} windows or questions cannot be paired. Evaluate both on the same text."
        )
    return column(values), column(rival)


def interval(
    value: float, of: Callable[[Tensor], Tensor], count: int, fewest: int, samples: int = DRAWS, seed: int = 0
) -> Interval:
    """Bound a value; `of` gives the statistic of every sample [B] from how often each thing is in it [B, N]."""
    if count < fewest:
        return Interval(value, None, None)
    picked = torch.randint(count, (samples, count), generator=torch.Generator().manual_seed(seed))
    counts = torch.zeros(samples, count, dtype=torch.float64).scatter_add_(1, picked, torch.ones_like(picked).double())
    tail = expanded_tail((1 - LEVEL) / 2, count)
    low, high = torch.quantile(of(counts), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(value, min(low, value), max(high, value))  # of one window the bounds are the value itself


def sign_flip_p(each: Tensor, samples: int = DRAWS, seed: int = 0) -> float:
    """Test paired differences [N] against "either side could have been the other": two-sided p; of 4 windows at least 1/8."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (samples, len(each)), generator=generator).double() * 2 - 1
    as_large = (signs @ each).abs() >= each.sum().abs() * (1 - 1e-12)
    return (1 + int(as_large.sum())) / (1 + samples)


def expanded_tail(tail: float, count: int) -> float:
    """Choose the tail to cut from a bootstrap of `count` things, so that the interval is as wide as Student's."""
    if count < 2:
        return 0.0
    return NormalDist().cdf(-math.sqrt(count / (count - 1)) * t_quantile(1 - tail, count - 1))


def t_quantile(probability: float, freedom: int) -> float:
    """Approximate Student's quantile by its expansion around the normal one (Abramowitz and Stegun 26.7.5); 1 and 2 exactly."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


# ---- correlation ----------------------------------------------------------------------------------------------------


def pearson(x: Tensor, y: Tensor) -> float:
    """Correlate two vectors [N] linearly; 0 where one of them is constant."""
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale > 0 else 0.0


def spearman(x: Tensor, y: Tensor) -> float:
    """Correlate ranks: how well one orders the other."""
    return pearson(ranks(x), ranks(y))


def ranks(x: Tensor) -> Tensor:
    """Rank values [N] from 0; equal ones share the mean of their ranks."""
    _, group, size = torch.unique(x, return_inverse=True, return_counts=True)
    last = size.cumsum(0).double()
    return (last - (size.double() + 1) / 2)[group]
