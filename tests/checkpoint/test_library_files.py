"""Checkpoints written by the formats' own libraries decode to what those libraries decode, whole flows included."""

from __future__ import annotations

import json
import lzma
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from ace_moe import build_plan
from ace_moe.checkpoint import MoELayer, MoEModel
from ace_moe.checkpoint.loading import load_model
from ace_moe.errors import CheckpointError
from ace_moe.tables import PAPER

HERE = Path(__file__).parents[1] / "data" / "formats"
FOLDERS = sorted(
    f for root in (HERE, os.environ.get("ACE_FORMATS")) if root for f in Path(root).iterdir() if f.is_dir()
)
READ = [f for f in FOLDERS if not f.name.startswith("refuse")]
REFUSED = [f for f in FOLDERS if f.name.startswith("refuse")]
DECODED, TABLES, ROUNDED = 1e-6, 1e-5, 5e-3  # relative: matrices, tables, weights rounded to bf16 or fp16


def by_name(folders: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("folder", folders, ids=lambda f: f.name)


def expected(folder: Path) -> dict[str, Tensor]:
    with lzma.open(folder / "expected.safetensors.xz") as file:
        return load(file.read())


def matrices(folder: Path, layer: MoELayer, part: str) -> Tensor:
    """[E, out, in] of what the library decodes."""
    found = expected(folder)
    return torch.stack([found[f"expert.{e}.{part}"] for e in range(layer.num_experts)])


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@by_name(READ)
def test_decoded_as_by_the_library(folder: Path) -> None:
    layer = next(MoEModel.open(folder).layers())
    parts = layer.projections(slice(None))
    for name, found in (("gate", parts.gate), ("up", parts.up), ("down", parts.down)):
        for one, wanted in zip(found, matrices(folder, layer, name), strict=True):
            assert apart(one, wanted) <= DECODED, name


@by_name(READ)
def test_tables_are_those_of_the_library_in_float64(folder: Path) -> None:
    moe = MoEModel.open(folder)
    layer, plan = next(moe.layers()), build_plan(moe, PAPER)
    gate, up, down = (matrices(folder, layer, part).double() for part in ("gate", "up", "down"))
    for name, raw in (("gsp", gsp(layer, gate, up, down)), ("rcr", rcr(layer, gate, up, down))):
        assert apart(plan.tables[layer.key][name], raw / raw.mean()) <= TABLES, name


def gsp(layer: MoELayer, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    scale = layer.norm_scale.double()

    def size(*factors: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(torch.linalg.multi_dot(factors) if len(factors) > 1 else factors[0])

    rows = []
    for g, u, d in zip(gate, up, down, strict=True):
        g, u, d = torch.diag(scale) @ g.T, torch.diag(scale) @ u.T, d.T
        rows.append((size(u) * size(g, d) * size(g) * size(u, d)).sqrt())
    return torch.stack(rows)


def rcr(layer: MoELayer, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    rows = layer.router_rows.double()
    centred = rows - rows.mean(0)
    q = centred / centred.square().mean(1, keepdim=True).sqrt()
    out = []
    for e in range(len(q)):
        pair = (gate[e] @ q[e], up[e] @ q[e])
        z = torch.stack(pair, 1).flatten() if layer.interleaved else torch.cat(pair)
        z = z if layer.b_in is None else z + layer.b_in[e].double()
        y = down[e] @ layer.activate(z[None])[0]
        out.append((y if layer.b_out is None else y + layer.b_out[e].double()).norm() / q[e].norm())
    return torch.stack(out)


@by_name(READ)
def test_expanded_models_run_as_their_decoded_weights(folder: Path, tmp_path: Path) -> None:
    """Against the same folder with what the library decodes in place of what it stores."""
    model = load_model(folder, "cpu", expand=True)
    layer = next(MoEModel.of(model).layers())
    parts = layer.projections(slice(None))
    for name, found in (("gate", parts.gate), ("up", parts.up), ("down", parts.down)):
        assert apart(found, matrices(folder, layer, name)) <= ROUNDED
    assert not hasattr(model.config, "quantization_config")
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
    before, after = MoEModel.open(folder).fingerprint(), MoEModel.of(model).fingerprint()
    assert before.same_routers(after), "one plan serves the checkpoint and its expansion"
    model.save_pretrained(tmp_path)
    assert build_plan(tmp_path, PAPER).tables.keys() == build_plan(folder, PAPER).tables.keys()


@by_name(REFUSED)
def test_refused_by_name(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"experts\.\d\.\w+_proj\.weight"):
        MoEModel.open(folder)
    if folder.name != "refuse-fp8-config-bf16":
        with pytest.raises(CheckpointError, match=r"experts\.\d\.\w+_proj\.weight is (F8_E4M3|I8|U8)"):
            load_model(folder, "cpu", expand=True)


@by_name([f for f in FOLDERS if f.name == "modelopt-fp8"])
def test_scaled_fp8_without_a_quantization_config(folder: Path, tmp_path: Path) -> None:
    """As older ModelOpt exports: only hf_quant_config.json tells, and the tables were those of the codes."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    found, wanted = build_plan(copy, PAPER).tables["0"], build_plan(folder, PAPER).tables["0"]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    (copy / "hf_quant_config.json").unlink()
    assert all(torch.equal(build_plan(copy, PAPER).tables["0"][name], wanted[name]) for name in wanted)


@by_name([f for f in FOLDERS if f.name == "modelopt-fp8"])
def test_a_model_that_was_loaded_without_its_factors(folder: Path, tmp_path: Path) -> None:
    """transformers takes ModelOpt's codes for weights, 340 times too large, and says nothing."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"other numbers than it holds.*--expand"):
        load_model(copy, "cpu")
    from transformers import AutoModelForCausalLM

    with pytest.raises(CheckpointError, match=r"rms of .*expand=True"):
        build_plan(AutoModelForCausalLM.from_pretrained(copy), PAPER)


@by_name([f for f in FOLDERS if f.name == "ct-fp8-channel"])
def test_bf16_experts_in_a_quantised_model_are_read_with_a_notice(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    layer = next(MoEModel.open(folder).layers())
    plain = {
        f"model.layers.0.mlp.experts.{e}.{p}_proj.weight": matrices(folder, layer, p)[e]
        for e in range(4)
        for p in ("gate", "up", "down")
    }
    tensors = {k: t for k, t in load_file(folder / "model.safetensors").items() if ".experts." not in k}
    q = "model.layers.0.self_attn.q_proj.weight"
    tensors |= {**plain, q: tensors[q].to(torch.float8_e4m3fn), f"{q}_scale": torch.ones(1)}
    save_file({k: t.contiguous() for k, t in tensors.items()}, copy / "model.safetensors")
    with pytest.warns(UserWarning, match=r"says the model is quantised \(compressed-tensors\).*read as they are"):
        found = build_plan(copy, PAPER)
    assert apart(found.tables["0"]["gsp"], build_plan(folder, PAPER).tables["0"]["gsp"]) <= TABLES
