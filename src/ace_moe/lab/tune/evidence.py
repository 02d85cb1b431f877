"""Evidence from measured candidates: KL at the budget that was asked, perplexity, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from ...mapping.unfinished import Journal, Row
from ...policies import TokenPolicy
from ...scoring.statistics import relative_change, token_interval
from .candidates import key_of, label

STEEP = 7.0  # growth of log KL with the ratio where one budget does not tell: it doubles in ten points on our models
LEAST = 1e-9  # KL under this is none


class TextPart(NamedTuple):
    """Windows from the first to one past the last."""

    first: int
    last: int

    def of(self, rows: Sequence[Row]) -> Sequence[Row]:
        return rows[self.first : self.last]


def log_kl(rows: Sequence[Row], budgets: Sequence[float], part: TextPart) -> float:
    """The mean over budgets."""
    return sum(logs_at(rows, budgets, part)) / len(budgets)


def logs_at(rows: Sequence[Row], budgets: Sequence[float], part: TextPart) -> list[float]:
    """log KL of a window at each budget, moved there from the ratio that was realised."""
    kls, ratios = _means(rows, part)
    logs = [math.log(max(kl, LEAST)) if math.isfinite(kl) else math.inf for kl in kls]
    apart = ratios[-1] - ratios[0]
    slope = (logs[-1] - logs[0]) / apart if apart > 0.02 and math.isfinite(logs[-1]) else STEEP
    return [x + slope * (b - r) for x, b, r in zip(logs, budgets, ratios, strict=True)]


def _means(rows: Sequence[Row], part: TextPart) -> tuple[list[float], list[float]]:
    """(KL of a window, realised ratio) by budget."""
    columns = list(zip(*part.of(rows), strict=True))  # by budget, then by window
    return [sum(c[0] for c in b) / len(b) for b in columns], [sum(c[3] for c in b) / len(b) for b in columns]


def loss(rows: Sequence[Row], part: TextPart) -> float:
    """Summed loss of all budgets."""
    return sum(cell[2] for row in part.of(rows) for cell in row)


class Evidence:
    """Numbers on candidates from a part of the text, whose windows predict `tokens` each."""

    def __init__(self, journal: Journal, budgets: Sequence[float], part: TextPart, tokens: int):
        self.journal, self.budgets, self.part, self.tokens = journal, budgets, part, tokens

    @property
    def size(self) -> dict[str, int]:
        windows = self.part.last - self.part.first
        return {"windows": windows, "tokens": windows * self.tokens}

    def of(self, policy: TokenPolicy, rival: TokenPolicy) -> dict[str, Any]:
        """Settings, and for each budget KL with its interval and against the rival's, agreement, perplexity, ratio."""
        mine, other = (self.part.of(self.journal.rows[key_of(p)]) for p in (policy, rival))
        cells = [self._cell(mine, other, n) for n in range(len(self.budgets))]
        return {"settings": policy.settings, "label": label(policy), "measured": cells}

    def _cell(self, rows: Sequence[Row], rival: Sequence[Row], number: int) -> dict[str, Any]:
        kl, agreement, _, realised = zip(*(row[number] for row in rows), strict=True)
        return {
            "budget": self.budgets[number],
            "realised": sum(realised) / len(rows),
            "kl": asdict(token_interval(kl, [self.tokens] * len(rows))),
            "kl_change": asdict(relative_change(kl, [row[number][0] for row in rival])),
            "agreement": sum(agreement) / (len(rows) * self.tokens),
            "perplexity_change": self._worse(rows, number),
        }

    def _worse(self, rows: Sequence[Row], number: int) -> float:
        """Perplexity at a budget against the unskipped model's, minus 1, on windows from the part's first on."""
        first, lost = self.part.first, sum(row[number][2] for row in rows)
        unskipped = sum(self.journal.numbers["unskipped"][str(n)] for n in range(first, first + len(rows)))
        return math.expm1((lost - unskipped) / (len(rows) * self.tokens))

    def row(self, policy: TokenPolicy) -> dict[str, Any]:
        """One line: KL a token at each budget and in all, on the windows of the part that were read."""
        rows = self.part.of(self.journal.rows[key_of(policy)])
        part = TextPart(0, len(rows))
        kls, ratios = _means(rows, part)
        change = [self._worse(rows, n) for n in range(len(self.budgets))]
        return {
            **{"label": label(policy), "settings": policy.settings, "windows": len(rows)},
            **{"kl": [kl / self.tokens for kl in kls], "realised": ratios, "perplexity_change": change},
            "log_kl": log_kl(rows, self.budgets, part),
        }
