"""Shared by commands: usual values, budgets as typed, and checks before long work."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from ..errors import BudgetError, OptionError
from .terminal import note

SKIP = 0.3  # the budget where none is given
AUTO = "auto"  # the policy where none is given: policies.AUTO, which takes seconds to import
MOST_BUDGETS = 1000  # each takes passes of the model; a range this long has a step with a zero too many
MUCH = 0.4  # of the slots: published models break above it
LOST = (
    "above 40 % of the slots published models lose what users notice: Qwen3-30B-A3B under the paper's rule 4 points of "
    "LiveCodeBench at 40 %, 9 at 50 %, 23 at 60 %, and 1 at 20 %. See docs/choosing.md; --quiet ends this note"
)


def warn_of_loss(budgets: Iterable[float], quiet: bool) -> None:
    """Note once what a command that skips much will lose, where nothing brings slots back."""
    if not quiet and max(budgets, default=0.0) > MUCH:
        note(LOST)


def parse_budgets(text: str) -> list[float]:
    """ "0.1:0.6:0.1" (from : to : step) or "0.1,0.5"."""
    from ..budget import fraction

    try:
        if ":" not in text:
            return [fraction(float(part)) for part in text.split(",")]
        start, stop, step = (float(part) for part in text.split(":"))
        count = math.floor((stop - start) / step + 1e-6) + 1
        if not 1 <= count <= MOST_BUDGETS:
            raise ValueError
        return [fraction(round(start + i * step, 9)) for i in range(count)]
    except (ValueError, ArithmeticError):
        raise BudgetError(
            f"Budgets are fractions such as 0.5, 0.1,0.3 or 0.1:0.6:0.1 (from : to : step); {text!r} is not."
        ) from None


def reachable(text: str, usual: str, top_k: int, min_active: int = 1) -> list[float]:
    """Budgets as typed, each checked; of the usual ones, which nobody typed, those that the model has slots for."""
    from ..budget import check_budget, largest

    wanted, limit = parse_budgets(text), largest(top_k, min_active)
    if text == usual and 0 < limit < max(wanted):
        note(f"budgets above {limit:.1%} are left out: a token has {top_k} slots here and keeps {min_active}")
        wanted = [b for b in wanted if b <= limit]
    return [check_budget(b, top_k, min_active) for b in wanted]


def check_texts(texts: Iterable[Path], window: int, tokens: int | None, batch: int = 1) -> None:
    """Refuse texts and sizes that cannot serve, before gigabytes are loaded."""
    from ..text import check_sizes, read_text

    check_sizes(window, tokens, batch)
    for text in texts:
        read_text(text)


def check_plan(plan: Path | None, skip: float) -> None:
    """Without a plan nothing can be skipped."""
    if skip and plan is None:
        raise OptionError(f"Skipping {skip:.0%} needs a plan: give one with --plan, made by `ace plan`.")


def made_of(*files: Path | None) -> dict[str, str]:
    """The hashes of what went in, by name."""
    from ..files import hashes

    return hashes(path for path in files if path is not None)
