"""The command as a user meets it: the four steps on the embedded model, and text that can be seen."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console

from ace_moe import ACE
from ace_moe.cli import show
from ace_moe.cli.show_written import print_pair
from ace_moe.demo import MODEL, TEXT
from ace_moe.mapping import texts
from ace_moe.plan import Plan
from ace_moe.writing import Pair, Written
from command import COMMANDS, run_ace

PASS = ("--tokens", 1024, "--window", 256)  # a text pass of a fraction of a second


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ace plan --tables`, then `ace budget` for 30 % and 50 %. Tests that write take a copy."""
    path = tmp_path_factory.mktemp("plan") / "plan.safetensors"
    assert run_ace("plan", MODEL, "--tables", "-o", path).code == 0
    options = ("--budgets", "0.3,0.5", "--policy", "ace")  # what comes after takes the policy from the plan
    assert run_ace("plan", MODEL, "-p", path, "--text", TEXT, *PASS, *options).code == 0
    return path


@pytest.fixture
def own_plan(plan: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(plan, tmp_path))


def prompt(words: int = 120) -> str:
    return " ".join(TEXT.read_text(encoding="utf-8").split()[:words])


# ---- the four steps ---------------------------------------------------------------------------------------------


def test_what_comes_next_can_be_typed(tmp_path: Path) -> None:
    """A file's name with a space in it, and letters of another script."""
    path = tmp_path / "mein plän 文.safetensors"
    told = " ".join(run_ace("plan", "demo", "--tables", "-o", path).out.split())
    assert shlex.split(told.partition("Next: ")[2])[:5] == ["ace", "plan", "demo", "--plan", str(path)]


def test_tables_json(tmp_path: Path) -> None:
    """The numbers a script needs, and a plan that loads and has no thresholds yet."""
    path = tmp_path / "plan.safetensors"
    made = run_ace("plan", MODEL, "--tables", "-o", path, "--json").json
    assert made["plan"] == str(path)
    assert made["layers"] == 6
    assert made["undefined"] == {}
    assert made["seconds"] > 0
    assert Plan.load(path).thresholds == ()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.safetensors"]


@pytest.mark.long
def test_budget_json_realises_what_was_asked(own_plan: Path) -> None:
    """Corrected thresholds land within half a point, rise with the budget, and are in the file as printed."""
    made = run_ace("plan", MODEL, "-p", own_plan, "--text", TEXT, *PASS, "--budgets", "0.2:0.6:0.2", "--json").json
    assert [t["budget"] for t in made["thresholds"]] == [0.2, 0.4, 0.6]
    assert all(abs(t["realised"] - t["budget"]) < 0.005 and t["corrected"] for t in made["thresholds"])
    assert made["passes"] == sum(t["passes"] for t in made["thresholds"]), "the curve is in the plan: no dense pass"
    taus = [t["threshold"] for t in made["thresholds"]]
    assert taus == sorted(taus)
    stored = {t.budget: t.threshold for t in Plan.load(own_plan).thresholds}
    assert stored.keys() == {0.2, 0.3, 0.4, 0.5, 0.6}
    assert [stored[b] for b in (0.2, 0.4, 0.6)] == taus


def test_budget_again_replaces_its_entries(own_plan: Path) -> None:
    """Same text, same settings: the file does not grow, and the result is the same to the bit."""
    before = own_plan.read_bytes()
    assert run_ace("plan", MODEL, "-p", own_plan, "--text", TEXT, *PASS, "--budgets", "0.3,0.5").code == 0
    assert own_plan.read_bytes() == before


def test_budgets_that_nobody_named_are_those_the_model_has_slots_for(own_plan: Path) -> None:
    """As with two slots a token, of which one always runs; what is named must be met."""
    options = ("--text", TEXT, *PASS, "--min-active", 4, "--no-correct", "--no-fidelity", "--json")
    made = run_ace("plan", MODEL, "-p", own_plan, *options)
    assert [t["budget"] for t in made.json["thresholds"]] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert "above 50.0% are left out" in made.err
    assert run_ace("plan", MODEL, "-p", own_plan, *options, "--budgets", 0.6).code == 1


def test_paper_preset_maps_from_the_curve(own_plan: Path) -> None:
    """The paper has no correction, and the gain shapes no curve; its thresholds live beside ours and do not replace them."""
    options = ("--preset", "paper", "--budgets", "0.5", "--json")
    made = run_ace("plan", MODEL, "-p", own_plan, "--text", TEXT, *PASS, *options).json
    assert made["passes"] == 0
    assert not made["thresholds"][0]["corrected"]
    assert [t.gain for t in Plan.load(own_plan).thresholds] == ["power", "power", "kept"]


def test_run_json_counts_slots(plan: Path) -> None:
    """A prompt of the mapped kind realises the request; 8 new tokens are 7 decode passes of 6 layers and 8 slots."""
    options = ("--skip", 0.5, "--max-new-tokens", 8, "--device", "cpu", "--json")
    made = run_ace("run", MODEL, "-p", plan, "--prompt", prompt(), *options).json
    assert made["requested"] == 0.5
    assert abs(made["realised"] - 0.5) < 0.05
    assert made["decode"]["routed"] == 7 * 6 * 8
    assert set(made["layers"]) == set("012345")
    routed, kept = (sum(made[phase][what] for phase in ("prefill", "decode")) for what in ("routed", "kept"))
    assert made["realised"] == pytest.approx(1 - kept / routed)
    assert made["text"].strip()


def test_run_prints_text_and_ratio(plan: Path) -> None:
    """Text alone on stdout, so that it can be piped; the ratio beside it on stderr."""
    ran = run_ace("run", MODEL, "-p", plan, "--prompt", "The city", "--skip", 0.5, "--max-new-tokens", 8)
    assert ran.code == 0
    assert ran.out.strip()
    assert "realised" not in ran.out
    assert re.search(r"requested 50\.0%, realised \d+\.\d%", ran.err)


def test_run_without_skipping_counts_nothing_skipped(plan: Path) -> None:
    """Budget 0 needs no threshold and skips nothing."""
    options = ("--skip", 0, "--policy", "share", "--max-new-tokens", 2, "--json")
    made = run_ace("run", MODEL, "-p", plan, "--prompt", "The city", *options).json
    assert made["realised"] == 0
    assert made["prefill"]["kept"] == made["prefill"]["routed"] > 0


def test_interpolated_budget_is_noted_beside_the_json(plan: Path) -> None:
    """40 % lies between two measured budgets: it runs, and the note does not spoil stdout."""
    options = ("--skip", 0.4, "--max-new-tokens", 2, "--json")
    ran = run_ace("run", MODEL, "-p", plan, "--prompt", "The city", *options)
    assert ran.json["requested"] == 0.4
    assert re.search(r"note: τ for 40\.0% is between measured budgets; expect it within 0\.\d\d points", ran.err)


@pytest.mark.long
def test_two_texts_of_one_name(own_plan: Path, tmp_path: Path) -> None:
    """Mapped each and mixed, told apart, both exact; the first stays the default until another is made it."""
    texts = [tmp_path / name / "sample.txt" for name in ("a", "b")]
    for text, start in zip(texts, (0, 6000), strict=True):
        text.parent.mkdir()
        text.write_text(TEXT.read_text(encoding="utf-8")[start : start + 6000], encoding="utf-8")
    options = ("--tokens", 512, "--window", 256, "--budgets", 0.5, "--no-fidelity", "--policy", "share", "--json")
    given = [part for text in texts for part in ("--text", text)]
    made = run_ace("plan", MODEL, "-p", own_plan, *given, *options).json
    assert [t["workload"] for t in made["thresholds"]] == ["sample.txt", "sample.txt", "mixed"]
    listed = run_ace("inspect", own_plan, "--json").json["workloads"]
    assert [t["default"] for t in listed] == [True, False, False, False] and listed[3]["tokens"] == 1024
    names = [t["workload"] for t in listed]
    assert names[1].startswith("sample.txt#") and names[3] == "mixed" and len(set(names)) == 4
    assert "sample.txt#" in run_ace("inspect", own_plan).out
    taus = {n: ACE.load(own_plan, 0.5, policy="share", workload=n).thresholds[0] for n in names[1:]}
    assert [float(t) for t in taus.values()] == pytest.approx([t["threshold"] for t in made["thresholds"]])
    ran = ("run", MODEL, "-p", own_plan, "--prompt", "The", "--max-new-tokens", 1, "--policy", "share", "--json")
    assert run_ace(*ran, "--workload", names[2]).code == 0
    refused = run_ace(*ran, "--workload", "sample.txt")
    assert refused.code == 1 and f"{names[1]}, {names[2]}" in refused.err
    assert run_ace("plan", MODEL, "-p", own_plan, "--text", texts[1], *options, "--default").code == 0
    assert [t["default"] for t in run_ace("inspect", own_plan, "--json").json["workloads"]] == [
        False,
        False,
        True,
        False,
    ]


def test_a_second_text_changes_nothing_for_those_who_name_none(own_plan: Path, tmp_path: Path) -> None:
    """After `ace budget` with another text, `--skip 0.3` dropped to 15 % and `--skip 0.6` was refused though mapped."""
    before = ACE.load(own_plan, 0.5).thresholds
    text = tmp_path / "second.txt"
    text.write_text(TEXT.read_text(encoding="utf-8")[6000:12000], encoding="utf-8")
    options = ("--tokens", 512, "--window", 256, "--budgets", 0.4, "--no-fidelity", "--no-correct")
    assert run_ace("plan", MODEL, "-p", own_plan, "--text", text, *options).code == 0
    assert ACE.load(own_plan, 0.5).thresholds.equal(before) and ACE.load(own_plan, 0.7).thresholds[0] > before[0]


def test_inspect_model() -> None:
    """Layers with their sizes, norms and routers by path."""
    made = run_ace("inspect", MODEL, "--json").json
    assert made["architecture"] == "Qwen3MoeForCausalLM"
    assert made["not_covered"] == []
    assert list(made["layers"]) == list("012345")
    assert made["layers"]["3"] | {"router": ""} == {
        **{"experts": 32, "top_k": 8, "hidden": 192, "intermediate": 48},
        "router": "",
    }
    assert made["routers"]["0"] == "model.layers.0.mlp.gate"
    shown = run_ace("inspect", MODEL)
    assert shown.code == 0
    assert all(word in shown.out for word in ("Qwen3MoeForCausalLM", "192", "32"))


def test_inspect_plan(plan: Path) -> None:
    """Everything in the file: tables of mean 1 and the thresholds with what they realised."""
    made = run_ace("inspect", plan, "--json").json
    assert made["model"] == "demo-moe"
    assert [t["budget"] for t in made["thresholds"]] == [0.3, 0.5]
    assert all(abs(t["realised"] - t["budget"]) < 0.005 for t in made["thresholds"])
    for layer in made["tables"].values():
        assert {name: len(values) for name, values in layer.items()} == {"gsp": 32, "rcr": 32}
        assert sum(layer["gsp"]) / 32 == pytest.approx(1, abs=1e-5)
    shown = run_ace("inspect", plan)
    assert shown.code == 0
    assert all(word in shown.out for word in ("gsp", "rcr", "30.0%", "50.0%"))
    assert "│ ace " in shown.out and "max" not in shown.out, "settings that are not the usual ones"


def test_the_table_of_budgets_fits_a_terminal(plan: Path) -> None:
    """80 columns with every heading and number whole, intervals too."""
    found = {name: {"value": 0.0157, "low": 0.0132, "high": 0.0177} for name in ("kl", "agreement", "acceptance")}
    entries = [replace(t, fidelity=found) for t in Plan.load(plan).thresholds]
    console = Console(file=io.StringIO(), width=80)
    console.print(show.entries_table(entries))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown and shown.count("0.0157 (0.0132–0.0177)") == len(entries) == 2


def test_inspect_plan_without_thresholds_says_what_is_next(tmp_path: Path) -> None:
    made = run_ace("plan", "demo", "--tables", "-o", tmp_path / "new.safetensors")
    assert "Next: ace plan demo --plan" in made.out
    assert "`ace plan MODEL --plan" in run_ace("inspect", tmp_path / "new.safetensors").out


def test_names_with_brackets_are_printed_as_they_are(plan: Path, tmp_path: Path) -> None:
    """Square brackets are markup to the printer; a folder or a text may have them in its name all the same."""
    (tmp_path / "model [red]").symlink_to(MODEL)
    path, text = tmp_path / "plan [b].safetensors", tmp_path / "text [i].txt"
    shutil.copy(TEXT, text)
    made = run_ace("plan", tmp_path / "model [red]", "--tables", "-o", path)
    assert made.code == 0, made.err
    assert "plan [b].safetensors" in made.out.replace("\n", "")
    mapped = run_ace("plan", MODEL, "-p", path, "--text", text, *PASS, "--budgets", "0.3", "--no-correct")
    assert "plan [b].safetensors" in mapped.out.replace("\n", "")
    with patch.dict(os.environ, {"COLUMNS": "200"}):
        assert "text [i].txt" in run_ace("inspect", path).out


@pytest.mark.parametrize(
    "wrong", [("--text", "none.txt"), ("--budgets", "2"), ("--policy", "shre"), ("--window", "0"), ("--gain", "loud")]
)
def test_plan_refuses_before_it_reads_the_checkpoint(wrong: tuple[str, str], tmp_path: Path) -> None:
    """No plan is left of a command that could not have ended well."""
    ran = run_ace("plan", MODEL, "-o", tmp_path / "plan.safetensors", *wrong)
    assert ran.code == 1 and "error" in ran.err and not any(tmp_path.iterdir())


# ---- one command, and text that can be seen ---------------------------------------------------------------------------


@pytest.mark.long
def test_plan_is_tables_and_budget(plan: Path, tmp_path: Path) -> None:
    """One command leaves what the two leave, and has nothing to do where all is there."""
    path = tmp_path / "plan.safetensors"
    ask = ("plan", MODEL, "-o", path, "--text", TEXT, *PASS, "--budgets", "0.3,0.5", "--policy", "ace", "--json")
    made, again = run_ace(*ask).json, run_ace(*ask).json
    assert made["passes"] > 2 and again["passes"] == 0
    one, two = Plan.load(path), Plan.load(plan)
    assert [t["threshold"] for t in made["thresholds"]] == [t.threshold for t in two.thresholds]
    assert {k: {n: v.tolist() for n, v in t.items()} for k, t in one.tables.items()} == {
        k: {n: v.tolist() for n, v in t.items()} for k, t in two.tables.items()
    }


@pytest.mark.long
def test_results_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` behind an = reaches us as it is: a plan there is continued, and no folder of that name is made here."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    for budget in (0.3, 0.5):
        assert run_ace("plan", MODEL, "--text", TEXT, *PASS, "--budgets", budget, "--out=~/p.safetensors").code == 0
    assert [t.budget for t in Plan.load(tmp_path / "home" / "p.safetensors").thresholds] == [0.3, 0.5]
    assert run_ace("study", "tables", MODEL, "--text", TEXT, *PASS, "--out=~/tables.json").code == 0
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["home", "p.safetensors", "tables.json"]


def test_run_beside(plan: Path) -> None:
    """The unskipped text is the stock model's; at budget 0 both are the same, at 50 % they differ and are marked."""
    options = ("--prompt", prompt(40), "--max-new-tokens", 24, "--beside")
    same = run_ace("run", MODEL, "-p", plan, *options, "--skip", 0, "--json").json
    apart = run_ace("run", MODEL, "-p", plan, *options, "--skip", 0.5, "--json").json
    assert same["skipped"]["text"] == same["unskipped"]["text"] == apart["unskipped"]["text"]
    assert same["realised"] == 0 and abs(apart["realised"] - 0.5) < 0.1
    assert apart["skipped"]["text"] != apart["unskipped"]["text"]
    assert apart["skipped"]["tokens"] == 24 and apart["skipped"]["tokens_per_second"] > 0
    shown = run_ace("run", MODEL, "-p", plan, *options, "--skip", 0.5).out
    assert "unskipped" in shown and "50% asked" in shown and re.search(r"\*\w+\*", shown)
    assert "Both texts are the same." in run_ace("run", MODEL, "-p", plan, *options, "--skip", 0).out


@pytest.mark.parametrize(("seconds", "said"), [(2.0, True), (0.5, False)])
def test_a_pair_that_is_not_faster_says_why(seconds: float, said: bool) -> None:
    pair = Pair(Written("a b", 2, 0.0, 1.0), Written("a c", 2, 0.0, seconds), requested=0.3, realised=0.3)
    console = Console(file=io.StringIO(), width=80)
    print_pair(console, pair)
    assert ("Not faster here" in console.file.getvalue()) == said  # type: ignore[attr-defined]


@pytest.mark.long
def test_run_makes_its_own_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plan: tables and thresholds on text the model writes itself, kept for the next time."""
    monkeypatch.setattr(texts, "own_windows", partial(texts.own_windows, samples=2, length=64))
    with patch.dict(os.environ, {"ACE_CACHE": str(tmp_path)}):
        ask = ("run", MODEL, "--prompt", "The city", "--max-new-tokens", 2, "--json")
        first, second = run_ace(*ask), run_ace(*ask)
    assert first.json["requested"] == 0.3 and second.json["text"] == first.json["text"]
    assert "mapping 30%" in first.err and "mapping" not in second.err


def test_chat_with_live_budgets(plan: Path) -> None:
    """Answers on stdout, a budget changed on the way, mistakes that end nothing."""
    lines = "The city of London\n/skip 0.5\n/skip 0.95\n/skip half\n/report\n/what\nIn 1914\n/new\n/quit\nnever\n"
    with patch.object(sys, "stdin", io.StringIO(lines)):
        ran = run_ace("chat", MODEL, "-p", plan, "--skip", 0, "--max-new-tokens", 6)
    assert ran.code == 0 and len(ran.out.strip().splitlines()) >= 2
    ratios = [float(r) for r in re.findall(r"a second; ([\d.]+)% of slots skipped", ran.err)]
    assert len(ratios) == 2 and ratios[0] == 0 and 35 < ratios[1] < 65
    assert all(said in ran.err for said in ("cannot be met", "'half' is not a number", "slots not run", "/quit"))


def test_chat_goes_on_behind_a_line_that_is_no_text(plan: Path) -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"caf\xe9\nThe city\n"), encoding="utf-8")
    with patch.object(sys, "stdin", lines):
        ran = run_ace("chat", MODEL, "-p", plan, "--skip", 0, "--max-new-tokens", 2)
    assert ran.code == 0 and "not Unicode text" in ran.err and ran.err.count("of slots skipped") == 2


def test_chat_template_is_used_where_there_is_one(plan: Path, tmp_path: Path) -> None:
    """The same words through a template are another prompt; --no-chat is the plain one."""
    model = Path(shutil.copytree(MODEL, tmp_path / "chatty"))
    said = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"
    (model / "chat_template.jinja").write_text(said)
    ask = ("run", model, "-p", plan, "--prompt", "The city", "--max-new-tokens", 4, "--skip", 0, "--json")
    plain, chat, off = (run_ace(*a).json for a in (("run", MODEL, *ask[2:]), ask, (*ask, "--no-chat")))
    assert chat["prefill"]["routed"] > plain["prefill"]["routed"] == off["prefill"]["routed"]
    assert off["text"] == plain["text"]


def test_demo_ends_with_a_pair(plan: Path, tmp_path: Path) -> None:
    from ace_moe import demo

    shutil.copy(plan, tmp_path / "plan.safetensors")
    pair = demo.pair(tmp_path)
    assert pair.unskipped.tokens == demo.NEW_TOKENS and 0.15 < pair.realised < 0.45
    for line in demo.NEXT[1:3]:
        program, command, *arguments = shlex.split(line.format(plan="plan.safetensors"))
        assert program == "ace"
        COMMANDS[command].make_context(command, arguments)


def test_serve_shows_its_command_without_vllm(plan: Path) -> None:
    with patch("ace_moe.cli.serving._installed", return_value=False):
        shown = run_ace("serve", MODEL, "--plan", plan, "--skip", 0.3, "--dry-run", "--port", 8001)
        refused = run_ace("serve", MODEL, "--plan", plan, "--skip", 0.3)
    command = shlex.split(shown.out)
    assert command[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"] and "8001" in command
    assert refused.code == 1 and "ace-moe[vllm]" in refused.err


def test_thresholds_that_move_need_no_text(tmp_path: Path) -> None:
    """No model is loaded to map a budget that the server will find by itself."""
    with patch.dict(os.environ, {"ACE_CACHE": str(tmp_path)}):
        ran = run_ace("serve", MODEL, "--skip", 0.5, "--track", "--dry-run")
    assert ran.code == 0 and "mapping" not in ran.err and not Plan.load(*tmp_path.glob("*.safetensors")).thresholds
