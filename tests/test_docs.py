"""What the pages say can be done: every `ace` command parses, what needs no GPU, vLLM or network runs, code and notebook run."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ace_moe import cli
from ace_moe.demo import MODEL, TEXT
from ace_moe.mapping import texts
from command import run_ace

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUP: Any = typer.main.get_command(cli.app)
# Words in commands that stand for something of the reader's, and what the tests have for it.
STANDS_FOR = {
    "MODEL": str(MODEL), "Qwen/Qwen3-30B-A3B": str(MODEL), "deepseek-ai/DeepSeek-V3": str(MODEL), "lab-moe": str(MODEL),
    "FILE": "sample.txt", "PLAN": "plan.safetensors", "P": "plan.safetensors",
    "TEXT": "The", "you/qwen3-30b-a3b-plan": "plan.safetensors",
}  # fmt: skip
NOT_RUN = {
    r"^ace serve (?!.*--dry-run)": "becomes vLLM's server",
    r"^ace bench": "times a model; tests/lab runs it",
    r"^ace (lm-eval|eval)": "needs lm-eval or EvalScope; tests/lab runs them where they are",
    r"^ace plans": "a hub; tests/plan has one",
    r"^ace demo": "a minute; `make demo` runs it",
    r"^ace chat": "a conversation; tests/test_cli.py has one",
    r"--expand|--device-map": "quantised files or accelerate; tests/checkpoint",
    r"--methods all|^ace study|--max-kl": "minutes; tests/lab and tests/planning run them",
    r"^ace (compare|study thresholds) (demo|lab)-": "many minutes: it made a stored result",
    r"^ace report .*eval.json|served.trace|latency.json": "reads what commands leave that are not run here",
    r"…|\.\.\.|\[--": "a pattern, not a command",
}


SHORT = partial(texts.own_windows, samples=2, length=64)  # a text of the model's own, in a moment


def commands(page: Path) -> list[str]:
    """Lines of code blocks that begin with `ace`, without what follows a # or a pipe; lines that go on are put together."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^(?: {4}|\$ )(?:echo .* \| )?(ace .*)$", text, re.M)
    found += re.findall(r"`(ace [a-z-]+ [^`]*)`", " ".join(text.split()))
    return [re.split(r"\s+#|\s\|\s", line)[0].strip() for line in found]


COMMANDS = sorted({(page.name, line) for page in PAGES for line in commands(page)})


def reason(line: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, line)), None)


def words(line: str) -> list[str]:
    return [STANDS_FOR.get(word, word) for word in shlex.split(line)[1:]]


@pytest.mark.parametrize(("page", "line"), [c for c in COMMANDS if not re.search(r"…|\.\.\.|\[--", c[1])])
def test_commands_parse(page: str, line: str) -> None:
    """Options exist and have values that can be read, and nothing is missing; a sentence may name a command alone."""
    name, *arguments = words(line)
    assert name in GROUP.commands, line
    command: Any = GROUP.commands[name]
    if name == "study":
        command, arguments = command.commands[arguments[0]], arguments[1:]
    if any(flag.startswith("-") for flag in arguments):
        command.make_context(name, arguments)


def test_quoted_messages_are_ours() -> None:
    """What the troubleshooting page says you see is said somewhere."""
    source = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r'^\| "([^"]+)"', page, re.M)
    assert len(quoted) >= 5
    for said in quoted:
        assert re.sub(r" ?…|\d.*| of$", "", said).strip() in source, said


def test_there_are_commands() -> None:
    run = [c for c in COMMANDS if reason(c[1]) is None]
    assert len(COMMANDS) > 40 and len(run) > 15


LONGER = ("traffic.md", "tuning.md")  # batches of 32 requests; a part to choose on and a part to check on


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_commands_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order, on the embedded model with a short text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(texts, "own_windows", SHORT)
    length = 60000 if page in LONGER else 9000
    for name in ("sample.txt", "wiki.test.raw"):
        Path(name).write_text(TEXT.read_text(encoding="utf-8")[:length], encoding="utf-8")
    Path("code.jsonl").write_text(json.dumps({"text": TEXT.read_text(encoding="utf-8")[9000:18000]}), encoding="utf-8")
    shutil.copy(ROOT / "examples" / "spread.py", tmp_path)
    assert run_ace("plan", MODEL, "--text", "sample.txt", "--budgets", "0.2,0.5").code == 0
    for line in dict.fromkeys(commands(next(p for p in PAGES if p.name == page))):
        if reason(line) is None and (" -" in line or line.startswith("ace inspect")):
            ran = run_ace(*words(line))
            assert ran.code == 0, f"{line}: {ran.err}"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
@pytest.mark.long
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_ace("plan", MODEL, "--text", TEXT, "--budgets", "0.3", "--tokens", 1024, "--window", 256).code == 0
    monkeypatch.setattr(texts, "own_windows", SHORT)
    scope: dict[str, Any] = {}
    for code in blocks(page):
        exec(compile(code.replace("Qwen/Qwen3-30B-A3B", str(MODEL)), page, "exec"), scope)
    assert scope["ace"].report()["prefill"]["routed"] > 0


@pytest.mark.parametrize(("page", "plan"), [("docs/howto.md", "plan"), ("docs/plan-format.md", "qwen3")])
@pytest.mark.long
def test_code_without_a_model_of_the_readers_runs(
    page: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--budgets", "0.3,0.5", "--tokens", 1024, "--window", 256, "-o", f"{plan}.safetensors")
    assert run_ace("plan", MODEL, "--text", TEXT, *options).code == 0
    scope: dict[str, Any] = {}
    for code in blocks(page):
        exec(compile(code, page, "exec"), scope)
    assert "windows 2 2" in capsys.readouterr().out or page == "docs/plan-format.md"


@pytest.mark.long
def test_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells are plain Python, without outputs: what they print is made where they run."""
    book = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    scope: dict[str, Any] = {}
    for cell in cells:
        exec(compile(ast.parse("".join(cell["source"])), cell["id"], "exec"), scope)
    said = capsys.readouterr().out
    assert "of the slots were not run" in said and "asked for 0%, skipped 0.0%" in said
