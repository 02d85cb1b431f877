"""A MODEL that is sound but cannot be used, a MODEL that is not there, and a device that is not there are named as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bad_input_cases import Refuse, edit_config, paragraph, run_arguments

from command import start_ace


@pytest.mark.parametrize("command", ["tables", "inspect", "run"])
def test_dense_model(command: str, originals: Path, plan: Path, refuse: Refuse) -> None:
    """A model without experts has nothing to skip, whatever is asked of it."""
    model = originals / "dense"
    arguments = {"tables": ("plan", model, "--tables", "-o", plan), "inspect": ("inspect", model)}
    says = ("LlamaForCausalLM", "no routed experts", "Mixture-of-Experts")
    refuse(*arguments.get(command, run_arguments(model, plan)), says=says)


@pytest.mark.parametrize("method", ["aqlm", "nonsense"])
def test_configuration_of_a_format_that_the_files_are_not_in(
    method: str, single: Path, plan: Path, refuse: Refuse
) -> None:
    edit_config(single, quantization_config={"quant_method": method, "bits": 4})
    says = (method, "says the model is quantised", "no tensor is: model.layers.0.mlp.experts.0.", "download the folder")
    refuse("plan", single, "--tables", "-o", plan, says=says)


def test_quantised_checkpoint_whose_library_is_not_installed(single: Path, plan: Path, refuse: Refuse) -> None:
    """transformers raises ImportError here."""
    edit_config(single, quantization_config={"quant_method": "aqlm", "bits": 4})
    refuse(*run_arguments(single, plan), says=("could not be loaded", "install"))


@pytest.mark.parametrize("change", [{"hidden_act": "nonsense"}, {"num_attention_heads": 0}, {"architectures": 5}])
def test_configuration_that_no_model_can_have(change: dict[str, Any], single: Path, plan: Path, refuse: Refuse) -> None:
    edit_config(single, **change)
    refuse("plan", single, "--tables", "-o", plan, says=("config.json", "single"))


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where/at/all", "~nobody-here/model", "a" * 300])
def test_model_that_is_no_folder(name: str, plan: Path, refuse: Refuse) -> None:
    """A path with a typing error, a user that does not exist, a name the file system refuses."""
    for arguments in (("plan", name, "--tables", "-o", plan), ("inspect", name), run_arguments(Path(name), plan)):
        message = refuse(*arguments, says=())
        assert "Give a folder" in message or "give the path" in message or "Check its path" in message


def test_model_that_is_a_file(single: Path, plan: Path, refuse: Refuse) -> None:
    refuse(
        "plan", single / "model.safetensors", "--tables", "-o", plan, says=("not a checkpoint folder", "Give a folder")
    )


@pytest.mark.long
def test_hub_name_that_cannot_be_fetched(plan: Path, tmp_path: Path) -> None:
    """As a process: the hub is off, as it is on a machine without network."""
    ran = start_ace("plan", "nobody/nothing-moe", "--tables", "-o", plan, env={"HF_HOME": str(tmp_path / "hub")})
    message = paragraph(ran)
    assert all(word in message for word in ("nobody/nothing-moe", "could not be fetched", "Check the name"))


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta", "0:0"])
def test_device_that_is_not_there(device: str, single: Path, plan: Path, refuse: Refuse) -> None:
    for arguments in (("plan", single, "--tables", "-o", plan), run_arguments(single, plan)):
        refuse(*arguments, "--device", device, says=(device, "cannot be used here", "--device cpu"))


def test_brackets_in_a_path_are_no_markup(plan: Path, refuse: Refuse) -> None:
    """`[/x]` would end a style that never began, which the printer answers with an exception."""
    refuse("plan", "[/x] [bold]", "--tables", "-o", plan, says=("[/x] [bold]", "give the path"))
