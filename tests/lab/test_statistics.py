"""Statistics against distributions whose answers are known."""

from __future__ import annotations

import math

import pytest
import torch

from ace_moe.errors import ResultError
from ace_moe.scoring.losses import Losses, perplexity_change, perplexity_interval
from ace_moe.scoring.statistics import (
    expanded_tail,
    mean_difference,
    mean_interval,
    pearson,
    ranks,
    relative_change,
    sign_flip_p,
    spearman,
    t_quantile,
    token_interval,
)


def normal(count: int, seed: int, mean: float = 0.0) -> list[float]:
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) + mean).tolist()


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423)]
)
def test_students_quantiles(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, rel=2e-3)


def test_tails_widen_for_few_and_vanish_for_many() -> None:
    tails = [expanded_tail(0.025, n) for n in (1, 4, 8, 30, 10_000)]
    assert tails == sorted(tails)
    assert tails[0] == 0 and tails[-1] == pytest.approx(0.025, abs=2e-5)


@pytest.mark.parametrize(("count", "least"), [(8, 0.90), (16, 0.92), (60, 0.92)])
def test_intervals_cover_the_true_mean(count: int, least: float) -> None:
    """95 % intervals of normal samples hold the true mean about 95 % of the time."""
    hits = [mean_interval(normal(count, seed), samples=600, seed=seed) for seed in range(400)]
    coverage = sum(found.low <= 0 <= found.high for found in hits) / 400
    assert least <= coverage <= 0.98


def test_interval_of_a_share_is_the_binomial_one() -> None:
    """600 of 1,000 right: 0.6 ± 1.96 √(0.6 · 0.4 / 1000)."""
    found = mean_interval([1.0] * 600 + [0.0] * 400)
    half = 1.96 * math.sqrt(0.24 / 1000)
    assert found.value == pytest.approx(0.6)
    assert (found.low, found.high) == (pytest.approx(0.6 - half, abs=3e-3), pytest.approx(0.6 + half, abs=3e-3))


def test_perplexity_interval_is_that_of_the_mean_loss() -> None:
    """Losses N(3, 0.2²) a token in 64 windows: e^(3 ± 1.96 · 0.2 / 8) or so."""
    losses = [3 + 0.2 * x for x in normal(64, 1)]
    found = perplexity_interval(Losses([100 * x for x in losses], 6400))
    centre, spread = torch.tensor(losses).mean(), torch.tensor(losses).std() / 8
    assert found.value == pytest.approx(float(centre.exp()), rel=1e-5)
    assert math.log(found.low) == pytest.approx(float(centre - 2 * spread), abs=0.012)
    assert math.log(found.high) == pytest.approx(float(centre + 2 * spread), abs=0.012)


def test_unequal_windows_weigh_by_their_tokens() -> None:
    """A window of one token with a terrible loss hardly matters."""
    losses = Losses([200.0] * 8 + [9.0], 801, [100] * 8 + [1])
    assert losses.perplexity == pytest.approx(math.exp(1609 / 801))
    assert perplexity_interval(losses).low == pytest.approx(math.exp(2))


def test_few_windows_have_no_interval() -> None:
    """One window has no perplexity's, seven none of KL: the value alone, and a plain word."""
    one, few, enough = (Losses([100.0 + i for i in range(n)], 100 * n) for n in (1, 7, 8))
    for found in (perplexity_interval(one), perplexity_change(one, one), token_interval(few.nll, few.by_window)):
        assert found.low is None and found.high is None
        assert str(found) == "no interval: too few windows"
    assert token_interval(enough.nll, enough.by_window).low is not None
    found = perplexity_interval(enough)
    assert found.low < found.value < found.high
    assert str(found) == f"95 % interval {found.low:.2f} – {found.high:.2f}"


def test_token_means_and_their_change() -> None:
    """Sums by window over tokens by window; a tenth less everywhere is a tenth less, surely."""
    sums = [float(i) for i in range(1, 17)]
    found = token_interval(sums, [100] * 16)
    assert found.value == pytest.approx(0.085) and found.low < 0.085 < found.high
    change = relative_change([0.9 * x for x in sums], sums)
    assert (change.value, change.low, change.high) == (pytest.approx(-0.1),) * 3


def test_paired_differences_see_through_hard_windows() -> None:
    """Windows differ by 1 in loss, the two models by 0.02: unpaired intervals overlap, the paired one is sure."""
    base = [100 * (3 + x) for x in normal(32, 5)]
    worse = [x + 2 + 0.3 * e for x, e in zip(base, normal(32, 6), strict=True)]
    first, second = Losses(worse, 3200), Losses(base, 3200)
    assert perplexity_interval(first).low < perplexity_interval(second).high
    change = perplexity_change(first, second)
    assert change.value == pytest.approx(math.expm1(0.02), abs=2e-3)
    assert 0.015 < change.low < change.value < change.high < 0.025
    assert change.p < 0.001
    back = perplexity_change(second, first)
    assert back.high < 0 and back.value == pytest.approx(1 / (1 + change.value) - 1)


def test_no_difference_is_called_none() -> None:
    """The same model twice: no change at all; two samples of one distribution: p is small as rarely as it should be."""
    same = Losses([100.0, 120.0, 90.0] * 3, 900)
    change = perplexity_change(same, same)
    assert (change.value, change.low, change.high, change.p) == (0, 0, 0, 1)
    small = [mean_difference(normal(30, s), normal(30, 1000 + s), samples=200).p < 0.05 for s in range(200)]
    assert 0.01 <= sum(small) / 200 <= 0.10


def test_four_windows_are_never_significant() -> None:
    """All four worse is one of sixteen sign patterns, or its mirror."""
    assert sign_flip_p(torch.tensor([1.0, 2.0, 3.0, 4.0]).double()) == pytest.approx(2 / 16, abs=0.02)


def test_one_window_has_no_spread_and_none_is_refused() -> None:
    found = mean_interval([0.5])
    assert (found.low, found.value, found.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ResultError, match="at least one"):
        mean_interval([])
    with pytest.raises(ResultError, match="cannot be paired"):
        mean_difference([1.0], [1.0, 0.0])


def test_correlations() -> None:
    """Known values, ties shared, order alone for Spearman, constants 0."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert pearson(x, 2 * x + 1) == pytest.approx(1)
    assert pearson(x, torch.tensor([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)
    assert spearman(x, x.exp()) == pytest.approx(1) and pearson(x, x.exp()) < 0.95
    assert spearman(x, -(x**3)) == pytest.approx(-1)
    assert ranks(torch.tensor([5.0, 1.0, 5.0, 0.0])).tolist() == [2.5, 1.0, 2.5, 0.0]
    assert pearson(x, torch.ones(4)) == 0
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(20_000, generator=generator)
    b = 0.6 * a + 0.8 * torch.randn(20_000, generator=generator)
    assert pearson(a, b) == pytest.approx(0.6, abs=0.02)
    assert spearman(a, b) == pytest.approx(6 / math.pi * math.asin(0.3), abs=0.02)  # known for the normal distribution
