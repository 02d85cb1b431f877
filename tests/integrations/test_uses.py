"""Every way to use a model works with a plan as it does without, or is refused by name; docs/uses.md says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from uses import USES, Use, page, tried

from ace_moe.plan import Plan


@pytest.mark.parametrize("use", [pytest.param(u, id=u.name, marks=[pytest.mark.slow] * u.slow) for u in USES])
@pytest.mark.long
def test_use(use: Use, demo_plan: Plan) -> None:
    assert tried(use, demo_plan) == use.result


def test_the_page_is_what_is_tested() -> None:
    assert (Path(__file__).parents[2] / "docs" / "uses.md").read_text(encoding="utf-8") == page()
