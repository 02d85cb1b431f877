"""What a user asks: the fraction of routed slots to skip, one number or one for each phase."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from .errors import BudgetError

Phase = Literal["prefill", "decode", "verify"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "verify")
EXAMPLE = '{"prefill": 0.3, "decode": 0.5}'


class Budget(NamedTuple):
    """A parsed budget. Whoever gets one need not check it again, except against a model's slots (`check`).

    `verify` is the budget of drafted tokens; it follows `decode` unless it is named.
    """

    prefill: float
    decode: float
    verify: float

    @classmethod
    def parse(cls, wish: BudgetLike) -> Budget:
        """From 0.3, {"both": 0.3}, {"prefill": 0.3, "decode": 0.5} with or without "verify", or a Budget."""
        if isinstance(wish, Budget):
            return wish
        if not isinstance(wish, Mapping):
            value = fraction(wish)
            return cls(value, value, value)
        if set(wish) == {"both"}:
            return cls.parse(wish["both"])
        unknown = sorted(str(key) for key in set(wish) - set(PHASES))
        if unknown or not {"prefill", "decode"} <= set(wish):
            said = f"it has {', '.join(unknown)}" if unknown else f"it names only {', '.join(wish) or 'nothing'}"
            raise BudgetError(
                f"A budget by phase names prefill and decode (and verify, if it differs): {EXAMPLE}; {said}."
            )
        return cls(*(fraction(wish.get(phase, wish["decode"])) for phase in PHASES))

    def check(self, top_k: int, min_active: int = 1) -> Budget:
        """This budget if a model with this many slots a token can meet it, else an error that names the limit."""
        limit = largest(top_k, min_active)
        if max(self) > limit:
            raise BudgetError(
                f"A budget of {max(self):.1%} cannot be met: with {top_k} slots a token and {min_active} always kept, at most "
                f"{limit:.1%} can be skipped. Lower the budget or min_active."
            )
        return self

    def rounded(self) -> Budget:
        """In hundredths, so that many requests share one token class."""
        return Budget(*(round(value, 2) for value in self))

    @property
    def uniform(self) -> bool:
        return self.prefill == self.decode == self.verify

    @property
    def values(self) -> list[float]:
        """The different budgets above 0, rising: what a plan needs thresholds for."""
        return sorted({*self} - {0.0})

    def to_json(self) -> float | dict[str, float]:
        """One number, or one for each phase; `verify` only where it differs from `decode`."""
        if self.uniform:
            return self.decode
        return {phase: value for phase, value in self._asdict().items() if phase != "verify" or value != self.decode}

    def __str__(self) -> str:
        named = self.to_json()
        return "/".join(f"{value:.2f}" for value in (named.values() if isinstance(named, dict) else [named]))


BudgetLike = float | Mapping[str, float] | Budget
NONE = Budget(0.0, 0.0, 0.0)


def fraction(wish: Any) -> float:
    """One budget as a number, whatever the model: 0.3 of NumPy or torch in single precision is the 0.3 that was mapped."""
    try:
        if isinstance(wish, bool):  # which Python takes for a number
            raise TypeError
        value = float(wish) if isinstance(wish, (int, float)) else round(float(wish), 6)
    except (TypeError, ValueError, OverflowError):
        raise BudgetError(
            f"A budget is the fraction of routed slots to skip, such as 0.5; {wish!r:.60} is not a number."
        ) from None
    if not math.isfinite(value) or not 0 <= value < 1:
        raise BudgetError(
            f"A budget is a fraction from 0 to less than 1 of the routed slots, such as 0.5; not {wish!r:.60}."
        )
    return value


def check_budget(wish: Any, top_k: int, min_active: int = 1) -> float:
    """One budget as a number that the rule can meet, or an error that names the limit."""
    value = fraction(wish)
    return Budget(value, value, value).check(top_k, min_active).decode


def largest(top_k: int, min_active: int = 1) -> float:
    """The largest budget that leaves `min_active` slots."""
    return max(0, top_k - min_active) / top_k
