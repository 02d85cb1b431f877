"""The plan of a model that was given none: kept, found again, made again where it is damaged, and not kept for ever."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ace_moe import Plan, build_plan
from ace_moe.demo import MODEL
from ace_moe.plan import update
from ace_moe.tables import build


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(said: list[str]) -> Plan:
    return build.automatic_plan(MODEL, say=said.append)


def plans(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.safetensors"))


def test_kept_and_found_again(cache: Path) -> None:
    said: list[str] = []
    assert made(said) == made(said) == Plan.load(plans(cache)[0])
    assert ["keeping one" in said[0], "made earlier" in said[1], len(said)] == [True, True, 2]


def test_tables_come_when_a_policy_needs_them(cache: Path) -> None:
    """Into the plan that is kept, once, beside what others wrote into it."""
    said: list[str] = []
    bare = made(said)
    assert bare.lacks(["gsp", "rcr"]) == ["gsp", "rcr"]
    (path,) = plans(cache)
    update(path, bare, replace(bare, other_weights=("a" * 64,)))
    full = build.automatic_plan(MODEL, ("gsp", "rcr"), said.append)
    assert not full.lacks(["gsp", "rcr"]) and full.other_weights == ("a" * 64,)
    assert full == Plan.load(path) == build.automatic_plan(MODEL, ("rcr",), said.append) == made(said)
    assert sum("computing" in line for line in said) == 1
    assert replace(full, other_weights=()) == build_plan(MODEL, ("gsp", "rcr"))


def test_one_that_starts_with_tables(cache: Path) -> None:
    assert build.automatic_plan(MODEL, ("gsp",), [].append) == build_plan(MODEL, ("gsp",)) == made([])


@pytest.mark.parametrize("damage", [b"", b"junk", None], ids=["empty", "junk", "cut"])
def test_damaged_one_is_made_again(damage: bytes | None, cache: Path) -> None:
    said: list[str] = []
    whole = made(said)
    (path,) = plans(cache)
    path.write_bytes(path.read_bytes()[:-5] if damage is None else damage)
    assert made(said) == whole == Plan.load(path)
    assert any("cannot be used and is made again" in line for line in said)


def test_the_oldest_are_forgotten(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MOST_KEPT", 3)
    cache.mkdir()
    for age in range(1, 6):
        old = cache / f"older-{age}.safetensors"
        old.write_bytes(b"x")
        Path(f"{old}.lock").touch()
        os.utime(old, (1_000_000 - age, 1_000_000 - age))
    made([])
    assert [p.name for p in plans(cache) if p.name.startswith("older-")] == [
        "older-1.safetensors",
        "older-2.safetensors",
    ]
    assert len(plans(cache)) == 3 and len(list(cache.glob("older-*.lock"))) == 2
