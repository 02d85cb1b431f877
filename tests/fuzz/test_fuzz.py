"""Every kept input, and a few hundred mutations of them; `python tests/fuzz/run.py TARGET --count N` runs as many as you like."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hypothesis import given, settings
from hypothesis import strategies as st
from mutate import mutated
from run import corpus, tried
from targets import TARGETS

CHEAP = {"plan": 200, "header": 60, "config": 15, "results": 100, "body": 200, "values": 300}


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs(name: str) -> None:
    """At least one of each is a good one: mutations of what is refused at once would show little."""
    assert any([tried(TARGETS[name], data)[0] for data in corpus(name)])


@pytest.mark.parametrize("name", TARGETS)
def test_mutations(name: str) -> None:
    seeds = corpus(name)

    @settings(max_examples=CHEAP[name])
    @given(number=st.integers(0, 2**32))
    def check(number: int) -> None:
        rng = random.Random(number)
        tried(TARGETS[name], mutated(rng.choice(seeds), rng))

    check()


@pytest.mark.slow
def test_kills() -> None:
    """As a process of its own: it forks."""
    command = [sys.executable, str(Path(__file__).with_name("kills.py")), "--count", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
