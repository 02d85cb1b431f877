"""Experts whose numbers cannot be told are refused by tensor name and dtype, before any table is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from format_cases import BLOCK, CT, encode
from quantised import EXPERT, small, write
from safetensors.torch import load_file
from torch import Tensor

from ace_moe.checkpoint import MoEModel
from ace_moe.errors import CheckpointError
from command import run_ace

BARE: dict[str, Tensor] = {  # experts of this dtype …
    "F8_E4M3": torch.ones(32, 64).to(torch.float8_e4m3fn),
    "F8_E5M2": torch.ones(32, 64).to(torch.float8_e5m2),
    "I8": torch.ones(32, 64, dtype=torch.int8),
    "U8": torch.ones(32, 32, dtype=torch.uint8),
    "I32": torch.ones(32, 8, dtype=torch.int32),
    "F4": torch.ones(32, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
}
BESIDE: dict[str, dict[str, Tensor]] = {  # … with this beside them
    "nothing": {},
    "input_scale only": {"input_scale": torch.ones(1)},
    "an unknown name": {"weight_factor_scale": torch.ones(32, 1)},
    "factors of another shape": {"weight_scale": torch.ones(7, 5)},
    "codes for factors": {"weight_scale": torch.ones(32, 1, dtype=torch.int32)},
    "a codebook": {"codebook": torch.ones(16), "lut": torch.ones(16)},
}


def without(case: str, *parts: str) -> dict[str, Tensor]:
    return {name: t for name, t in encode(case, 32, 64)[0].items() if name not in parts}


def other(case: str, **parts: Tensor) -> dict[str, Tensor]:
    return encode(case, 32, 64)[0] | parts


DAMAGED: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {  # formats with something missing, or one thing too many
    "packed int4 without factors": (without("int4", "weight_scale"), CT),
    "packed int4 without a shape": (without("int4", "weight_shape"), CT),
    "packed fp4 without factors": (without("mxfp4", "weight_scale"), CT),
    "nvfp4 without its whole factor": (without("nvfp4", "weight_global_scale"), CT),
    "nvfp4 of ModelOpt without its whole factor": (without("nvfp4 of ModelOpt", "weight_scale_2"), {}),
    "nvfp4 with both": (other("nvfp4", weight_scale_2=torch.ones(1)), CT),
    "nvfp4 with swizzled factors": (other("nvfp4", weight_scale=torch.ones(128, 4).to(torch.float8_e4m3fn)), CT),
    "mxfp6": (other("mxfp4", weight_packed=torch.ones(32, 48, dtype=torch.uint8)), CT),
    "gptq without zero points": (without("gptq", "qzeros"), {"quant_method": "gptq"}),
    "gptq without factors": (without("gptq", "scales"), {"quant_method": "gptq"}),
    "gptq of 3 bit": (other("gptq", qzeros=torch.ones(2, 3, dtype=torch.int32)), {"quant_method": "gptq"}),
    "gptq in words of 16 bit": (other("gptq", qweight=torch.ones(16, 32, dtype=torch.int16)), {"quant_method": "gptq"}),
    "awq gemv": (encode("awq", 32, 64)[0], {"quant_method": "awq", "version": "gemv"}),
    "awq without factors": (without("awq", "scales"), {"quant_method": "awq"}),
    "bitsandbytes without its state": (without("bitsandbytes nf4", "weight.quant_state.bitsandbytes__nf4"), {}),
    "bitsandbytes without absmax": (without("bitsandbytes nf4", "weight.absmax"), {}),
    "bitsandbytes nested without the inner part": (without("bitsandbytes nf4 nested", "weight.nested_absmax"), {}),
    "bitsandbytes int8 without SCB": (without("bitsandbytes int8", "SCB"), {}),
    "torchao without the file's word": (encode("torchao int8", 32, 64)[0], {"quant_method": "torchao"}),
    "torchao without factors": (without("torchao int8", "_weight_scale"), {"quant_method": "torchao"}),
    "fp8 with a factor for activations to fold in": (other("fp8 channel", pre_quant_scale=torch.ones(64)), {}),
    "fp8 blocks of a size nobody names": (encode("fp8 block", 32, 64)[0], {}),
    "fp8 blocks of another size than the config's": (encode("fp8 block", 32, 64)[0], {"weight_block_size": [48, 48]}),
    "DeepSeek's fp4 with factors of fp8": (other("fp4 of DeepSeek-V4", scale=torch.ones(1, 1).to(torch.float8_e8m0fnu)), {}),
    "sparse": ({"compressed": torch.ones(9), "bitmask": torch.ones(32, 8, dtype=torch.uint8)}, CT),
    "marlin": ({"weight_packed": torch.ones(4, 64, dtype=torch.int32), "scale_packed": torch.ones(2, 32)}, CT),
    "gpt-oss blocks without factors": ({"weight_blocks": torch.ones(32, 2, 16, dtype=torch.uint8)}, {"quant_method": "mxfp4"}),
    "plain and packed": (other("int4", weight=torch.ones(32, 64)), CT),
    "plain with factors": ({"weight": torch.ones(32, 64), "weight_scale": torch.ones(32, 1)}, {}),
    "a config and nothing else": ({"weight": torch.ones(32, 64)}, BLOCK),
    "a config of gptq and nothing else": ({"weight": torch.ones(32, 64).bfloat16()}, {"quant_method": "gptq", "bits": 4}),
}  # fmt: skip


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("original")
    small("qwen3_moe").save_pretrained(folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def replaced(tmp: Path, original: tuple[dict, dict], parts: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """One gate projection in a hundred is enough."""
    tensors, settings = dict(original[0]), dict(original[1])
    key = next(k for k in sorted(tensors) if EXPERT.search(k) and "gate_proj" in k)
    del tensors[key]
    tensors |= {key.removesuffix("weight") + name: t for name, t in parts.items()}
    return write(tmp / "model", tensors, settings | ({"quantization_config": config} if config else {}))


NAMED = r"layers\.0\.mlp\.experts\.0\.gate_proj\.?\w*"


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("dtype", BARE)
def test_codes_without_known_companions(dtype: str, beside: str, tmp_path: Path, original: tuple[dict, dict]) -> None:
    for config in ({}, BLOCK):
        folder = replaced(tmp_path, original, {"weight": BARE[dtype], **BESIDE[beside]}, config)
        with pytest.raises(CheckpointError, match=NAMED + rf".* {dtype} ") as refused:
            MoEModel.open(folder)
        assert "silently wrong" in str(refused.value)


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_formats(damage: str, tmp_path: Path, original: tuple[dict, dict]) -> None:
    parts, config = DAMAGED[damage]
    with pytest.raises(CheckpointError, match=NAMED):
        moe = MoEModel.open(replaced(tmp_path, original, parts, config))
        for layer in moe.layers():
            layer.w_in[:]


def test_there_are_enough_cases() -> None:
    assert len(BARE) * len(BESIDE) + len(DAMAGED) >= 40


def test_the_command_fails_and_writes_nothing(tmp_path: Path, original: tuple[dict, dict]) -> None:
    folder = replaced(tmp_path, original, {"weight": BARE["F8_E4M3"]}, {})
    done = run_ace("plan", folder, "--tables", "-o", tmp_path / "plan.safetensors")
    assert done.code == 1 and "gate_proj.weight is F8_E4M3 [32, 64]" in " ".join(done.err.split())
    assert not (tmp_path / "plan.safetensors").exists()
