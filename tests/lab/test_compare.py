"""The grid: what is typed, what is measured, what survives a kill."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import OptionError, PolicyError, ResultError
from ace_moe.files import file_hash
from ace_moe.lab.compare.cells import compare
from ace_moe.lab.compare.grid import FIRST, Grid, first_methods, parse_gains, parse_methods, written
from ace_moe.lab.compare.subject import Subject
from ace_moe.lab.compare.verdict import against, losses_of
from ace_moe.lab.policies import LAB_POLICIES
from ace_moe.lab.store import read_results
from ace_moe.plan import Plan
from ace_moe.policies import POLICIES, make
from ace_moe.policies import parse as parse_method
from ace_moe.provenance import provenance
from ace_moe.provenance import read as read_record
from ace_moe.text import Windows, windows_of
from command import run_ace

FACTS: dict[str, Any] = {"model": {"name": "demo"}}
SMALL = ("--text", TEXT, "--tokens", 512, "--window", 128)


def grid(methods: str = "share,ace", budgets: tuple[float, ...] = (0.3, 0.5), gains: str = "kept,power") -> Grid:
    return Grid(parse_methods(methods), budgets, parse_gains(gains), {})


@pytest.fixture
def tiny(subject: Subject) -> Subject:
    """Two of them."""
    return replace(subject, windows=replace(subject.windows, ids=subject.windows.ids[:2]))


@pytest.fixture
def subject(demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows) -> Subject:
    """Eight windows of 64 tokens."""
    return Subject(demo_model, demo_plan, replace(demo_windows, ids=demo_windows.ids[:, :128].reshape(8, 64)))


# ---- as typed -----------------------------------------------------------------------------------------------------


def test_methods_as_typed() -> None:
    """All, some, with settings; a variant's colon belongs to its name."""
    assert parse_methods("all") == (*POLICIES, *LAB_POLICIES)
    assert parse_methods(" share, ace:fusion=min ,share") == ("share", "ace:fusion=min")
    assert parse_method("ace:fusion=min:min_active=2") == ("ace", {"fusion": "min", "min_active": 2})
    assert parse_method("naee:ace-paper") == ("naee:ace-paper", {})
    assert grid("ace:fusion=mean").policy("ace:fusion=mean", "none").settings["params"] == {"fusion": "mean"}
    assert grid("paper", gains="cited").policy("paper", "cited").gain == "kept"


def test_pairs_skip_equally_where_one_knows_steps_alone() -> None:
    """`fixed` at its steps, the others there too; budgets that are named are left as they are."""
    made = grid("fixed,share", (0.1, 0.6), "kept,power").stepped(8)
    at = {m: [k.budget for k in made if (k.method, k.gain) == (m, "power")] for m in made.methods}
    assert at == {"fixed": [0.25, 0.375, 0.5], "share": [0.1, 0.25, 0.375, 0.5, 0.6]}
    assert grid("share,ace", (0.1, 0.6)).stepped(8) == grid("share,ace", (0.1, 0.6))


def test_a_gain_that_belongs_to_a_method_is_its_only_one() -> None:
    made = grid("share,paper,top_p:gain=none", (0.5,), "kept,power")
    gains = {m: [k.gain for k in made if k.method == m] for m in made.methods}
    assert gains == {"share": ["kept", "power"], "paper": ["kept"], "top_p:gain=none": ["none"]}
    assert made.policy("paper", "kept").gain == "kept" and made.policy("top_p:gain=none", "none").gain == "none"


def test_where_nothing_is_named_the_rivals_and_the_plans_own_choice_are(demo_plan: Plan) -> None:
    own = make("share", squared=True, min_active=2, gain="none")
    assert first_methods(demo_plan) == FIRST == tuple(dict.fromkeys(FIRST))
    plan = replace(demo_plan, recommendation={"settings": own.settings})
    *first, last = first_methods(plan)
    assert tuple(first) == FIRST and last == written(own.settings)
    name, params = parse_method(last)
    assert make(name, **params) == own and grid(last).policy(last, "none") == own


@pytest.mark.parametrize("text", ["", " , ", "nonsense", "share:fusion=min", "ace:fusion=most"])
def test_methods_that_are_none(text: str) -> None:
    with pytest.raises((OptionError, PolicyError)):
        parse_methods(text)


@pytest.mark.parametrize("text", ["", "loud", "kept,loud"])
def test_gains_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="kept, none, power"):
        parse_gains(text)


@pytest.mark.long
def test_the_command_compares_the_first_rivals(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    small = ("--text", TEXT, "--tokens", 128, "--window", 64)
    ran = run_ace("compare", MODEL, *small, "--gains", "power", "--no-correct", "-o", path)
    assert ran.code == 0 and "37.5%" in ran.out, ran.err
    results = read_results(path, "compare")
    assert results["grid"]["methods"] == list(FIRST) and results["grid"]["gains"] == ["power", "kept"]
    ratios = {(c["method"], c["budget"]): c["realised"] for c in results["cells"]}
    for step in (0.25, 0.375, 0.5):
        assert all((m, step) in ratios for m in FIRST) and ratios["fixed", step] == step


# ---- what a cell holds --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_cells_hold_what_was_measured(subject: Subject, tmp_path: Path) -> None:
    """Budgets met, intervals around their value, statistics that follow from the stored losses, ratios by expert once."""
    path = tmp_path / "results.json"
    results = compare(subject, grid(), path, FACTS)
    assert results == json.loads(path.read_text())
    cells = {(c["method"], c["gain"], c["budget"]): c for c in results["cells"]}
    assert set(cells) == {(m, g, b) for m in ("share", "ace") for g in ("kept", "power") for b in (0.3, 0.5)}
    for cell in cells.values():
        assert abs(cell["realised"] - cell["budget"]) < 0.003
        assert cell["perplexity"] == losses_of(cell).perplexity
        assert cell["interval"][0] < cell["perplexity"] < cell["interval"][1]
        assert cell["change"]["value"] == pytest.approx(cell["perplexity"] / results["dense"]["perplexity"] - 1)
        assert set(cell["layers"]) == set("012345")
        assert ("experts" in cell) == (cell["budget"] == 0.5)
    assert cells["ace", "power", 0.5]["perplexity"] < cells["ace", "kept", 0.5]["perplexity"]
    assert set(results["tables"]["0"]) == {"gsp", "rcr"} == set(results["oracle"]["0"])


@pytest.mark.long
def test_nothing_is_measured_twice(subject: Subject, tmp_path: Path) -> None:
    """The same grid again touches nothing; a larger one adds its cells and keeps the others as they are."""
    path = tmp_path / "results.json"
    first = compare(subject, grid("share", (0.5,), "power"), path, FACTS)
    assert compare(subject, grid("share", (0.5,), "power"), path, FACTS) == first
    more = compare(subject, grid("share,gsp", (0.5,), "power,none"), path, FACTS)
    assert more["cells"][0] == first["cells"][0]
    assert len(more["cells"]) == 4
    assert more["grid"] == {"methods": ["share", "gsp"], "budgets": [0.5], "gains": ["power", "none"]}


def without_clock(cell: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in cell.items() if name not in ("seconds", "run")}


@pytest.mark.slow
def test_a_cell_depends_on_its_own_settings_alone(subject: Subject, tmp_path: Path) -> None:
    """Each cell of a grid equals the cell alone to the bit: by quantile, by search and in steps."""
    whole = grid("share,alloc_t,fixed", (0.3, 0.5), "kept,power")
    cells = compare(subject, whole, tmp_path / "whole.json", FACTS)["cells"]
    assert len(cells) == 12
    for number, cell in enumerate(cells):
        one = grid(cell["method"], (cell["budget"],), cell["gain"])
        (alone,) = compare(subject, one, tmp_path / f"{number}.json", FACTS)["cells"]
        assert without_clock(alone) == without_clock(cell)


def test_a_cell_does_not_depend_on_the_other_gain(tiny: Subject, tmp_path: Path) -> None:
    """τ was once taken over from the first gain."""
    both = compare(tiny, grid("share", (0.6,), "kept,power"), tmp_path / "both.json", FACTS)["cells"]
    (alone,) = compare(tiny, grid("share", (0.6,), "power"), tmp_path / "alone.json", FACTS)["cells"]
    assert without_clock(both[1]) == without_clock(alone)


def test_a_method_that_cannot_is_named_and_the_others_go_on(subject: Subject, tmp_path: Path) -> None:
    """80 % of 8 slots can be skipped, 95 % cannot; re-selection skips nothing at all."""
    results = compare(subject, grid("xshare,share", (0.5, 0.95), "power"), tmp_path / "results.json", FACTS)
    assert [(c["method"], c["budget"]) for c in results["cells"]] == [("share", 0.5)]
    assert results["refused"]["share"]["budgets"] == [0.95]
    assert results["refused"]["xshare"]["budgets"] == [0.5, 0.95]
    assert "at most 0.0%" in results["refused"]["xshare"]["reason"]


def test_settings_a_method_cannot_have_refuse_it_alone(subject: Subject, tmp_path: Path) -> None:
    """A rule without safeguards cannot be given one; the others can."""
    made = Grid(parse_methods("modes:ace-paper,share"), (0.5,), ("power",), {"min_active": 2})
    results = compare(subject, made, tmp_path / "results.json", FACTS)
    assert [c["method"] for c in results["cells"]] == ["share"]
    assert "no safeguards" in results["refused"]["modes:ace-paper"]["reason"]


@pytest.mark.long
def test_paired_rivals(subject: Subject, tmp_path: Path) -> None:
    """Against a rival at the same budget and gain; the rival itself is left out."""
    results = compare(subject, grid("share,random", (0.5,), "power"), tmp_path / "results.json", FACTS)
    (row,) = against(results, "share")
    assert (row["method"], row["rival"]) == ("random", "share")
    assert row["value"] > 0
    with pytest.raises(OptionError, match="share, random"):
        against(results, "gsp")


# ---- the file -----------------------------------------------------------------------------------------------------


def changed_experts(model: PreTrainedModel) -> PreTrainedModel:
    """The same routers over other experts."""
    other = copy.deepcopy(model)
    for name, parameter in other.named_parameters():
        if name.endswith("down_proj"):
            parameter.data.mul_(0.2)
    return other


@pytest.mark.long
def test_results_of_two_measurements_cannot_mix(subject: Subject, tmp_path: Path) -> None:
    """Another model's experts, text, window, precision, batch, safeguards: each refused by its name."""
    path, one = tmp_path / "results.json", grid("share", (0.5,), "power")
    compare(subject, one, path, FACTS)
    before, windows = path.read_bytes(), subject.windows
    others = {
        "experts": (replace(subject, model=changed_experts(subject.model)), one),
        "dtype": (replace(subject, model=copy.deepcopy(subject.model).half()), one),
        "text": (replace(subject, windows=windows_of(windows.ids + 1, "other")), one),
        "window": (replace(subject, windows=replace(windows, ids=windows.ids.reshape(4, 128))), one),
        "batch": (replace(subject, batch=2), one),
        "safeguards": (subject, replace(one, safeguards={"min_active": 2})),
    }
    for name, (other, wanted) in others.items():
        with pytest.raises(ResultError, match=rf"another measurement: {name} is"):
            compare(other, wanted, path, FACTS)
    results = json.loads(before)
    assert {"model", "experts", "dtype", "device", "protocol", "text", "window", "batch"} <= set(results["identity"])
    for name in ("protocol", "device"):
        path.write_text(json.dumps({**results, "identity": {**results["identity"], name: "other"}}))
        with pytest.raises(ResultError, match=f"{name} is 'other' there"):
            compare(subject, one, path, FACTS)
    del results["identity"]["experts"]
    path.write_text(json.dumps(results))
    with pytest.raises(ResultError, match="experts is 'unknown' there"):
        compare(subject, one, path, FACTS)


def test_cells_say_which_run_made_them(tiny: Subject, tmp_path: Path) -> None:
    """Other versions are a notice, and the cells of each run are told apart."""
    path = tmp_path / "results.json"
    made = provenance(argv=["ace", "compare"])
    older = {**made, "libraries": {**made["libraries"], "torch": "1.0"}}
    compare(tiny, grid("share", (0.5,), "power"), path, {**FACTS, "provenance": older})
    with pytest.warns(UserWarning, match=r"torch 1\.0 then and"):
        results = compare(tiny, grid("share", (0.5,), "power,none"), path, {**FACTS, "provenance": made})
    assert [c["run"] for c in results["cells"]] == [0, 1]
    assert [run["libraries"]["torch"] for run in results["runs"]] == ["1.0", made["libraries"]["torch"]]


def test_nothing_measured_is_no_result(tmp_path: Path) -> None:
    options = ("--methods", "share", "--budgets", "0.95", "--gains", "power", "-o", tmp_path / "r.json", *SMALL)
    ran = run_ace("compare", MODEL, *options)
    assert ran.code == 1 and "Nothing was measured" in ran.err and "at most 87.5%" in ran.err.replace("\n", " ")
    assert "ace report" not in ran.out


def cells_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cells"] if path.exists() else []


KILLED = """
import json, os, signal, sys
from ace_moe import files

count, replace = int(sys.argv.pop(1)), os.replace

def replace_and_die(source, target):
    cells = len(json.loads(open(source).read()).get("cells", ()))
    if cells == count + 1:  # in the middle of writing one more
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

files.os.replace = replace_and_die
from ace_moe.cli import main
main()
"""


def kill_after(count: int, arguments: list[str], path: Path) -> list[dict[str, Any]]:
    """The command in a process that is killed the hard way while it writes the cell after `count`; the cells it left."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(count), *arguments], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return cells_of(path)


@pytest.mark.long
def test_killed_twice_and_finished(tmp_path: Path) -> None:
    """A real process, killed while it measures: finished cells stay to the byte, the rest comes, none twice."""
    path = tmp_path / "results.json"
    grid = ("--methods", "share,gsp,alloc_t", "--budgets", "0.4,0.6", "--gains", "kept,power")
    options = [*grid, "-o", path, "--text", TEXT, "--tokens", 256, "--window", 128]
    command = [str(a) for a in ("compare", MODEL, *options)]
    first, second = kill_after(2, command, path), kill_after(5, command, path)
    assert second[: len(first)] == first
    assert (len(first), len(second)) == (2, 5)
    done = run_ace("compare", MODEL, *options, "--json").json
    assert len(done["cells"]) == 12
    cells = cells_of(path)
    assert cells[: len(second)] == second
    keys = [(c["method"], c["gain"], c["budget"]) for c in cells]
    assert len(set(keys)) == len(keys) == 12
    leftovers = [p.name for p in tmp_path.iterdir() if p.name != "results.json"]
    assert all(name.startswith(".results.json.") for name in leftovers)  # what a kill inside a write can leave


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_compare_prints_tables(tmp_path: Path) -> None:
    """One table a gain, methods down and budgets across, and paired differences if a rival is named."""
    path = tmp_path / "results.json"
    options = ("--methods", "share,ace", "--budgets", "0.5", "--gains", "power", "--rival", "share", "-o", path, *SMALL)
    ran = run_ace("compare", MODEL, *options)
    assert ran.code == 0, ran.err
    cell = next(c for c in cells_of(path) if c["method"] == "ace")
    assert f"{cell['perplexity']:.2f}" in ran.out
    assert "perplexity against share" in ran.out and "ace report" in ran.out
    facts = json.loads(path.read_text())
    assert facts["model"]["architecture"] == "Qwen3MoeForCausalLM"
    assert facts["workload"]["windows"] == 4 and facts["workload"]["window"] == 128
    record = read_record(facts)
    assert record["command"].startswith("ace compare demo-moe --methods") and str(path) not in record["command"]
    assert record["inputs"][TEXT.name] == file_hash(TEXT) and record["device"] == "cpu"


def test_compare_refuses_before_it_loads(tmp_path: Path) -> None:
    for options in (
        ("--methods", "nonsense"),
        ("--gains", "loud"),
        ("--budgets", "half"),
        ("-o", tmp_path / "a" / "b"),
    ):
        ran = run_ace("compare", "no-such-model", *SMALL, *options)
        assert ran.code == 1
        assert "no-such-model" not in ran.err


@pytest.mark.long
def test_calibrated_methods_use_text_that_is_not_measured(tmp_path: Path) -> None:
    """By default what follows the measured tokens; a text that ends there gives a note."""
    words = TEXT.read_text(encoding="utf-8")
    short = tmp_path / "short.txt"
    short.write_text(words[:1200], encoding="utf-8")
    options = ("--methods", "naee", "--budgets", "0.5", "--gains", "cited", "--window", 128, "--json")
    ran = run_ace("compare", MODEL, "--text", TEXT, "--tokens", 256, "-o", tmp_path / "long.json", *options)
    assert len(ran.json["cells"]) == 1 and "--calibration" not in ran.err
    ran = run_ace("compare", MODEL, "--text", short, "--tokens", 256, "-o", tmp_path / "short.json", *options)
    assert len(ran.json["cells"]) == 1 and "--calibration" in ran.err
