"""What made a file is in the file: of results that are stored, of plans, of what commands write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ace_moe.cli.common import made_of
from ace_moe.demo import MODEL, TEXT
from ace_moe.files import file_hash
from ace_moe.plan import Plan
from ace_moe.provenance import FIELDS, UNKNOWN, command, differing, provenance, read
from ace_moe.version import __version__
from command import run_ace

STORED = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("*.json"))
DATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")


def complete(record: dict[str, Any]) -> None:
    assert set(record) == set(FIELDS)
    assert record["version"] == __version__ and DATED.fullmatch(record["date"])
    assert record["libraries"]["torch"] and record["libraries"]["python"]
    assert record["commit"] == UNKNOWN or re.fullmatch("[0-9a-f]{40}", record["commit"])
    assert record["changed"] in (True, False, UNKNOWN)


def test_there_are_stored_results() -> None:
    assert len(STORED) > 20


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_every_stored_result_says_what_made_it(path: Path) -> None:
    """What an earlier release did not write says "unknown"; the command is always there, without anybody's folders."""
    results = json.loads(path.read_text(encoding="utf-8"))
    found = read(results)
    assert set(found) == set(FIELDS)
    assert found["command"] != UNKNOWN and not re.search(r"(^|[ =])/", found["command"]), found["command"]
    for name in ("version", "commit", "device", "date"):
        assert isinstance(found[name], str) and found[name]
    if "provenance" in results or "runs" in results:
        complete({**found, "version": __version__, "date": found["date"]})


def test_the_record_is_complete() -> None:
    record = provenance(inputs={"sample.txt": file_hash(TEXT)}, argv=["/usr/bin/ace", "budget"])
    complete(record)
    assert record["command"] == "ace budget" and record["device"] == "cpu"
    assert json.loads(json.dumps(record)) == record


def test_commands_have_base_names_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "text.txt").touch()
    given = [
        "/x/ace",
        "budget",
        "/models/lab",
        "Qwen/Qwen3-30B-A3B",
        "--text",
        "a/text.txt",
        "--out=/tmp/y/r.json",
        "../p.st",
    ]
    assert command(given) == "ace budget lab Qwen/Qwen3-30B-A3B --text text.txt --out=r.json p.st"
    assert command(["ace", "--budgets", "0.1:0.6:0.1", "--skip=0.5"]) == "ace --budgets 0.1:0.6:0.1 --skip=0.5"
    assert command(["/x/ace_moe/__main__.py", "tables", "m"]) == "ace tables m"  # python -m ace_moe


def test_versions_that_differ_are_named() -> None:
    one = provenance()
    assert differing(one, {**one, "date": "later", "command": "other"}) is None
    assert differing({}, {"version": "2"}) == "version unknown then and 2 now"
    assert "torch" in (differing({**one, "libraries": {}}, one) or "")


def test_plans_say_which_commands_made_them(tmp_path: Path) -> None:
    """One record a command that changed something; a command that found everything there adds none."""
    path = tmp_path / "plan.safetensors"
    assert run_ace("plan", MODEL, "--tables", "-o", path).code == 0
    budget = ("plan", MODEL, "-p", path, "--text", TEXT, "--tokens", 512, "--window", 256, "--budgets", 0.5)
    for _ in range(2):
        assert run_ace(*budget, "--no-fidelity", "--no-correct").code == 0
    made = Plan.load(path).made
    assert [record["command"].split()[1] for record in made] == ["plan", "plan"]
    for record in made:
        complete(record)
    assert made[1]["inputs"] == {TEXT.name: file_hash(TEXT)} and str(tmp_path) not in made[1]["command"]


def test_commands_do_not_say_what_a_model_was_asked() -> None:
    """`ace run` without a plan makes one, which may be published."""
    for given in (["--prompt", "my --prompt secret"], ["--prompt=my secret"]):
        assert "secret" not in (said := command(["ace", "run", "demo", *given, "--skip", "0.3"]))
        assert said.startswith("ace run demo --prompt") and said.endswith("TEXT --skip 0.3")


def test_files_of_one_name_are_all_inputs(tmp_path: Path) -> None:
    """Texts of two folders, results of two runs: the second did not take the first one's place."""
    paths = [tmp_path / folder / "a.txt" for folder in "xyz"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(path.parent.name)
    names = ("a.txt", "a.txt (2)", "a.txt (3)")
    assert made_of(paths[0], None, *paths[1:]) == dict(zip(names, map(file_hash, paths), strict=True))


def test_perplexity_says_what_made_it(tmp_path: Path) -> None:
    path = tmp_path / "perplexity.json"
    assert run_ace("perplexity", MODEL, "--text", TEXT, "--tokens", 256, "--window", 128, "-o", path).code == 0
    found = read(json.loads(path.read_text()))
    complete(found)
    assert found["inputs"] == {TEXT.name: file_hash(TEXT)}
