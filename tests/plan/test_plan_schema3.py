"""Schema 3: every bit of a file is under a checksum. Schemas 1 and 2 have none, and load as long as every key is known."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_cases import CODE, KEPT, curve, edited, entry, plan_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ace_moe import Plan
from ace_moe.errors import PlanError

OLDER = sorted(KEPT.glob("schema[12]-*.safetensors"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A plan with tables, a threshold and a curve."""
    plan = plan_of(entry(0.5, 0.2)).with_curve(curve([[0.0, 0.5, 1.0], [0.0, 0.5, 0.75]], CODE))
    return plan.save(tmp_path / "p.safetensors")


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def test_no_flipped_bit_loads(path: Path) -> None:
    """Length, header, padding, checksum or tensors: 1,000 of them, each alone; the undamaged file loads."""
    data, plan = path.read_bytes(), Plan.load(path)
    for bit in random.Random(0).sample(range(8 * len(data)), 1000):
        path.write_bytes(flipped(data, bit))
        with pytest.raises(PlanError):
            Plan.load(path)
    path.write_bytes(data)
    assert Plan.load(path) == plan


def test_the_first_bytes_decide_the_schema_and_none_of_their_bits_may_flip(path: Path) -> None:
    """One bit apart from "schema": 3 are 1 and 2, which need no checksum."""
    data = path.read_bytes()
    for bit in range(8 * 140):
        path.write_bytes(flipped(data, bit))
        with pytest.raises(PlanError):
            Plan.load(path)


def test_other_libraries_read_it(path: Path) -> None:
    plan, tensors = Plan.load(path), load_file(path)
    assert set(tensors) == {"curves.0", *(f"layers.{key}.{n}" for key, layer in plan.tables.items() for n in layer)}
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["ace"])["schema"] == 3


def test_a_digit_changed_by_hand(path: Path) -> None:
    """The threshold reads as another number, and everything else is as it was."""
    data = path.read_bytes()
    assert data.count(b'\\"threshold\\": 0.2') == 1
    path.write_bytes(data.replace(b'\\"threshold\\": 0.2', b'\\"threshold\\": 0.3'))
    with pytest.raises(PlanError, match=r"its checksum is of other contents.*ace plan MODEL -o"):
        Plan.load(path)


def test_saved_by_others_it_has_no_checksum(path: Path) -> None:
    """As a tool does that keeps metadata but not its order of keys."""
    with safe_open(path, "pt") as file:
        ace = json.loads(file.metadata()["ace"])
    for meta in ({**{k: v for k, v in ace.items() if k != "checksum"}}, dict(reversed(ace.items()))):
        save_file(load_file(path), path.with_name("q.safetensors"), metadata={"ace": json.dumps(meta)})
        with pytest.raises(PlanError, match="begins with its checksum"):
            Plan.load(path.with_name("q.safetensors"))


def test_a_plan_without_tables_comes_back(tmp_path: Path) -> None:
    from dataclasses import replace

    plan = plan_of(entry(0.5, 0.2))
    plan = replace(plan, tables={key: {} for key in plan.tables})
    assert Plan.load(plan.save(tmp_path / "p.safetensors")) == plan
    assert plan.layers == ["0", "1"] and plan.lacks(["gsp"]) == ["gsp"]


# ---- schemas 1 and 2 --------------------------------------------------------------------------------------------------


def changed(path: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    with safe_open(path, "pt") as file:
        ace = json.loads(file.metadata()["ace"])
    change(ace)
    save_file(load_file(path), to, metadata={"ace": json.dumps(ace)})
    return to


def test_older_files_are_there() -> None:
    assert {path.stem[:7] for path in OLDER} == {"schema1", "schema2"} and len(OLDER) == 7


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_older_files_load_and_are_written_as_schema_3(path: Path, tmp_path: Path) -> None:
    plan = Plan.load(path)
    again = plan.save(tmp_path / path.name)
    assert Plan.load(again) == plan and b'{\\"schema\\": 3,' in again.read_bytes()


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "change",
    [
        lambda ace: ace.update(colour="red"),
        lambda ace: ace.update(checksum="0" * 64),
        lambda ace: ace["fingerprint"].update(tokenizer="x"),
        lambda ace: next(iter(ace["fingerprint"]["structure"].values())).update(depth=1),
    ],
    ids=["metadata", "checksum", "fingerprint", "layer"],
)
def test_older_files_with_unknown_keys_are_refused(
    change: Callable[[dict[str, Any]], object], path: Path, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=r"has '(colour|checksum|tokenizer|depth)', which is not one of"):
        Plan.load(changed(path, tmp_path / path.name, change))


def test_unknown_keys_of_schema_3_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="metadata has 'colour', which is not one of"):
        Plan.load(edited(plan_of(), tmp_path / "p.safetensors", lambda ace: ace.update(colour="red")))
