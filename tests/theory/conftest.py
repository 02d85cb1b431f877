"""Experts for the propositions: random ones of any size, and those of the embedded model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ace_moe.checkpoint import MoELayer, MoEModel
from ace_moe.demo import MODEL

ROOT = Path(__file__).parents[2]
for folder in ("benchmarks", "tests/tables"):
    sys.path.insert(0, str(ROOT / folder))


@pytest.fixture(scope="session")
def trained() -> list[MoELayer]:
    return list(MoEModel.open(MODEL).layers())
