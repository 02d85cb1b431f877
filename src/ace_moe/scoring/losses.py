"""Losses of a model on a text by window, and the perplexity they give."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import ModelError
from .statistics import Difference, Interval, column, interval, paired, sign_flip_p

if TYPE_CHECKING:
    from .fidelity import Fidelity

LARGEST = 700.0  # a loss per token past which exp() overflows


@dataclass
class Losses:
    """Negative log-likelihood by window, and what each window weighs (its predicted tokens; empty: all the same)."""

    nll: list[float]
    targets: int
    weights: list[int] = field(default_factory=list)
    fidelity: Fidelity | None = None  # to the unskipped model, where it was asked for

    @property
    def perplexity(self) -> float:
        return math.exp(check_loss(sum(self.nll) / self.targets))

    @property
    def by_window(self) -> list[int]:
        """Weights, [windows]."""
        return self.weights or [self.targets // len(self.nll)] * len(self.nll)


def check_loss(loss: float) -> float:
    """Return the loss per token; refuse one that has no perplexity."""
    if not loss < LARGEST:  # NaN is not
        raise ModelError(
            f"The model gives no perplexity on this text: its loss is {loss:g} per token. It is damaged or diverged, or runs "
            "in a precision it was not trained for; check the checkpoint, or try another --device."
        )
    return loss


def perplexity_interval(losses: Losses) -> Interval:
    """Bound perplexity over windows; a window counts by its predicted tokens."""
    nll, weights = column(losses.nll), column(losses.by_window)
    return interval(losses.perplexity, lambda counts: ((counts @ nll) / (counts @ weights)).exp(), len(nll), 2)


def perplexity_change(losses: Losses, rival: Losses) -> Difference:
    """Compare perplexity with the rival's on the same windows, minus 1: 0.05 is five per cent worse."""
    x, y = paired(losses.nll, rival.nll)
    x_weights, y_weights = paired(losses.by_window, rival.by_window)
    bounds = interval(
        losses.perplexity / rival.perplexity - 1,
        lambda counts: ((counts @ x) / (counts @ x_weights) - (counts @ y) / (counts @ y_weights)).expm1(),
        len(x),
        2,
    )
    return Difference(**vars(bounds), p=sign_flip_p(x - y))
