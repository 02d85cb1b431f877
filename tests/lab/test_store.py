"""Results files: whole, of one measurement, and with every row of every command that writes them at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import OutputError, ResultError
from ace_moe.lab.store import ResultsFile, put, read_results

WRITES = 50
WRITER = """
import sys
from pathlib import Path
from ace_moe.lab.store import ResultsFile, begin_run, put

path, name, writes = sys.argv[1:]
file, number = ResultsFile(Path(path), "compare", {"text": "a"}), None
for n in range(int(writes)):
    with file.changed() as results:
        if number is None:
            number = begin_run(results, {"command": f"ace compare {name}", "provenance": {"command": name}})
        put(results.setdefault("cells", []), {"method": name, "n": n, "run": number}, ("method", "n"))
"""


def run_together(*commands: list[str]) -> None:
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for command in commands]
    for process in running:
        _, error = process.communicate()
        assert process.returncode == 0, error.decode()


def test_two_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    run_together(*([sys.executable, "-c", WRITER, str(path), name, str(WRITES)] for name in ("one", "two")))
    results = json.loads(path.read_text())
    assert sorted((c["method"], c["n"]) for c in results["cells"]) == [
        (name, n) for name in ("one", "two") for n in range(WRITES)
    ]
    assert len(results["runs"]) == 2
    assert all(results["runs"][c["run"]]["command"] == c["method"] for c in results["cells"])
    assert sorted(results["command"].split(" && ")) == ["ace compare one", "ace compare two"]
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.long
def test_two_commands_on_one_file_lose_no_cell(tmp_path: Path) -> None:
    """Other methods at once, then the same one: every cell is there once."""
    path = tmp_path / "results.json"
    options = ("--text", TEXT, "--tokens", 256, "--window", 128, "--budgets", "0.3,0.5", "--gains", "power", "-o", path)
    ace = [sys.executable, "-m", "ace_moe", "compare", MODEL, *options, "--methods"]
    for methods in (("share", "gsp"), ("ace", "ace")):
        run_together(*([str(word) for word in (*ace, method)] for method in methods))
    results = json.loads(path.read_text())
    cells = [(c["method"], c["budget"]) for c in results["cells"]]
    assert sorted(cells) == [(m, b) for m in ("ace", "gsp", "share") for b in (0.3, 0.5)]
    assert sorted(results["grid"]["methods"]) == ["ace", "gsp", "share"]


def test_another_measurement_is_refused_before_and_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with ResultsFile(path, "compare", {"text": "a", "window": 8}).changed() as results:
        results["cells"] = [1]
    before = path.read_bytes()
    other = ResultsFile(path, "compare", {"text": "b", "window": 8})
    for refused in (other.read, lambda: other.changed().__enter__()):
        with pytest.raises(ResultError, match=r"text is 'a' there and 'b' now.*--out"):
            refused()
    with pytest.raises(ResultError, match="workload is 'unknown' there"):
        ResultsFile(path, "compare", {"workload": "code.txt"}).read()
    assert ResultsFile(path, "compare", {"workload": None}).read()["cells"] == [1], (
        "what was not asked differs in nothing"
    )
    assert path.read_bytes() == before


def test_a_change_that_fails_leaves_the_file(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "results.json", "compare", {})
    with file.changed() as results:
        results["a"] = 1
    for wrong in (float("nan"), object()):
        with pytest.raises((ValueError, TypeError), match="JSON"), file.changed() as results:
            results["a"] = wrong
    with pytest.raises(KeyError), file.changed() as results:
        results["a"] = results["missing"]
    assert file.read()["a"] == 1 and [p.name for p in tmp_path.iterdir()] == ["results.json"]
    nowhere = ResultsFile(tmp_path / "no folder" / "results.json", "compare", {})
    with pytest.raises(OutputError, match="could not be written"), nowhere.changed():
        pass


def test_a_link_stays_and_its_file_changes(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, real = tmp_path / "results.json", tmp_path / "there" / "real.json"
    link.symlink_to(real)
    with ResultsFile(link, "compare", {}).changed() as results:
        results["a"] = 1
    assert link.is_symlink() and json.loads(real.read_text())["a"] == 1


def test_a_row_is_there_once() -> None:
    rows = [{"key": 1, "value": 1}]
    put(rows, {"key": 1, "value": 2}, ("key",))
    put(rows, {"key": 2, "value": 2}, ("key",))
    assert rows == [{"key": 1, "value": 1}, {"key": 2, "value": 2}]
    put(rows, {"key": 1, "value": 3}, ("key",), newer=True)
    assert rows == [{"key": 1, "value": 3}, {"key": 2, "value": 2}]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"kind":"compare"}', '{"kind":"eval","schema":1}', "[" * 100_000]
)
def test_files_that_are_no_results(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ResultError, match=r"results\.json"):
        read_results(path, "compare")
