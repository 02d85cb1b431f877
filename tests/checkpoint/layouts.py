"""Layouts that are not one tensor for each expert in a family's own names: (as published, what it means) as folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from format_cases import Dice, encode, mxfp4
from quantised import quantise, write
from safetensors.torch import load_file

import zoo

Layout = tuple[Path, Path]


def kimi(tmp: Path, **sizes: int) -> Layout:
    """DeepSeek-V3's code, experts as int4 in groups of 32, attention and shared experts plain."""
    return quantise(tmp, "deepseek_v3", lambda key, number: "int4", **sizes)


def gpt_oss(tmp: Path, **sizes: int) -> Layout:
    """One packed tensor for a layer, transposed in memory, gate and up rows in turns."""
    model = zoo.build("gpt_oss", **{"num_hidden_layers": 1, "num_local_experts": 4, "vocab_size": 260, **sizes})
    model.save_pretrained(tmp / "original")
    tensors = load_file(tmp / "original" / "model.safetensors")
    config = json.loads((tmp / "original" / "config.json").read_text())
    packed, plain = dict(tensors), dict(tensors)
    for key in [k for k, t in tensors.items() if t.dim() == 3]:
        experts, k, n = tensors[key].shape
        parts = [mxfp4(Dice(e), n, k) for e in range(experts)]
        del packed[key]
        packed[f"{key}_blocks"] = torch.stack([p["weight_packed"] for p, _ in parts]).unflatten(-1, (-1, 16))
        packed[f"{key}_scales"] = torch.stack([p["weight_scale"] for p, _ in parts])
        plain[key] = torch.stack([torch.from_numpy(m).float().T for _, m in parts])
    method = {"quantization_config": {"quant_method": "mxfp4"}}
    return write(tmp / "a", packed, config | method), write(tmp / "b", plain, config)


def qwen3_5(tmp: Path) -> Layout:
    """Fused names under a multimodal prefix, FP8 with the factors behind them."""
    model = zoo.build("qwen3_5_moe", num_experts=4, num_hidden_layers=2)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    tensors = {k.replace("model.", "model.language_model.", 1): v for k, v in model.state_dict().items()}
    packed, plain = dict(tensors), dict(tensors)
    for key in [k for k, t in tensors.items() if t.dim() == 3 and ".experts." in k]:
        parts = [encode("fp8 block", *tensors[key].shape[1:], seed=e) for e in range(4)]
        packed[key] = torch.stack([p["weight"] for p, _ in parts])
        packed[f"{key}_scale_inv"] = torch.stack([p["weight_scale_inv"] for p, _ in parts])
        plain[key] = torch.stack([torch.from_numpy(m).float() for _, m in parts])
    method = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    return write(tmp / "a", packed, config | method), write(tmp / "b", plain, config)


def gemma4(tmp: Path) -> Layout:
    """Unquantised, fused, beside a vision tower; against the text model alone."""
    from transformers.models.gemma4 import Gemma4Config, Gemma4ForConditionalGeneration

    text = zoo.build("gemma4", num_experts=4, num_hidden_layers=2)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    vision = {**sizes, "num_hidden_layers": 1}
    whole = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text.config.to_dict(), vision_config=vision))
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp / "a")
    text.save_pretrained(tmp / "b")
    return tmp / "a", tmp / "b"


OTHERS: dict[str, tuple[str, str, Callable[[Path], Layout]]] = {  # what is published → (family, format, how it is made)
    "Kimi-K2": ("deepseek_v3", "int4", kimi),
    "gpt-oss": ("gpt_oss", "mxfp4", gpt_oss),
    "Qwen3.5": ("qwen3_5_moe", "fp8 block", qwen3_5),
    "Gemma-4": ("gemma4", "plain", gemma4),
}
