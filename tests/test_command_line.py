"""The command line itself: what is typed, help, streams, exit codes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from ace_moe import ACE, cli
from ace_moe.cli import show
from ace_moe.cli.groups import Deciding, Loading
from ace_moe.demo import MODEL
from ace_moe.errors import BudgetError
from ace_moe.plan import Plan
from ace_moe.version import __version__
from command import ACE as SCRIPT
from command import COMMANDS, run_ace, start_ace

# ---- budgets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.5", [0.5]),
        ("0.1,0.3", [0.1, 0.3]),
        (" 0.1 , 0.3 ", [0.1, 0.3]),
        ("0.1:0.6:0.1", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        ("0.25:0.25:0.1", [0.25]),
        ("0.1:0.35:0.1", [0.1, 0.2, 0.3]),
    ],
)
def test_budgets_as_typed(text: str, values: list[float]) -> None:
    """Exactly the numbers a person would write down, none past the end of the range."""
    assert cli.parse_budgets(text) == values


@pytest.mark.parametrize(
    "text", ["", "half", "0.1:0.6", "0.1:0.6:0", "0.6:0.1:0.1", "0.1:inf:0.1", "0:1:1e-12", "1:2:x"]
)
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(BudgetError, match=r"0\.1:0\.6:0\.1"):
        cli.parse_budgets(text)


# ---- help, streams, exit codes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_parses(name: str) -> None:
    """Each command shows an example, and its own parser takes it."""
    shown = run_ace(name, "--help")
    assert shown.code == 0
    assert "Example" in shown.out
    examples = re.split(r", (?=ace )", COMMANDS[name].epilog.partition(":")[2].strip())
    for example in examples:
        program, command, *arguments = shlex.split(example)
        assert (program, command) == ("ace", name)
        COMMANDS[name].make_context(name, arguments)  # an option that does not exist raises


def test_top_help_lists_every_command() -> None:
    shown = run_ace("--help")
    assert shown.code == 0
    assert all(name in shown.out for name in COMMANDS)
    assert {"plan", "run", "inspect", "demo"} <= set(COMMANDS)


def test_help_and_version_import_no_torch() -> None:
    """They take a moment instead of seconds; so does `import ace_moe`."""
    code = "import sys, ace_moe; sys.argv = ['ace', {!r}]\ntry: ace_moe.cli.main()\nexcept SystemExit: pass\n"
    for flag, word in (("--help", "Usage"), ("--version", __version__)):
        lines = (
            "import ace_moe.cli\n"
            + code.format(flag)
            + "assert not {'torch', 'transformers', 'numpy', 'markdown_it'} & set(sys.modules)"
        )
        ran = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
        assert ran.returncode == 0 and word in ran.stdout, ran.stderr


def test_the_package_has_the_names_it_says() -> None:
    """Lazy names are there, listed, and typed by the same imports."""
    import ace_moe

    assert set(ace_moe.__all__) == {*ace_moe.LIVES_IN, "__version__"} <= set(dir(ace_moe))
    assert ace_moe.POLICIES["share"].name == "share" and ace_moe.ACE is ACE
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        ace_moe.Nonsense  # noqa: B018


def test_options_mean_the_same_everywhere() -> None:
    """--json gives results, --out names a file, a budget has one default, and options that belong together come together."""
    options = {name: {p.name: p for p in command.params} for name, command in COMMANDS.items() if name != "study"}
    flags = {name: {flag for p in found.values() for flag in p.opts} for name, found in options.items()}
    elsewhere = {"chat", "serve", "lm-eval"}  # a loop, a server, another program's command line
    assert {name for name, found in flags.items() if "--json" not in found} == elsewhere
    assert all("--out" in found for found in flags.values() if "-o" in found or "--output" in found)
    asked = {name: found["skip"].default for name, found in options.items() if "skip" in found}
    assert asked.pop("trace") == 0.0 and asked.pop("simulate") == "0.2,0.3,0.4", "what a trace is of, and is asked"
    for group, own in ((Deciding, {"serve", "eval", "simulate"}), (Loading, {"compare", "tune"})):
        names = {field.name for field in fields(group)}
        both = {"plan", "run", "chat", "perplexity", "trace"}
        assert {name for name, found in options.items() if names <= set(found)} == both | own
    skips = set(map(str, asked.values()))
    assert skips == {"0.3", "0,0.3", "None"}, "None: 0.3 with a plan"


def test_equal_layers_are_one_line() -> None:
    shown = run_ace("inspect", MODEL).out
    assert "0–5" in shown and shown.count("Qwen3MoeExperts") == 1 and "…" not in shown
    assert show.said(["0", "1", "2", "5", "7", "8", "a.b"]) == "0–2, 5, 7–8, a.b"
    assert show.folded({"0": "x", "1": "y", "2": "x"}) == [("x", ["0", "2"]), ("y", ["1"])]


def test_a_policy_that_is_nearly_right(demo_plan: Plan, tmp_path: Path) -> None:
    plan = demo_plan.save(tmp_path / "plan.safetensors")
    ran = run_ace("run", MODEL, "-p", plan, "--prompt", "x", "--policy", "shre")
    assert ran.code == 1 and "Did you mean 'share'?" in ran.err
    assert run_ace("policies", "--json").json["ace"]["needs"] == ["gsp", "rcr"]


@pytest.mark.long
def test_progress_goes_to_stderr(tmp_path: Path) -> None:
    """As a process, with bars forced on: stdout is JSON alone, the bar is on stderr."""
    ran = start_ace("plan", MODEL, "--tables", "-o", tmp_path / "plan.safetensors", "--json", env={"FORCE_COLOR": "1"})
    assert ran.json["layers"] == 6
    assert "layers" in ran.err
    assert "6/6" in ran.err


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (0, ("inspect", MODEL)),
        (1, ("inspect", "missing.safetensors")),
        (2, ("inspect",)),
        (2, ("inspect", MODEL, "--nonsense")),
        (2, ("nonsense",)),
        (2, ("run", MODEL, "-p", "plan.safetensors", "--prompt", "x", "--skip", "half")),
    ],
)
def test_exit_codes(code: int, arguments: tuple[object, ...]) -> None:
    """0 done, 1 an error of ours, 2 a command line that cannot be parsed."""
    ran = run_ace(*arguments)
    assert ran.code == code
    assert bool(ran.err) == (code != 0)
    assert "Traceback" not in ran.err


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_a_result_that_finds_no_room_is_an_error(flag: str) -> None:
    """Short results wait in a buffer until exit, where Python loses them."""
    with open("/dev/full", "w") as full:
        ran = subprocess.run([SCRIPT, flag], env=BUFFERED, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 1 and "No space left" in ran.stderr and "Exception ignored" not in ran.stderr


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_a_reader_that_has_left_is_no_news(flag: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    ran = subprocess.run([SCRIPT, flag], env=BUFFERED, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_much_is_said_to_be_much_once_and_not_to_the_quiet(tmp_path: Path) -> None:
    """A plan that is not there ends the commands behind the advice."""
    asked = ("run", MODEL, "-p", tmp_path / "none.safetensors", "--prompt", "The")
    for options, said in ((("--skip", 0.5), 1), (("--skip", 0.4), 0), ((), 0), (("--skip", 0.6, "--quiet"), 0)):
        ran = run_ace(*asked, *options)
        assert ran.code == 1 and ran.err.count("LiveCodeBench") == said
