"""Models in memory: packed experts go through the same formats, or are refused before anything touches them."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from quantised import quantise, small
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ace_moe import ACE, build_plan
from ace_moe.checkpoint import MoEModel
from ace_moe.checkpoint.loading import load_model
from ace_moe.errors import CheckpointError
from ace_moe.tables import PAPER


def as_on_a_gpu(folder: Path) -> PreTrainedModel:
    """FP8 experts stay FP8 only where transformers sees a GPU that has it; reading them needs none."""
    with patch("torch.cuda.is_available", lambda: True), patch("torch.cuda.get_device_capability", lambda *_: (9, 0)):
        return AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")


def test_loaded_fp8_experts_keep_their_factors(tmp_path: Path) -> None:
    """The tables were those of the codes: every factor was dropped without a word."""
    packed, _ = quantise(tmp_path, "qwen3_moe", lambda key, number: "fp8 block")
    model = as_on_a_gpu(packed)
    experts = model.model.layers[0].mlp.experts
    assert type(experts).__name__ == "FP8Experts" and experts.gate_up_proj.dtype == torch.float8_e4m3fn
    memory, disk = build_plan(model, PAPER), build_plan(packed, PAPER)
    for key, layer in disk.tables.items():
        for name, values in layer.items():
            torch.testing.assert_close(memory.tables[key][name], values, rtol=1e-5, atol=0)
    assert memory.fingerprint == disk.fingerprint
    assert {n for names in MoEModel.of(model).formats().values() for n in names} == {"fp8 by block"}


def test_ragged_fp8_that_transformers_gets_wrong(tmp_path: Path) -> None:
    """It takes the block's size as rows / rows of factors: other numbers, no error. Expanded here they are right."""
    import json

    packed, plain = quantise(tmp_path, "qwen3_moe", lambda key, number: "fp8 block")
    from format_cases import Dice, fp8_block
    from quantised import EXPERT, write
    from safetensors.torch import load_file

    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [24, 64]
    tensors, meant = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    for number, key in enumerate(k for k in list(meant) if EXPERT.search(k)):
        n, k = meant[key].shape
        made, _ = fp8_block(Dice(number), n, k)
        scale = Dice(number).factors((-(-n // 24), -(-k // 64)), 1e-3)
        spread = scale.repeat_interleave(24, 0)[:n].repeat_interleave(64, 1)[:, :k]
        tensors |= {key: made["weight"], f"{key}_scale_inv": scale}
        meant[key] = made["weight"].float() * spread
    write(packed, tensors, config)
    write(plain, meant, json.loads((plain / "config.json").read_text()))
    with pytest.raises(CheckpointError, match="--expand"):
        load_model(packed, "cpu")
    right = build_plan(plain, PAPER).tables["0"]
    for found in (
        build_plan(packed, PAPER),
        build_plan(load_model(packed, "cpu", dtype="float32", expand=True), PAPER),
    ):
        torch.testing.assert_close(found.tables["0"]["gsp"], right["gsp"], rtol=1e-5, atol=0)


class Subclass(Tensor):
    """A tensor that says it is what it is not."""


def with_experts(change: object) -> PreTrainedModel:
    model = small("qwen3_moe")
    change(model.model.layers[1].mlp)  # type: ignore[operator]
    return model


def raw(dtype: torch.dtype) -> object:
    def change(block: nn.Module) -> None:
        codes = torch.ones(block.experts.gate_up_proj.shape, dtype=dtype)
        block.experts.gate_up_proj = nn.Parameter(codes, requires_grad=False)

    return change


def subclassed(block: nn.Module) -> None:
    block.experts.down_proj = nn.Parameter(block.experts.down_proj.detach().as_subclass(Subclass), requires_grad=False)


def renamed(name: str) -> object:
    def change(block: nn.Module) -> None:
        block.experts.__class__ = type(name, (type(block.experts),), {})

    return change


def unfused(block: nn.Module) -> None:
    block.experts = nn.ModuleList([nn.Linear(4, 4)])


def scaled(block: nn.Module) -> None:
    block.experts.gate_up_proj.data *= 15000


REFUSED = {
    "int8 codes": (raw(torch.int8), "gate_up_proj is I8"),
    "uint8 codes": (raw(torch.uint8), "gate_up_proj is U8"),
    "fp8 codes": (raw(torch.float8_e4m3fn), "gate_up_proj is F8_E4M3"),
    "a tensor subclass": (subclassed, "down_proj is a Subclass"),
    "GGUF blocks": (renamed("GgufExperts"), r"GgufConfig\(dequantize=True\)"),
    "MXFP4 of Triton": (renamed("Mxfp4GptOssExperts"), r"Mxfp4Config\(dequantize=True\)"),
    "a list of experts": (unfused, "ModuleList"),
    "a lost factor": (scaled, "rms of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_work(case: str) -> None:
    change, says = REFUSED[case]
    model = with_experts(change)
    with pytest.raises(CheckpointError, match=says):
        build_plan(model, PAPER)


@pytest.mark.parametrize("case", [c for c in REFUSED if c != "a lost factor"])
def test_nothing_is_attached_to_them(case: str) -> None:
    plan = build_plan(small("qwen3_moe"), PAPER)
    with pytest.raises(CheckpointError, match=REFUSED[case][1]):
        ACE(plan).attach(with_experts(REFUSED[case][0]))


def test_torchao_parameters_say_what_they_mean() -> None:
    """Its tensors say they are bf16; the class tells, and can undo it."""
    kind = type(
        "Float8Tensor",
        (Tensor,),
        {"__module__": "torchao.quantization", "dequantize": lambda self: self.as_subclass(Tensor) * 2},
    )

    def change(block: nn.Module) -> None:
        half = (block.experts.down_proj.detach() / 2).as_subclass(kind)
        block.experts.down_proj = nn.Parameter(half, requires_grad=False)

    found, wanted = build_plan(with_experts(change), PAPER), build_plan(small("qwen3_moe"), PAPER)
    for name, values in wanted.tables["1"].items():
        torch.testing.assert_close(found.tables["1"][name], values, rtol=1e-5, atol=0)
