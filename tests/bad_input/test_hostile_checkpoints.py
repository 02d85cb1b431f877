"""A checkpoint from a stranger: its code is never run, it names no file outside its folder, and it makes no command wait."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from bad_input_cases import Refuse, edit_config, paragraph, run_arguments, snapshot

from ace_moe.checkpoint import resolve
from ace_moe.checkpoint.loading import load_model, load_tokenizer
from ace_moe.errors import CheckpointError, TextError
from command import run_ace, start_ace

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Config(PretrainedConfig):
    model_type = "stranger"
class Tokens(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that exists once code in the checkpoint `single` has run; at the terminal is somebody who says yes."""
    path = tmp_path / "the code has run"
    (single / "strange.py").write_text(CODE.format(marker=str(path)))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return path


@pytest.mark.parametrize("command", ["tables", "run"])
def test_code_of_an_unknown_architecture(command: str, single: Path, plan: Path, marker: Path, refuse: Refuse) -> None:
    """transformers would ask on the terminal, and run it on a yes."""
    edit_config(single, model_type="stranger", auto_map={"AutoConfig": "strange.Config"})
    arguments = ("plan", single, "--tables", "-o", plan) if command == "tables" else run_arguments(single, plan)
    refuse(*arguments, says=("code from the checkpoint is not run",))
    assert not marker.exists()


def test_code_of_a_model_that_transformers_knows(single: Path, marker: Path) -> None:
    """Its own class is taken, whatever the checkpoint offers beside it."""
    edit_config(single, auto_map={"AutoModelForCausalLM": "strange.Config"})
    load_model(single, device="cpu")
    assert not marker.exists()


def test_code_of_a_tokenizer(single: Path, marker: Path) -> None:
    """Beside a model that transformers knows, so that loading gets as far as the tokenizer."""
    edit_config(single, model_type="afmoe")  # has no tokenizer class of its own in transformers
    path = single / "tokenizer_config.json"
    changes = {"auto_map": {"AutoTokenizer": ["strange.Tokens", None]}, "tokenizer_class": "StrangeTokens"}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with suppress(TextError):
        load_tokenizer(single)
    assert not marker.exists()


@pytest.mark.parametrize("how", ["..", "absolute", "deep"])
def test_index_that_leads_out_of_the_folder(
    how: str, sharded: Path, plan: Path, tmp_path: Path, refuse: Refuse
) -> None:
    """The file is there and is a good shard: only its place is wrong."""
    index = sharded / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    name = next(iter(found["weight_map"].values()))
    shutil.copy(sharded / name, tmp_path / name)
    outside = {"..": f"../{name}", "absolute": str(tmp_path / name), "deep": f"a/../../{name}"}[how]
    (sharded / "a").mkdir()
    found["weight_map"] = {key: outside if file == name else file for key, file in found["weight_map"].items()}
    index.write_text(json.dumps(found))
    says = ("outside the folder", outside, "download it again")
    refuse("plan", sharded, "--tables", "-o", plan, says=says)
    refuse(*run_arguments(sharded, plan), says=says)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_pipe_in_the_folder(name: str, single: Path, plan: Path) -> None:
    """Refused before any of the readers below opens it."""
    (single / name).unlink()
    os.mkfifo(single / name)
    for arguments in (("plan", single, "--tables", "-o", plan), ("inspect", single), run_arguments(single, plan)):
        paragraph_of(single, name, arguments)


def test_device_in_the_folder(single: Path, plan: Path) -> None:
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").symlink_to("/dev/zero")
    paragraph_of(single, "model.safetensors", ("plan", single, "--tables", "-o", plan))


def paragraph_of(folder: Path, name: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises(CheckpointError, match=f"holds {name}, which is neither a file nor a folder"):
        resolve(folder)  # what would wait for ever in this process is not tried before this is sure
    assert "neither a file nor a folder" in paragraph(run_ace(*arguments))


@pytest.mark.slow
def test_pipe_as_a_shard_does_not_hang(single: Path, plan: Path) -> None:
    """As a process: reading a pipe waits for ever, in code that Ctrl-C does not reach."""
    os.mkfifo(single / "more.safetensors")
    assert "more.safetensors" in paragraph(start_ace("plan", single, "--tables", "-o", plan, timeout=120))


def test_link_that_leads_nowhere_is_a_missing_file(single: Path, plan: Path, refuse: Refuse) -> None:
    """As a half-finished download of the hub leaves it."""
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").symlink_to(single / "blob")
    refuse("plan", single, "--tables", "-o", plan, says=("single", "download it again"))
    assert "blob" not in snapshot(single)
