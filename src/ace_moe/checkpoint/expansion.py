"""A quantised checkpoint as an unquantised model: every format decoded here, names and fusions left to transformers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from ..errors import AceError, CheckpointError
from .formats import PLAIN, Stored
from .identity import distance
from .model import MoEModel
from .shards import Shards, read_headers
from .source import CheckpointSource, locate
from .structure import hollow_twin, model_class

ROUNDED = 0.01  # bf16 rounds by 0.002, fp16 loses small weights


@dataclass(frozen=True)
class Decoded:
    """A tensor that is read and decoded when the loader takes it, as it takes slices of files."""

    stored: Stored
    shards: Shards

    def __getitem__(self, everything: Any) -> Tensor:
        return self.stored.read(self.shards.slice)


def expand_model(folder: Path, config: PretrainedConfig, dtype: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model decoded, in its configuration's precision; also transformers' report of what was missing."""
    causal = AutoModelForCausalLM._model_mapping
    cls = causal[type(config)] if type(config) in causal else model_class(config)
    source = CheckpointSource(folder, hollow_twin(config, cls))
    source.check_all()
    for part in (config, config.get_text_config()):  # nothing in the model that is made is quantised any more
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    with Shards(source.files) as shards:
        state = {name: Decoded(stored, shards) for name, stored in source.stored.items()}
        precision = config.dtype or torch.bfloat16 if dtype == "auto" else dtype
        model, report = cls.from_pretrained(
            None, config=config, state_dict=state, dtype=precision, output_loading_info=True
        )
    config._name_or_path = str(folder)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, report


def is_packed(folder: Path) -> bool:
    """True if a checkpoint has tensors that are not plain numbers."""
    headers, _ = read_headers(locate(folder))
    return any(header.dtype not in (*PLAIN, "I64", "BOOL") for header in headers.values())


def check_loaded(model: PreTrainedModel, folder: Path) -> None:
    """Refuse experts that are not those on disk: several formats load without an error and with other numbers."""
    memory = MoEModel.of(model)
    try:
        disk = MoEModel.open(folder)
    except AceError as error:
        warnings.warn(f"Whether the model was loaded as it is stored could not be checked: {error}", stacklevel=2)
        return
    apart, where = distance(memory.sites, memory.source, disk.source)
    if not apart <= ROUNDED:
        raise CheckpointError(
            f"transformers loads {folder} with other numbers than it holds: {where} is {apart:.2g} away, relative to its size. "
            "--expand (expand=True) decodes this format."
        )
