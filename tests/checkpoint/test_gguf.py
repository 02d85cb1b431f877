"""GGUF files give the layers of the model they were made from: names, norms, turned and interleaved experts, splits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import zoo
from ace_moe import build_plan
from ace_moe.checkpoint import MoEModel
from ace_moe.errors import CheckpointError

gguf = pytest.importorskip("gguf")
F32 = gguf.GGMLQuantizationType.F32


def tensors_of(model: PreTrainedModel, norm: str) -> dict[str, torch.Tensor]:
    """As llama.cpp's converter lays MoE layers out: halves apart, [out, in], norms as what they multiply by."""
    found = {}
    moe = MoEModel.of(model)
    for site, layer in zip(moe.sites, moe.layers(), strict=True):
        parts, block = layer.projections(slice(None)), f"blk.{site.key}"
        halves = {"gate": parts.gate, "up": parts.up, "down": parts.down}
        found |= {f"{block}.ffn_{name}_exps.weight": t for name, t in halves.items()}
        found[f"{block}.{norm}.weight"] = layer.norm_scale
        router = dict(site.router.named_parameters())
        real = dict(model.get_submodule(site.router_path).named_parameters())
        found[f"{block}.ffn_gate_inp.weight"] = real["weight"].detach()
        if "bias" in router:
            found[f"{block}.ffn_gate_inp.bias"] = real["bias"].detach()
        if layer.b_in is not None:
            gate, up = (layer.b_in[:, ::2], layer.b_in[:, 1::2]) if layer.interleaved else layer.b_in.chunk(2, 1)
            found |= {f"{block}.ffn_gate_exps.bias": gate, f"{block}.ffn_up_exps.bias": up}
            found[f"{block}.ffn_down_exps.bias"] = layer.b_out
    return found


def write(path: Path, model: PreTrainedModel, tensors: dict, kind: object = F32) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for name, tensor in tensors.items():
        data = tensor.detach().float().contiguous().numpy()
        if "exps.weight" in name:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (path.parent / "config.json").write_text(json.dumps(config))
    return path


def assert_same_plan(found: object, wanted: object, rtol: float = 1e-5) -> None:
    for key, layer in wanted.tables.items():
        for name, values in layer.items():
            torch.testing.assert_close(found.tables[key][name], values, rtol=rtol, atol=0)
    assert found.fingerprint.same_routers(wanted.fingerprint), "one plan serves both"


FAMILIES = {
    "qwen3_moe": "ffn_norm",
    "olmoe": "ffn_norm",
    "mixtral": "ffn_norm",
    "qwen3_next": "post_attention_norm",  # 1 + w in the model's own module, the sum in the file
    "gpt_oss": "post_attention_norm",  # turned, interleaved, with biases
}


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_files_of_a_family(family: str, tmp_path: Path, tried: Callable[..., None]) -> None:
    tried(family, "tables", stored="gguf F32")
    model = zoo.build(family, num_hidden_layers=2)
    path = write(tmp_path / "model.gguf", model, tensors_of(model, FAMILIES[family]))
    assert_same_plan(build_plan(path), build_plan(model))
    assert_same_plan(build_plan(tmp_path), build_plan(model))


def decoded(tensors: dict, kind: object) -> dict:
    """What the blocks of a type hold, by the package itself."""

    def through(t: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(gguf.quantize(t.float().contiguous().numpy(), kind), kind).copy())

    return {n: through(t) if "exps.weight" in n else t for n, t in tensors.items()}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "MXFP4"])
def test_types(kind: str, tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("qwen3_moe", "tables", stored=f"gguf {kind}")
    model, number = zoo.build("qwen3_moe", num_hidden_layers=1), gguf.GGMLQuantizationType[kind]
    tensors = tensors_of(model, "ffn_norm")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    path = write(tmp_path / "a" / "model.gguf", model, tensors, number)
    assert_same_plan(build_plan(path), build_plan(write(tmp_path / "b" / "m.gguf", model, decoded(tensors, number))))
    assert MoEModel.open(path).formats() == {"0": [f"gguf {kind}"]}


def test_types_that_python_only_decodes(tmp_path: Path) -> None:
    """Random bytes are valid blocks of K-types; what the package makes of them is what is read."""
    kind = gguf.GGMLQuantizationType.Q6_K
    model = zoo.build("qwen3_moe", num_hidden_layers=1, hidden_size=256, moe_intermediate_size=256, num_experts=4)
    tensors, rng = tensors_of(model, "ffn_norm"), np.random.default_rng(0)
    blocks = rng.integers(0, 256, (4, 256, 210), dtype=np.uint8)
    blocks[..., -2:] = np.frombuffer(np.float16(0.001).tobytes(), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    for name, tensor in tensors.items():
        if "exps" in name:
            writer.add_tensor(name, blocks, raw_shape=blocks.shape, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "config.json").write_text(
        json.dumps({**model.config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"]})
    )
    layer = next(MoEModel.open(tmp_path).layers())
    wanted = torch.from_numpy(gguf.dequantize(blocks, kind).copy())
    assert torch.equal(layer.w_out[:], wanted) and torch.equal(layer.w_in[:], torch.cat([wanted, wanted], 1))


def test_fused_gate_and_up(tmp_path: Path) -> None:
    model = zoo.build("qwen3_moe", num_hidden_layers=1)
    tensors = tensors_of(model, "ffn_norm")
    halves = [tensors.pop(f"blk.0.ffn_{half}_exps.weight") for half in ("gate", "up")]
    tensors["blk.0.ffn_gate_up_exps.weight"] = torch.cat(halves, 1)
    assert_same_plan(build_plan(write(tmp_path / "model.gguf", model, tensors)), build_plan(model))


def test_extra_factors_are_multiplied(tmp_path: Path) -> None:
    model = zoo.build("qwen3_moe", num_hidden_layers=1)
    tensors = tensors_of(model, "ffn_norm")
    factor = torch.linspace(0.5, 2, zoo.EXPERTS)
    tensors["blk.0.ffn_down_exps.weight"] = tensors["blk.0.ffn_down_exps.weight"] / factor[:, None, None]
    tensors["blk.0.ffn_down_exps.scale"] = factor
    assert_same_plan(build_plan(write(tmp_path / "model.gguf", model, tensors)), build_plan(model))


def test_splits_and_several_models(tmp_path: Path) -> None:
    model = zoo.build("qwen3_moe", num_hidden_layers=2)
    tensors = tensors_of(model, "ffn_norm")
    for part, block in ((1, "blk.0."), (2, "blk.1.")):
        own = {n: t for n, t in tensors.items() if n.startswith(block)}
        write(tmp_path / f"m-{part:05}-of-00002.gguf", model, own)
    assert_same_plan(build_plan(tmp_path), build_plan(model))
    write(tmp_path / "other.gguf", model, tensors)
    with pytest.raises(CheckpointError, match=r"several GGUF models \(m-00001-of-00002.gguf, other.gguf"):
        build_plan(tmp_path)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="misses m-00002-of-00002"):
        build_plan(tmp_path / "m-00001-of-00002.gguf")


def test_missing_and_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("qwen3_moe", num_hidden_layers=1)
    tensors = tensors_of(model, "ffn_norm")
    del tensors["blk.0.ffn_up_exps.weight"]
    path = write(tmp_path / "model.gguf", model, tensors)
    with pytest.raises(CheckpointError, match=r"no tensor blk\.0\.ffn_up_exps\.weight"):
        build_plan(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        build_plan(path)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"ace-moe\[gguf\]"):
        build_plan(path)
