"""Loading a model and its tokenizer for the commands, with errors of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .checkpoint import resolve
from .checkpoint.model import load_config
from .checkpoint.source import locate
from .checkpoint.structure import model_class
from .errors import CheckpointError, TextError
from .text import Windows, cut, read_text


def load_model(model: str | Path, device: str | None = None, dtype: str = "auto") -> PreTrainedModel:
    """The model in its own precision on one device (the GPU if there is one)."""
    folder = resolve(model)
    config = load_config(folder)
    locate(folder)  # a missing shard is reported before gigabytes are read
    causal = type(config) in AutoModelForCausalLM._model_mapping
    cls = AutoModelForCausalLM if causal else model_class(config)
    try:
        loaded = cls.from_pretrained(folder, dtype=dtype, use_safetensors=True)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{model} could not be loaded ({str(error).splitlines()[0]}).") from error
    return loaded.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def load_tokenizer(model: str | Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(resolve(model))
    except (OSError, ValueError, KeyError) as error:
        raise TextError(
            f"{model} has no usable tokenizer ({str(error).splitlines()[0]}). Put its tokenizer files into the folder."
        ) from error


def load_windows(model: PreTrainedModel, tokenizer: Any, text: str | Path, window: int, tokens: int | None) -> Windows:
    """The text file as windows of this model's tokens."""
    vocabulary = model.get_input_embeddings().num_embeddings
    return cut(read_text(text), tokenizer, window, tokens, vocabulary, Path(text).name)


@torch.inference_mode()
def generate(model: PreTrainedModel, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    """The prompt's greedy continuation."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    made = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
