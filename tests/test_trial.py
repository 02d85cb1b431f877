"""What people ran into: names in the hub's cache, file endings, busy machines, the end of a text, tables of mixed units."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ace_moe.checkpoint import MoEModel, resolve
from ace_moe.checkpoint.loading import load_model, share_cores
from ace_moe.checkpoint.model import called
from ace_moe.cli import show_results
from ace_moe.decoding import Decoder
from ace_moe.demo import MODEL
from ace_moe.errors import CheckpointError, IntegrationError, OptionError, TaskError, TextError
from ace_moe.lab.harnesses.base import folder_without_code
from ace_moe.lab.tasks.catalogue import TASKS, read_rows
from ace_moe.text import read_text
from command import run_ace

ROOT = Path(__file__).parents[1]


# ---- names ------------------------------------------------------------------------------------------------------------


def test_a_model_in_the_hubs_cache_has_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--Some-MoE-A3B" / "snapshots" / ("0123456789abcdef" * 2 + "01234567")
    shutil.copytree(MODEL, folder)
    assert MoEModel.open(folder).name == called(folder) == called("owner/Some-MoE-A3B") == "Some-MoE-A3B"
    assert MoEModel.of(load_model(folder, "cpu")).name == "Some-MoE-A3B"
    assert called(MODEL) == called(f"{MODEL}/") == "demo-moe"


# ---- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.jsonl", "t.JSONL", "t.Jsonl", "t.ndjson", "t.json"])
def test_endings_of_json_lines(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read_text(tmp_path / name) == "one\n\ntwo"


def test_a_json_file_is_a_list_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=1))
    assert read_text(path) == "one\n\ntwo"
    path.write_text('{"text": "one"}')
    assert read_text(path) == "one"
    for wrong in ('["one"]', '{"content": "one"}', "one", "{", '[{"text": 5}]'):
        path.write_text(wrong)
        with pytest.raises(TextError, match="`text` field"):
            read_text(path)


# ---- a busy machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "load", "threads"),
    [(8, 0.2, 8), (8, 6.9, 1), (8, 4.0, 4), (8, 40.0, 1), (2, 1.9, 1), (64, 3.0, 8), (1, 0.0, 1)],
)
def test_threads_are_the_cores_that_are_free(
    cores: int, load: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that wait for a core that another process has make a pass many times slower. Never more than torch's own."""
    used = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1])
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr("ace_moe.checkpoint.loading.cores", lambda: cores)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads < 8:
        with pytest.warns(UserWarning, match="OMP_NUM_THREADS"):
            share_cores()
    else:
        share_cores()
    assert used[-1] == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    used.append(8)
    share_cores()
    assert used[-1] == 8, "who says it, gets it"


def test_an_offline_hub_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        resolve("nobody/no-such-model")


def test_task_harnesses_share_the_cores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They load the model by themselves, past `load_model`; a harness that is none ends the command behind it."""
    asked: list[bool] = []
    monkeypatch.setattr("ace_moe.checkpoint.loading.share_cores", lambda: asked.append(True))
    asks = ("eval", MODEL, "-p", "plan.safetensors", "--tasks", "arc_easy", "--device", "cpu", "--harness", "none")
    assert run_ace(*asks).code == 1
    assert asked == [True]


# ---- the decode loop ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(MODEL, "cpu").float()


def test_decoding_stops_at_the_end(model: PreTrainedModel) -> None:
    """As transformers' own loop does: a sequence that has ended is padded, and the last one ends the loop."""
    ids = torch.randint(5, 1000, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = Decoder(model, 2, 40).generate(ids, 12, stop=())
    assert plain.shape == (2, 21)
    first = [int(plain[0, 12]), int(plain[1, 14])]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = first, 0
    try:
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        found = Decoder(model, 2, 40).generate(ids, 12)
    finally:
        model.generation_config.eos_token_id = model.config.eos_token_id
        model.generation_config.pad_token_id = None
    assert torch.equal(found, expected) and found.shape[1] < 21


def test_decoding_of_less_than_nothing(model: PreTrainedModel) -> None:
    for wrong in (-1, 0):
        with pytest.raises(OptionError, match="nothing to generate"):
            Decoder(model, 1, 40).generate(torch.ones(1, 3, dtype=torch.long), wrong)


# ---- tasks --------------------------------------------------------------------------------------------------------------


def test_scores_are_in_one_unit() -> None:
    change = {"value": -0.1, "low": -0.15, "high": -0.05}
    cell = {
        "task": "piqa",
        "metric": "acc",
        "skip": 0.5,
        "realised": 0.5,
        "value": 0.5,
        "interval": [0.4, 0.6],
        "change": change,
    }
    made = show_results.tasks_table({"cells": [cell], "settings": "policy ace"})
    row = [str(column._cells[0]) for column in made.columns]
    assert row[4:] == ["50.00 % (40.0 – 60.0)", "-10.00 points (-15.0 … -5.0)"]


BAD_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "gold is a word": ("arc_easy", {"query": "a", "choices": ["b", "c"], "gold": "x"}),
    "gold is none of the choices": ("arc_easy", {"query": "a", "choices": ["b", "c"], "gold": 2}),
    "gold is negative": ("arc_easy", {"query": "a", "choices": ["b", "c"], "gold": -1}),
    "no choices": ("arc_easy", {"query": "a", "choices": [], "gold": 0}),
    "choices are a number": ("arc_easy", {"query": "a", "choices": 5, "gold": 0}),
    "choices are numbers": ("arc_easy", {"query": "a", "choices": [1, 2], "gold": 0}),
    "query is a number": ("arc_easy", {"query": 5, "choices": ["b", "c"], "gold": 0}),
    "text is a list": ("lambada", {"text": ["a b"]}),
    "solution is a number": ("piqa", {"goal": "a", "sol1": 1, "sol2": "b", "label": 0}),
    "label is a list": ("piqa", {"goal": "a", "sol1": "a", "sol2": "b", "label": [0]}),
}


@pytest.mark.parametrize(("task", "row"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_questions_that_cannot_be_asked(task: str, row: dict[str, Any], tmp_path: Path) -> None:
    """Said with file and line, before a model is loaded."""
    good = {"arc_easy": {"query": "a", "choices": ["b", "c"], "gold": 1}, "lambada": {"text": "a b"}}
    good["piqa"] = {"goal": "a", "sol1": "a", "sol2": "b", "label": 0}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, (good[task], row))))
    with pytest.raises(TaskError, match=r"rows\.jsonl, line 2"):
        read_rows(TASKS[task], path)
    path.write_text(json.dumps(good[task]))
    assert len(read_rows(TASKS[task], path)) == 1


def test_a_file_of_deep_questions(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("[" * 100_000)
    with pytest.raises(TaskError, match="JSON object"):
        read_rows(TASKS["piqa"], tmp_path / "rows.jsonl")


# ---- harnesses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_harnesses_that_run_code_do_not_get_any(name: str, tmp_path: Path) -> None:
    """EvalScope loads every checkpoint with trust_remote_code."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    assert folder_without_code(folder) == str(folder)
    found = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(found | {"auto_map": {"AutoConfig": "strange.Config"}}))
    with pytest.raises(IntegrationError, match="code from a checkpoint is not run"):
        folder_without_code(folder)


def test_the_extra_for_harnesses_brings_what_they_need() -> None:
    extra = re.search(r"^eval = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra is not None and '"accelerate' in extra[1]


# ---- make -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        (("3.11",), "3.11"),
        (("3.12",), "3.12"),
        (("3.13", "3.10"), "3.13"),
        (("3.13", "3.11"), "3.11"),
        ((), None),
        (("3.9",), None),
    ],
)
def test_make_takes_the_newest_python_there_is(there: tuple[str, ...], taken: str | None, tmp_path: Path) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    for version in there:
        (tmp_path / f"python{version}").write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / f"python{version}").chmod(0o755)
    for tool in ("sh", "echo"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    environment = {"PATH": str(tmp_path)}
    done = subprocess.run(
        [make, "-n", "setup", "VENV=no-such"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if taken is None:
        assert done.returncode != 0 and "Python 3.10 to 3.13" in done.stderr
    else:
        assert f"python{taken} -m venv no-such" in done.stdout, done.stderr
