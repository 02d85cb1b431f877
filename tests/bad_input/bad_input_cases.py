"""What the tests of bad input share: tiny models, the commands that are to refuse them, and what is checked every time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ace_moe.plan.file import OPENING, seal
from command import Ran

LAYERS, EXPERTS, TOP_K = 2, 8, 4
Refuse = Callable[..., str]
Tensors = dict[str, Tensor]
Damage = Callable[[Path], object]


def tiny_config(cls: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    sizes = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 512}
    experts = {"moe_intermediate_size": 8, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    return cls(**{**sizes, **heads, **(experts if cls is Qwen3MoeConfig else {}), "eos_token_id": 256, **changes})


def save_tokenizer(folder: Path, normalizer: normalizers.Normalizer | None = None) -> None:
    """One token a byte."""
    alphabet = {c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)


def save_moe(folder: Path, seed: int = 0, shard: str = "5GB", **changes: Any) -> Path:
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(tiny_config(Qwen3MoeConfig, **changes)).save_pretrained(folder, max_shard_size=shard)
    save_tokenizer(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(
    path: Path,
    tensors: Callable[[Tensors], object] = lambda t: None,
    meta: Callable[[dict[str, Any]], object] = lambda m: None,
) -> None:
    """Change a plan behind its back, under a checksum that is right; `tensors` and `meta` change what they are given."""
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        ace = json.loads(file.metadata()["ace"])
    tensors(found)
    meta(ace)
    data = save(found, metadata={"ace": json.dumps(ace)})
    path.write_bytes(seal(data) if data[8:].startswith(OPENING) else data)


def run_arguments(model: Path, plan: Path) -> tuple[object, ...]:
    return ("run", model, "-p", plan, "--prompt", "All that", "--max-new-tokens", 2, "--device", "cpu")


def budget_arguments(model: Path, plan: Path, text: Path, budgets: str = "0.5") -> tuple[object, ...]:
    sizes = ("--window", 64, "--tokens", 256, "--device", "cpu")
    return ("plan", model, "-p", plan, "--text", text, "--budgets", budgets, *sizes)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file, hidden ones too, with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def paragraph(ran: Ran) -> str:
    """The one line of ours: last on stderr, alone, with exit code 1 and nothing on stdout."""
    assert ran.code == 1, ran
    assert ran.out == "", ran
    assert "Traceback" not in ran.err, ran.err
    lines = [line for line in ran.err.splitlines() if line.strip()]
    assert [line.startswith("error: ") for line in lines].count(True) == 1, ran.err
    assert lines[-1].startswith("error: "), ran.err
    return lines[-1].removeprefix("error: ")
