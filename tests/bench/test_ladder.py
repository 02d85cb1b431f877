"""The ladder: the recipe is the same for every size, and its page says what the numbers say."""

from __future__ import annotations

import math
import sys
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import ladder
import ladder_page


def test_every_window_is_read_once_before_any_again() -> None:
    windows = np.arange(10, dtype=np.uint16)[:, None].repeat(3, 1)
    found = torch.cat(list(islice(ladder.batches(windows, 2, seed=0), 10)))[:, 0]
    assert all(sorted(part.tolist()) == list(range(10)) for part in found.split(10))
    assert not torch.equal(*found.split(10))


def test_the_rate_needs_no_end_until_it_falls() -> None:
    known, unknown = ([ladder.rate_at(step, end, 128) for step in range(900)] for end in (900, math.inf))
    assert known[:600] == unknown[:600] and known[-1] == pytest.approx(ladder.LAST * ladder.PEAK, rel=0.05)
    assert max(known) == ladder.PEAK and all(a >= b for a, b in pairwise(known[600:]))


def row(size: str, seed: int, tokens: int, kl: float, last: bool) -> dict[str, Any]:
    cells = [
        {
            "policy": p,
            "budget": b,
            "kl": {"value": kl},
            "agreement": {"value": 0.9},
            "perplexity_change": {"value": 0.1},
        }
        for p in ("auto", "paper")
        for b in ladder_page.BUDGETS
    ]
    return {"size": size, "seed": seed, "tokens": tokens, "last": last, "perplexity": {"value": 9.0}, "cells": cells}


@pytest.mark.parametrize(("large", "verdict"), [(0.05, "Cheaper"), (0.3, "Dearer"), (0.2, "Not clearly cheaper")])
def test_the_answer_follows_the_numbers(large: float, verdict: str) -> None:
    sizes = {"large": {"parameters": 8e6}, "small": {"parameters": 2e6}}
    small = [row("small", seed, 4_000_000, kl, True) for seed, kl in enumerate((0.1, 0.2, 0.3))]
    rows = [*small, row("large", 0, 1_000_000, 0.01, False), row("large", 0, 4_000_000, large, True)]
    said = ladder_page.answer({"sizes": sizes, "rows": rows})
    assert said.startswith(f"**{verdict} with size") and f"rises to {large / 0.01:.2f} times" in " ".join(said.split())


@pytest.mark.skipif(not ladder_page.RESULT.exists(), reason="the ladder's result is not stored")
def test_the_page_is_the_stored_result() -> None:
    from test_readme import chunks

    assert ladder_page.PAGE.read_text(encoding="utf-8") == ladder_page.page(), "python benchmarks/ladder_page.py"
    assert chunks(ladder_page.PICTURE)["Made from"] == ladder_page.made_from(), "python benchmarks/ladder_page.py"
