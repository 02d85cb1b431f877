"""The plan file and its thresholds: what is saved comes back, and a budget finds the right τ or none."""

from __future__ import annotations

import math
import os
import stat
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_moe import ACE
from ace_moe.errors import BudgetError, PlanError
from ace_moe.plan import Phase, Plan, Threshold, Workload
from ace_moe.policies import Ace, Share

SETTINGS = Ace().settings
NEWS, CODE = Workload("news.txt", "a" * 64, 1024), Workload("code.txt", "b" * 64, 2048)


def entry(
    budget: float,
    tau: float,
    workload: Workload = NEWS,
    phase: Phase = "both",
    of: dict[str, Any] = SETTINGS,
) -> Threshold:
    return Threshold(
        **of,
        budget=budget,
        threshold=tau,
        realised=budget,
        corrected=True,
        passes=2,
        workload=workload,
        phase=phase,
    )


def facts(experts: int, top_k: int = 4) -> dict[str, Any]:
    """One layer's part of a fingerprint."""
    return {"experts": experts, "top_k": top_k, "hidden": 16, "intermediate": 8, "router": f"same:{experts}x16"}


def plan_of(*thresholds: Threshold, layers: int = 2, experts: int = 8) -> Plan:
    tables = {str(n): {"gsp": torch.rand(experts), "rcr": torch.rand(experts)} for n in range(layers)}
    structure = {key: facts(experts) for key in tables}
    return Plan(tables, {"structure": structure, "content": "c" * 64}, "tiny", thresholds=thresholds)


def same(one: Plan, other: Plan) -> bool:
    """Equal to the bit, layer order included."""
    tables = list(one.tables) == list(other.tables) and all(
        set(layer) == set(other.tables[key]) and all(torch.equal(t, other.tables[key][n]) for n, t in layer.items())
        for key, layer in one.tables.items()
    )
    return tables and replace(one, tables={}) == replace(other, tables={})


# ---- round trip -------------------------------------------------------------------------------------------------

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
    phase=st.sampled_from(["both", "prefill", "decode"]),
)


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
        fingerprint={"structure": structure, "content": draw(TEXTS)},
        model=draw(TEXTS),
        undefined={name: draw(TEXTS) for name in missing},
        thresholds=tuple(draw(st.lists(THRESHOLDS, max_size=4))),
        other_weights=tuple(draw(st.lists(TEXTS, max_size=2))),
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
    assert same(plan, loaded)
    before = path.read_bytes()
    assert loaded.save(path).read_bytes() == before
    assert [p.name for p in folder.iterdir()] == ["plan.safetensors"]


def test_layers_keep_their_order(tmp_path: Path) -> None:
    """The file sorts names as text (10 before 2); a person reads layers in the model's order."""
    loaded = Plan.load(plan_of(layers=12).save(tmp_path / "p.safetensors"))
    assert list(loaded.tables) == [str(n) for n in range(12)]


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


# ---- look-up ----------------------------------------------------------------------------------------------------


@given(thresholds=st.lists(st.tuples(st.integers(1, 99), NUMBERS), min_size=1, max_size=8, unique_by=lambda t: t[0]))
def test_exact_look_up(thresholds: list[tuple[int, float]]) -> None:
    """A mapped budget gives its own τ and no notice, also when it comes out of arithmetic."""
    plan = plan_of(*(entry(percent / 100, tau) for percent, tau in thresholds))
    for percent, tau in thresholds:
        assert plan.threshold(SETTINGS, percent / 100) == (tau, None)
        assert plan.threshold(SETTINGS, percent * 0.01) == (tau, None)


@pytest.mark.parametrize(
    "other",
    [
        Ace(gain="kept").settings,
        Ace(min_active=2).settings,
        Ace(min_mass=0.1).settings,
        Ace(fusion="min").settings,
        Share().settings,
    ],
)
def test_look_up_is_exact_on_settings(other: dict[str, Any]) -> None:
    """A τ mapped under other settings realises another ratio, so it is not used; the error names what to run."""
    plan = plan_of(entry(0.5, 0.2), entry(0.3, 0.1, of=other))
    assert plan.threshold(other, 0.3) == (0.1, None)
    with pytest.raises(BudgetError, match=r"it has 30% for these settings.*`ace budget.*--budgets 0\.5`"):
        plan.threshold(other, 0.5)


@given(share=st.floats(0.01, 0.99))
def test_interpolation_is_noted(share: float) -> None:
    """Between two mapped budgets τ is linear, and the notice names both ends."""
    plan = plan_of(entry(0.2, 0.1), entry(0.6, 0.3))
    tau, notice = plan.threshold(SETTINGS, 0.2 + share * 0.4)
    assert math.isclose(tau, 0.1 + share * 0.2, rel_tol=1e-9)
    assert notice is not None
    assert "20%" in notice
    assert "60%" in notice
    assert f"{tau:.6f}" in notice


def test_interpolation_starts_at_zero() -> None:
    """Budget 0 is τ = 0 without an entry, so a budget under the smallest mapped one is between two."""
    tau, notice = plan_of(entry(0.4, 0.2)).threshold(SETTINGS, 0.1)
    assert tau == pytest.approx(0.05)
    assert notice is not None
    assert "between 0% and 40%" in notice


def test_nothing_is_extrapolated() -> None:
    """Above the largest mapped budget τ is unknown; the error lists what there is."""
    with pytest.raises(BudgetError, match=r"50\.0%.*it has 20%, 40% for these settings.*ace budget"):
        plan_of(entry(0.2, 0.1), entry(0.4, 0.2)).threshold(SETTINGS, 0.5)


@pytest.mark.parametrize("phase", ["both", "prefill", "decode"])
def test_budget_zero_needs_no_entry(phase: Phase) -> None:
    assert plan_of().threshold(SETTINGS, 0.0, phase) == (0.0, None)
    assert ACE(plan_of(), 0).realised == 0


# ---- workloads --------------------------------------------------------------------------------------------------


def test_newest_workload_wins_unless_named() -> None:
    """Two texts, one budget: the last mapped, or the one asked for."""
    plan = plan_of().with_thresholds([entry(0.5, 0.2, CODE)]).with_thresholds([entry(0.5, 0.3, NEWS)])
    assert plan.threshold(SETTINGS, 0.5)[0] == 0.3
    assert plan.threshold(SETTINGS, 0.5, workload="code.txt")[0] == 0.2
    again = plan.with_thresholds([entry(0.5, 0.21, CODE)])
    assert again.threshold(SETTINGS, 0.5)[0] == 0.21


def test_workloads_are_not_mixed() -> None:
    """Interpolating between thresholds of two texts would promise a ratio neither has."""
    plan = plan_of(entry(0.2, 0.1, CODE), entry(0.6, 0.5, CODE), entry(0.4, 0.2, NEWS))
    tau, notice = plan.threshold(SETTINGS, 0.2)
    assert tau == pytest.approx(0.1)
    assert notice is not None
    with pytest.raises(BudgetError, match="it has 40%"):
        plan.threshold(SETTINGS, 0.6)


def test_unknown_workload_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"on workload 'poems\.txt': it has none.*ace budget"):
        plan_of(entry(0.5, 0.2)).threshold(SETTINGS, 0.5, workload="poems.txt")


def test_same_entry_is_replaced() -> None:
    """Settings, budget, phase and text make an entry; mapping it again leaves one, the newest, at the end."""
    plan = plan_of(entry(0.5, 0.2), entry(0.3, 0.1)).with_thresholds([entry(0.5, 0.25)])
    assert plan.thresholds == (entry(0.3, 0.1), entry(0.5, 0.25))


@pytest.mark.parametrize(
    "other",
    [
        entry(0.4, 0.25),
        entry(0.5, 0.25, CODE),
        entry(0.5, 0.25, phase="decode"),
        entry(0.5, 0.25, of=Ace(gain="kept").settings),
        entry(0.5, 0.25, Workload("news.txt", "f" * 64, 1024)),
    ],
    ids=["budget", "workload", "phase", "settings", "content of the same file name"],
)
def test_other_entries_are_kept(other: Threshold) -> None:
    plan = plan_of(entry(0.5, 0.2)).with_thresholds([other])
    assert plan.thresholds == (entry(0.5, 0.2), other)


# ---- phases -----------------------------------------------------------------------------------------------------


def test_phases_have_their_own_thresholds() -> None:
    """An entry for one phase serves that phase alone; an entry for both serves each."""
    plan = plan_of(entry(0.5, 0.2, phase="prefill"), entry(0.5, 0.3, phase="decode"))
    assert plan.threshold(SETTINGS, 0.5, "prefill")[0] == 0.2
    assert plan.threshold(SETTINGS, 0.5, "decode")[0] == 0.3
    with pytest.raises(BudgetError, match="no threshold"):
        plan.threshold(SETTINGS, 0.5, "both")
    assert plan_of(entry(0.5, 0.4)).threshold(SETTINGS, 0.5, "decode")[0] == 0.4


def test_ace_takes_a_budget_per_phase() -> None:
    """Prefill and decode may skip differently; a phase that is not named skips nothing."""
    plan = plan_of(entry(0.5, 0.2), entry(0.25, 0.1))
    assert ACE(plan, 0.5)._thresholds.tolist() == pytest.approx([0.2, 0.2])
    assert ACE(plan, {"prefill": 0.5, "decode": 0.25})._thresholds.tolist() == pytest.approx([0.2, 0.1])
    assert ACE(plan, {"decode": 0.25})._thresholds.tolist() == pytest.approx([0.0, 0.1])
    with pytest.raises(BudgetError, match="prefill and decode"):
        ACE(plan, {"warmup": 0.5})


def test_ace_passes_the_notice_on() -> None:
    with pytest.warns(UserWarning, match="interpolated"):
        ACE(plan_of(entry(0.5, 0.2)), 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ACE(plan_of(entry(0.5, 0.2)), 0.5)


# ---- the model a plan belongs to --------------------------------------------------------------------------------


def test_plan_fits_its_own_model() -> None:
    plan = plan_of()
    assert plan.check_model(plan.fingerprint) is plan


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"experts": 16}, "layer 1 has experts 8 in the plan, 16 in the model"),
        ({"top_k": 2}, "layer 1 has top_k 4 in the plan, 2 in the model"),
        ({"router": "same:8x32"}, "router"),
    ],
)
def test_another_structure_is_named(change: dict[str, Any], said: str) -> None:
    plan = plan_of()
    structure = plan.fingerprint["structure"]
    other = {**structure, "1": {**structure["1"], **change}}
    with pytest.raises(PlanError, match=said):
        plan.check_model({**plan.fingerprint, "structure": other}, allow_other_weights=True)


def test_other_layers_are_named() -> None:
    with pytest.raises(PlanError, match=r"0–1 \(2\) in the plan, 0–2 \(3\) in the model.*ace tables"):
        plan_of().check_model(plan_of(layers=3).fingerprint, allow_other_weights=True)


def test_other_weights_once_allowed_are_recorded(tmp_path: Path) -> None:
    """A quantised copy is accepted on request, remembered in the file, and needs no request again."""
    plan, copy = plan_of(), {**plan_of().fingerprint, "content": "d" * 64}
    with pytest.raises(PlanError, match=r"other router weights.*allow_other_weights"):
        plan.check_model(copy)
    taken = plan.check_model(copy, allow_other_weights=True)
    loaded = Plan.load(taken.save(tmp_path / "p.safetensors"))
    assert loaded.other_weights == ("d" * 64,)
    assert loaded.check_model(copy) is loaded
    assert loaded.check_model(plan.fingerprint) is loaded
