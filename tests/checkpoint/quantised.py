"""A tiny model's checkpoint in a family's real names with its experts in any format, and the same with what they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from format_cases import CASES, encode, metadata
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import zoo

EXPERT = re.compile(r"\.experts\.(\d+)\.\w+\.weight$")
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2", "olmoe")  # one tensor for each expert


def small(family: str, **sizes: int) -> PreTrainedModel:
    few = {"num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4}
    names = set(type(zoo.build(family).config).__dataclass_fields__)
    more = {k: v for k, v in few.items() if k in names} | (
        {"n_group": 1, "topk_group": 1} if "n_group" in names else {}
    )
    if family == "deepseek_v4":  # a hash layer of zeros sends every slot of a token to one expert
        more["mlp_layer_types"] = ["hash_moe", "moe"]
    return zoo.build(family, **{"num_hidden_layers": 2, "vocab_size": 260, **more, **sizes})


def write(folder: Path, tensors: dict[str, Tensor], config: dict, files: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors", files or None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantise(
    tmp: Path, family: str, case_of: Callable[[str, int], str], config: dict | None = None, **sizes: int
) -> tuple[Path, Path]:
    """(quantised, plain) folders; `case_of` gives the format of each expert's matrix by its name and number."""
    small(family, **sizes).save_pretrained(tmp / "original")
    tensors = load_file(tmp / "original" / "model.safetensors")
    settings = json.loads((tmp / "original" / "config.json").read_text())
    packed, plain, files = dict(tensors), dict(tensors), {"format": "pt"}
    for number, (key, tensor) in enumerate(sorted(tensors.items())):
        if not EXPERT.search(key):
            continue
        case = case_of(key, number)
        if case == "plain":
            continue
        made, meant = encode(case, *tensor.shape, seed=number)
        del packed[key]
        packed |= {key.removesuffix("weight") + part: t for part, t in made.items()}
        plain[key] = torch.from_numpy(meant).float()
        files |= metadata(case, key, tensor.shape[1])
    chosen = CASES[case_of("", 0)][2] if config is None else config
    quantised = {**settings, **({"quantization_config": chosen} if chosen else {})}
    return write(tmp / "packed", packed, quantised, files), write(tmp / "plain", plain, settings)
