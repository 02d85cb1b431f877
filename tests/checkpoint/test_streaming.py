"""Tables of a repository that is never kept: one commit, a shard at a time, layers over processes, resumed where it stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub
from quantised import quantise

import zoo
from ace_moe import build_plan
from ace_moe.checkpoint import MoEModel
from ace_moe.errors import OptionError, PlanError
from ace_moe.plan import Plan
from ace_moe.tables.parts import Parts
from ace_moe.tables.work import Job, build_in_parts, parse_layers
from command import run_ace

LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers in many shards."""
    made = tmp_path_factory.mktemp("model")
    zoo.build("qwen3_moe", num_hidden_layers=LAYERS, num_experts=4).save_pretrained(made, max_shard_size="60KB")
    assert len(list(made.glob("*.safetensors"))) > LAYERS
    return made


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    made = Hub(folder)
    yield made
    made.close()


STREAM = """
import os, sys, tempfile
from pathlib import Path
seen = []
import ace_moe.checkpoint.hub as hub
before = hub.Repository.fetch
def fetch(self, shard):
    path = before(self, shard)
    seen.append(sum(p.stat().st_size for p in self.folder.rglob("*.safetensors")))
    return path
hub.Repository.fetch = fetch
from ace_moe.cli import main
sys.argv = ["ace", *sys.argv[1:]]
try:
    main()
finally:
    print("PEAK", max(seen, default=0), file=sys.stderr)
"""


def stream(hub: Hub, home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`ace …` in a process of its own: the client reads its settings when it is imported."""
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    settings |= {"HF_HUB_OFFLINE": "0", "TMPDIR": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", STREAM, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_streamed_plan_is_that_of_the_folder(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """With a body that breaks off twice; nothing of it is left on disk but the plan."""
    home, output = tmp_path / "home", tmp_path / "plan.safetensors"
    home.mkdir()
    shard = sorted(p.name for p in folder.glob("*.safetensors"))[1]
    hub.drops[shard] = 2
    done = stream(hub, home, "tables", hub.name, "-o", output, "--stream", "--json")
    assert done.returncode == 0, done.stderr
    assert "GB to fetch" in done.stderr
    assert hub.drops[shard] == 0, "both drops were met"
    found, wanted = Plan.load(output), build_plan(folder)
    assert found.fingerprint == wanted.fingerprint
    assert all((found.tables[k][n] == t).all() for k, layer in wanted.tables.items() for n, t in layer.items())
    peak = int(done.stderr.rpartition("PEAK ")[2].split()[0])
    assert 0 < peak <= max(p.stat().st_size for p in folder.glob("*.safetensors")), "one shard at a time"
    assert not list(home.rglob("*.safetensors")) and not Parts(output).folder.exists()


@pytest.mark.slow
def test_a_revision_that_changes_midway_is_noticed(hub: Hub, tmp_path: Path) -> None:
    home, output = tmp_path / "home", tmp_path / "plan.safetensors"
    home.mkdir()
    hub.answered = "c" * 40
    done = stream(hub, home, "tables", hub.name, "-o", output, "--stream")
    assert done.returncode == 1 and "is not the file of commit aaaaaaaaaaaa" in done.stderr
    assert not output.exists() and not list(home.rglob("*.safetensors"))


def test_parts_of_two_machines_make_the_plan(folder: Path, tmp_path: Path) -> None:
    """Halves made apart, put into one folder: nothing is computed again."""
    here, there = tmp_path / "here.safetensors", tmp_path / "there.safetensors"
    done = run_ace("tables", folder, "-o", here, "--layers", "0:2", "--json")
    assert done.json["missing"] == ["2", "3"] and not here.exists()
    assert build_in_parts(Job(str(folder), there, layers=(2, 4)))[0] is None
    for part in Parts(there).folder.iterdir():
        part.rename(Parts(here).folder / part.name)
    before = {p: p.stat().st_mtime_ns for p in Parts(here).folder.iterdir()}
    plan, missing = build_in_parts(Job(str(folder), here))
    assert plan is not None and not missing
    assert before == {p: p.stat().st_mtime_ns for p in Parts(here).folder.iterdir()}
    wanted = build_plan(folder)
    assert plan.fingerprint == wanted.fingerprint and plan.tables.keys() == wanted.tables.keys()


def test_finished_layers_are_not_made_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after two layers, and one part damaged: the two others and the damaged one are made."""
    output, made = tmp_path / "plan.safetensors", []
    layer = MoEModel.layer

    def stopping(self: MoEModel, site: object) -> object:
        made.append(site.key)
        if len(made) == 3:
            raise KeyboardInterrupt
        return layer(self, site)

    monkeypatch.setattr(MoEModel, "layer", stopping)
    with pytest.raises(KeyboardInterrupt):
        build_in_parts(Job(str(folder), output))
    Parts(output).path("0").write_bytes(b"half a file")
    plan, _ = build_in_parts(Job(str(folder), output))
    assert plan is not None and made == ["0", "1", "2", "0", "2", "3"]


def test_parts_of_another_checkpoint_are_refused(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.safetensors"
    build_in_parts(Job(str(folder), output, layers=(0, 1)))
    packed, _ = quantise(tmp_path, "qwen3_moe", lambda key, number: "int8")
    tuned = tmp_path / "tuned"  # the same tensors with other numbers
    zoo.build("qwen3_moe", seed=1, num_hidden_layers=LAYERS, num_experts=4).save_pretrained(tuned)
    for other in (packed, tuned):
        with pytest.raises(PlanError, match="another checkpoint"):
            build_in_parts(Job(str(other), output))


@pytest.mark.parametrize("text", ["3", "2:2", "-1:4", "a:b", "4:2"])
def test_layers_that_mean_nothing(text: str) -> None:
    with pytest.raises(OptionError, match="first:past-the-last"):
        parse_layers(text)


@pytest.mark.slow
def test_workers_share_the_layers(folder: Path, tmp_path: Path) -> None:
    plan, _ = build_in_parts(Job(str(folder), tmp_path / "plan.safetensors", workers=2))
    wanted = build_plan(folder)
    assert plan is not None and plan.fingerprint == wanted.fingerprint
    assert all((plan.tables[k][n] == t).all() for k, layer in wanted.tables.items() for n, t in layer.items())
