"""The plan file: what is saved comes back, to the bit; a file is replaced in one step."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import curve, entry, facts, plan_of

from ace_moe.plan import Fingerprint, Plan, Routers, Sample, Threshold, Workload

NUMBERS = st.floats(0, 1, allow_nan=False)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
NAMES = st.sampled_from(["mlp", "experts", "feed_forward", "block_sparse_moe", "layers", "gsp", "3"])
KEYS = st.one_of(
    st.integers(0, 200).map(str),
    st.integers(0, 99).map(lambda n: f"decoder.layers.{n}.mlp.experts"),
    st.lists(NAMES, min_size=2, max_size=5).map(".".join),
)
PARAMS = st.dictionaries(TEXTS, st.one_of(NUMBERS, st.integers(-9, 9), st.booleans(), TEXTS), max_size=3)
WORKLOADS = st.builds(Workload, name=TEXTS, sha256=TEXTS, tokens=st.integers(0, 1 << 40))
THRESHOLDS = st.builds(
    Threshold,
    policy=TEXTS,
    params=PARAMS,
    gain=st.sampled_from(["power", "kept", "none"]),
    min_active=st.integers(1, 8),
    min_mass=NUMBERS,
    budget=NUMBERS,
    threshold=NUMBERS,
    realised=NUMBERS,
    corrected=st.booleans(),
    passes=st.integers(0, 9),
    workload=WORKLOADS,
    phase=st.sampled_from(["both", "prefill", "decode", "verify"]),
)
ROUTERS = st.builds(Routers, exact=TEXTS, coarse=st.one_of(st.none(), TEXTS))
SAMPLES = st.builds(Sample, rms=st.lists(NUMBERS, max_size=2).map(tuple), sample=TEXTS)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    keys = draw(st.lists(KEYS, min_size=1, max_size=14, unique=True))
    experts = {key: draw(st.integers(1, 6)) for key in keys}
    missing = draw(st.sampled_from([(), ("gsp",), ("rcr",)]))
    values = st.floats(0, 2.0**100, width=32, allow_nan=False)
    tables = {
        key: {
            name: torch.tensor(draw(st.lists(values, min_size=n, max_size=n)))
            for name in ("gsp", "rcr")
            if name not in missing
        }
        for key, n in experts.items()
    }
    structure = {key: facts(n, top_k=draw(st.integers(1, n))) for key, n in experts.items()}
    return Plan(
        tables=tables,
        fingerprint=Fingerprint(structure, draw(ROUTERS), draw(st.dictionaries(st.sampled_from(keys), SAMPLES))),
        model=draw(TEXTS),
        undefined={name: draw(TEXTS) for name in missing},
        thresholds=tuple(draw(st.lists(THRESHOLDS, max_size=4))),
        other_weights=tuple(draw(st.lists(TEXTS, max_size=2))),
        recommendation=draw(st.one_of(st.none(), st.fixed_dictionaries({"settings": PARAMS}))),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@given(plan=plans())
@settings(max_examples=120)
def test_what_is_saved_comes_back(folder: Path, plan: Plan) -> None:
    """Any keys, numbered or paths, any values: equal to the bit, and a second save writes the same bytes."""
    path = plan.save(folder / "plan.safetensors")
    loaded = Plan.load(path)
    assert loaded == plan
    assert [list(p.tables) for p in (plan, loaded)] == [list(plan.fingerprint.structure)] * 2
    before = path.read_bytes()
    assert loaded.save(path).read_bytes() == before
    assert [p.name for p in folder.iterdir()] == ["plan.safetensors"]


def test_layers_keep_their_order(tmp_path: Path) -> None:
    """The file sorts names as text (10 before 2); a person reads layers in the model's order."""
    loaded = Plan.load(plan_of(layers=12).save(tmp_path / "p.safetensors"))
    assert list(loaded.tables) == [str(n) for n in range(12)]


def test_layers_may_share_a_table(tmp_path: Path) -> None:
    """One tensor under two names is written twice."""
    plan, one = plan_of(), torch.ones(8)
    plan = plan.with_tables({key: {"aimer": one} for key in plan.tables})
    assert Plan.load(plan.save(tmp_path / "p.safetensors")) == plan


def test_saved_file_is_readable_by_others(tmp_path: Path) -> None:
    """The temporary file is private; the plan is not."""
    path = plan_of().save(tmp_path / "p.safetensors")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    plan_of().save("~/p.safetensors")
    assert (tmp_path / "p.safetensors").is_file()
    assert Plan.load("~/p.safetensors").model == "tiny"


def test_save_replaces_in_one_step(tmp_path: Path) -> None:
    """A reader that has the old file open keeps reading the old plan: the new one is another file."""
    path = plan_of().save(tmp_path / "p.safetensors")
    old = path.read_bytes()
    with path.open("rb") as reader:
        plan_of(entry(0.5, 0.1)).save(path)
        assert os.fstat(reader.fileno()).st_ino != path.stat().st_ino
        assert reader.read() == old
    assert Plan.load(path).thresholds == (entry(0.5, 0.1),)


# ---- equality ---------------------------------------------------------------------------------------------------


def test_plans_are_compared_by_value() -> None:
    plan = plan_of(entry(0.5, 0.1))
    copy = replace(plan, tables={key: {n: t.clone() for n, t in layer.items()} for key, layer in plan.tables.items()})
    assert plan == copy
    assert plan != "a plan"
    copy.tables["1"]["rcr"][3] += 1
    assert plan != copy


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"thresholds": (entry(0.5, 0.2),)},
        {"fingerprint": Fingerprint({"0": facts(8)}, Routers("c" * 64))},
        {"tables": {}},
        {"curves": (curve([[0, 1], [0, 0.5]]),)},
        {"default_workload": "a" * 64},
        {"guarded": {"factor_branch": ("0",)}},
        {"recommendation": {"settings": {}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_part_makes_another_plan(change: dict[str, object]) -> None:
    plan = plan_of(entry(0.5, 0.1))
    assert plan != replace(plan, **change)  # type: ignore[arg-type]
