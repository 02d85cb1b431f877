"""What is released: wheel and sdist as they are built, and used outside the source tree on every Python there is."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUPPORTED = range(10, 15)
ON_PATH = [found for minor in SUPPORTED if (found := shutil.which(f"python3.{minor}"))]
OF_PYENV = sorted(map(str, Path.home().glob(".pyenv/versions/3.1[0-4]*/bin/python")))
PYTHONS = {re.findall(r"3\.1\d", path)[0]: path for path in (*ON_PATH, *OF_PYENV)}  # its shims may be none
CHECK = """
import ace_moe
from ace_moe.demo import MODEL
assert "site-packages" in ace_moe.__file__
"""


def readme_code() -> str:
    """The README's own lines, with the embedded model in place of one that would be fetched."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[0]
    return re.sub(r'"Qwen/[^"]*"', "MODEL", code)


def readme_commands() -> list[list[str]]:
    """Its `ace` lines likewise; serving shows what it would start."""
    lines = re.findall(r"^    (ace .*?)(?:  +#.*)?$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    commands = [shlex.split(re.sub(r"Qwen/\S+", "demo", line)) for line in lines]
    return [[*c, "--dry-run"] if c[1] == "serve" else c for c in commands]


def call(*command: object, **options: object) -> str:
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert ran.returncode == 0, f"{command}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist from a copy of the tree, and the wheel from the sdist: what is missing in one is missing in the other."""
    folder = tmp_path_factory.mktemp("built")
    source, dist = folder / "source", folder / "dist"
    names = call("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as b, sys; getattr(b, sys.argv[1])(sys.argv[2])"
    dist.mkdir()
    call(sys.executable, "-c", build, "build_sdist", dist, cwd=source)
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    call(sys.executable, "-c", build, "build_wheel", dist, cwd=next(folder.glob("ace_moe-*")))
    return dist


@pytest.mark.slow
def test_what_is_in_them(built: Path) -> None:
    """The wheel has the model, the page's assets and py.typed, and no test; the sdist has tests, pages and results."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        about = wheel.read(next(n for n in names if n.endswith("METADATA"))).decode()
    for part in ("py.typed", "demo/demo-moe/model.safetensors", "demo/wikitext-2-slice.txt", "report/assets/"):
        assert any(name.startswith(f"ace_moe/{part}") for name in names), part
    assert {name.split("/")[0] for name in names} == {
        "ace_moe",
        next(n.split("/")[0] for n in names if "METADATA" in n),
    }
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/zoo.py", "docs/tutorial.md", "benchmarks/results/demo.json", "Makefile", ".ci/run"} <= inside
    assert "Requires-Python: >=3.10" in about and "Project-URL: Repository" in about
    assert not re.findall(r"\]\((?!https?:)[^)]*\)", about.partition("\n\n")[2]), "links that lead nowhere on an index"


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS)
def test_the_wheel_in_a_fresh_environment(built: Path, tmp_path: Path, python: str) -> None:
    """Another folder: with plain dependencies version, plan, both texts, README, the tour; with lm-eval a local task."""
    call(python, "-m", "venv", "fresh", cwd=tmp_path)
    here = tmp_path / "fresh" / "bin"
    call(here / "pip", "install", "--quiet", next(built.glob("*.whl")), cwd=tmp_path)
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    at = {"cwd": tmp_path, "env": clean}
    assert call(here / "ace", "--version", **at).startswith("ace-moe ")
    call(here / "ace", "plan", "demo", "--budgets", "0.3", **at)
    shown = call(
        here / "ace", "run", "demo", "-p", "plan.safetensors", "--beside", "--prompt", "The river", "--json", **at
    )
    assert json.loads(shown)["skipped"]["tokens"] == 64
    call(here / "python", "-c", CHECK + readme_code(), **at)
    for name, *arguments in readme_commands():
        call(here / name, *arguments, **at)
    assert "perplexity" in call(here / "ace", "demo", **at)
    call(here / "pip", "install", "--quiet", "lm-eval>=0.4.9", "accelerate>=1.0", cwd=tmp_path)
    question = {"query": "Question: Where does the river end?", "choices": ["in the sea", "in a tree"], "gold": 0}
    (tmp_path / "arc_easy.jsonl").write_text(json.dumps(question))
    task = ("--skip", "0,0.3", "--tasks", "arc_easy", "--data", ".", "-o", "tasks.json", "--json")
    found = json.loads(call(here / "ace", "eval", "demo", "-p", "plan.safetensors", *task, **at))
    assert len(found["cells"]) == 2
