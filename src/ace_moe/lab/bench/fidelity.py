"""The distance of timed budgets from the unskipped model on a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ...errors import ModelError
from ...mapping import map_budgets
from ...mapping.passes import judge
from ...plan import Plan
from ...policies import Policy
from ...scoring.predictions import predicts
from ...text import Windows


def fidelity(
    model: PreTrainedModel, plan: Plan, policy: Policy, windows: Windows, ratios: Sequence[float]
) -> dict[float, dict[str, Any]]:
    """KL, agreement and acceptance by ratio, each at the threshold that realises the ratio on this text."""
    if not predicts(model):
        raise ModelError(f"{type(model).__name__} predicts no tokens, so a text says nothing of it. Leave out --text.")
    mapped = map_budgets(model, plan, policy, windows, [r for r in ratios if r > 0])
    fits = {fit.budget: (fit.threshold, fit.realised) for fit in mapped.fits}
    points = [(ratio, *(fits[ratio] if ratio > 0 else (0.0, 0.0))) for ratio in ratios]
    found = judge(model, mapped.plan, policy, windows, [tau for _, tau, _ in points])
    return {
        ratio: {"threshold": tau, "realised": realised, **means}
        for (ratio, tau, realised), means in zip(points, found, strict=True)
    }
