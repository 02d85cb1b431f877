"""A checkpoint that is damaged, incomplete or full of NaN is refused before anything is built from it or run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input_cases import Damage, Refuse, Tensors, budget_arguments, edit_config, run_arguments
from safetensors.torch import load_file, save_file

from ace_moe.errors import ModelError
from ace_moe.mapping.fit import Histogram


def shard_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def drop(*parts: str) -> Callable[[Path], None]:
    """Leave out every tensor whose name has one of the parts."""

    def damage(folder: Path) -> None:
        def change(tensors: Tensors) -> None:
            for name in [n for n in tensors if any(part in n for part in parts)]:
                del tensors[name]

        edit_tensors(folder, change)

    return damage


def all_in_one_shard(index: dict[str, Any]) -> dict[str, Any]:
    first = next(iter(index["weight_map"].values()))
    return index | {"weight_map": dict.fromkeys(index["weight_map"], first)}


ROUTER, NORM = "model.layers.1.mlp.gate.weight", "model.layers.1.post_attention_layernorm.weight"
EXPERT = "model.layers.1.mlp.experts.3."
SHARDED = {
    "missing shard": (lambda f: shard_of(f, ROUTER).unlink(), ("misses 1 of", "Finish the download")),
    "index is no JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"), ("index.json", "download it")),
    "index is binary": (
        lambda f: (f / "model.safetensors.index.json").write_bytes(b"\xff\xfe\x00"),
        ("index.json", "download it"),
    ),
    "index without map": (lambda f: edit_index(f, lambda i: {}), ("weight_map", "download it again")),
    "index is a list": (lambda f: edit_index(f, lambda i: []), ("index.json", "download it again")),
    "map is a list": (lambda f: edit_index(f, lambda i: {"weight_map": ["a"]}), ("index.json", "download it again")),
    "map of numbers": (
        lambda f: edit_index(f, lambda i: {"weight_map": {"a": 5}}),
        ("index.json", "download it again"),
    ),
    "tensor in another shard": (lambda f: edit_index(f, all_in_one_shard), ("download it again",)),
}
SINGLE = {
    "no safetensors": (lambda f: (f / "model.safetensors").unlink(), ("no .safetensors file", "save_pretrained")),
    "no config.json": (lambda f: (f / "config.json").unlink(), ("no usable config.json", "must be a transformers")),
    "config.json is no JSON": (lambda f: (f / "config.json").write_text("{"), ("config.json", "must be")),
    "config.json is a list": (lambda f: (f / "config.json").write_text("[]"), ("config.json", "must be")),
    "number is a word": (lambda f: edit_config(f, num_hidden_layers="two"), ("config.json", "must be")),
    "unknown architecture": (lambda f: edit_config(f, model_type="nonsense"), ("nonsense", "must be")),
    "no experts tensor": (drop("layers.1.mlp.experts."), ("no tensor for", "download it again")),
    "one expert missing": (drop(EXPERT), ("download",)),
    "half an expert missing": (drop(EXPERT + "down_proj"), ("download",)),
    "no router": (drop(ROUTER), (ROUTER, "download it again")),
    "no norm": (drop(NORM), (NORM, "download it again")),
    "config of another size": (lambda f: edit_config(f, num_experts=16, num_local_experts=16), ("download",)),
    "empty safetensors": (lambda f: (f / "model.safetensors").write_bytes(b""), ("truncated", "download it again")),
}


def cases(table: dict[str, tuple[Damage, tuple[str, ...]]]) -> Any:
    return pytest.mark.parametrize(("damage", "says"), table.values(), ids=table)


@cases(SHARDED)
def test_sharded_checkpoint(damage: Damage, says: tuple[str, ...], sharded: Path, plan: Path, refuse: Refuse) -> None:
    """Found by `tables`, which reads a layer at a time, and by `run`, which loads it all."""
    damage(sharded)
    refuse("plan", sharded, "--tables", "-o", plan, says=says)
    refuse(*run_arguments(sharded, plan), says=("sharded", "download"))


@cases(SINGLE)
def test_single_checkpoint(damage: Damage, says: tuple[str, ...], single: Path, plan: Path, refuse: Refuse) -> None:
    """Above all: `run` must not go on with random numbers in place of a tensor that is not there."""
    damage(single)
    refuse("plan", single, "--tables", "-o", plan, says=says)
    refuse(*run_arguments(single, plan), says=("single",))


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 0.5, -1])
def test_truncated_shard(keep: float, sharded: Path, plan: Path, refuse: Refuse) -> None:
    """A download that stopped: in the header's length, in the header, in the data, one byte short."""
    path = shard_of(sharded, ROUTER)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    refuse("plan", sharded, "--tables", "-o", plan, says=(path.name, "truncated or damaged", "download it again"))
    refuse(*run_arguments(sharded, plan), says=("download it again",))


def test_missing_tensor_outside_the_moe_layers(single: Path, plan: Path, refuse: Refuse) -> None:
    """The tables never read attention, so only loading can notice; transformers would fill it with random numbers."""
    drop("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj")(single)
    refuse(*run_arguments(single, plan), says=("q_proj", "and 1 more", "download it again"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tensor", [ROUTER, NORM, EXPERT + "up_proj.weight", EXPERT + "down_proj.weight"])
def test_weights_that_are_no_numbers(value: float, tensor: str, single: Path, plan: Path, refuse: Refuse) -> None:
    """One bad value among thousands; a table made of it, or left out because of it, would be silently wrong."""
    edit_tensors(single, lambda tensors: tensors[tensor].view(-1)[5].fill_(value))
    refuse("plan", single, "--tables", "-o", plan, says=("Layer 1", "NaN", "infinite", "download it again"))


def test_budget_of_a_model_that_gives_nan(single: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    """The plan is of the sound weights and routers are untouched, so the pass itself has to notice."""
    edit_tensors(single, lambda t: t["model.layers.0.mlp.experts.1.down_proj.weight"].fill_(float("nan")))
    edit_tensors(single, lambda t: t["model.layers.0.self_attn.o_proj.weight"].fill_(float("nan")))
    refuse(*budget_arguments(single, plan, text), says=("NaN", "download it again"))
    seen = Histogram()
    seen.add(torch.tensor([[0.5, float("nan")]]))
    with pytest.raises(ModelError, match="NaN"):
        seen.threshold(0.5)
