"""A checkpoint streamed from disk gives the layers of the loaded model, whatever the layout on disk."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import zoo
from ace_moe import build_plan
from ace_moe.checkpoint import MoEModel, measure
from ace_moe.checkpoint.structure import experts_modules, hollow_twin
from ace_moe.tables import PAPER

TURNED = ("inkling2_text",)  # rows of gate and up by turns on disk: read whole, not row by row for a fingerprint
SAME = ("w_in", "w_out", "b_in", "b_out", "norm_scale", "router_rows")


def assert_same_layers(folder, model):
    disk, memory = MoEModel.open(folder), MoEModel.of(model)
    found, expected = disk.fingerprint(), memory.fingerprint()
    if model.config.model_type in TURNED:
        assert not found.experts
        expected = replace(expected, experts={})
    assert found == expected
    for ours, theirs in zip(disk.layers(), memory.layers(), strict=True):
        assert (ours.key, ours.top_k, ours.undefined.keys()) == (theirs.key, theirs.top_k, theirs.undefined.keys())
        for name in SAME:
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a[:], b[:]), name


@pytest.mark.parametrize("name", zoo.families())
def test_streamed_layers_are_the_loaded_ones(name, tmp_path):
    """Per-expert or fused, as save_pretrained writes the family; many small shards; dense layers in between."""
    model = zoo.build(name)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_layers(tmp_path, model)


def write_checkpoint(folder, model, tensors, **config):
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    settings = {**model.config.to_dict(), "architectures": [type(model).__name__], **config}
    (folder / "config.json").write_text(json.dumps(settings))


def test_fused_layout_under_a_multimodal_prefix_with_an_mtp_block(tmp_path):
    """As Qwen3.5 bf16 files are: fused tensors, `model.language_model.`, and an `mtp.` block with experts of its own."""
    model = zoo.build("qwen3_5_moe", torch.bfloat16)
    tensors = {k.replace("model.", "model.language_model.", 1): v for k, v in model.state_dict().items()}
    experts = {k: v for k, v in tensors.items() if ".layers.0.mlp." in k}
    tensors |= {k.replace("model.language_model.", "mtp."): torch.randn_like(v) for k, v in experts.items()}
    write_checkpoint(tmp_path, model, tensors)
    assert_same_layers(tmp_path, model)


def test_gemma4_wrapper_on_disk_is_as_in_memory(tmp_path):
    """As published: the multimodal architecture in config.json, its text part under `model.language_model.`."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = zoo.build("gemma4").config
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    config = Gemma4Config(text_config=text.to_dict(), vision_config=vision, audio_config=None)
    model = Gemma4ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    assert MoEModel.open(tmp_path).sites[0].path == "model.language_model.layers.0.experts"
    assert_same_layers(tmp_path, model)


def test_plan_of_disk_and_of_memory_are_equal(tmp_path):
    model = zoo.build("glm4_moe", torch.bfloat16)
    model.save_pretrained(tmp_path)
    disk, memory = build_plan(tmp_path, PAPER), build_plan(model, PAPER)
    for key, layer in disk.tables.items():
        for name, values in layer.items():
            assert torch.equal(values, memory.tables[key][name])


def test_zero_centred_norms_are_measured():
    """Γ is what the module does, 1 + w in some families, w in others; also for LayerNorm, also for odd widths."""
    for name, offset in (("qwen3_moe", 0.0), ("qwen3_5_moe", 1.0), ("cohere2_moe", 0.0)):
        model = zoo.build(name)
        moe = MoEModel.of(model)
        weight = model.get_submodule(moe.sites[0].norm_path).weight.detach()
        torch.testing.assert_close(moe.layer(moe.sites[0]).norm_scale, weight + offset, rtol=1e-4, atol=1e-5)
    for d in (2, 3, 7, 64, 129):
        norm = torch.nn.LayerNorm(d)
        weights = {"weight": torch.rand(d) + 0.5, "bias": torch.randn(d)}
        torch.testing.assert_close(measure.norm_scale(norm, weights, d), weights["weight"], rtol=1e-3, atol=1e-4)
    linear = torch.nn.Linear(8, 8)
    assert measure.norm_scale(linear, dict(linear.named_parameters()), 8) is None


def test_post_norm_models_have_no_norm_in_front():
    layer = next(MoEModel.of(zoo.build("flex_olmo")).layers())
    assert torch.equal(layer.norm_scale, torch.ones(zoo.HIDDEN))


def test_sinks_are_not_experts():
    """Inkling's router has two rows more than there are experts."""
    model = zoo.build("inkling")
    moe = MoEModel.of(model)
    rows = model.get_submodule(moe.sites[0].router_path).weight
    assert rows.shape[0] > zoo.EXPERTS
    torch.testing.assert_close(moe.layer(moe.sites[0]).router_rows, rows[: zoo.EXPERTS].detach())


def test_the_twin_takes_no_memory():
    """A model of 30 billion parameters is traced without its weights."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_experts=128)
    twin = hollow_twin(config)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in twin.parameters()}
    assert sum(p.numel() for p in twin.parameters()) > 25e9
    assert sum(storages.values()) < 1e5
    assert len(list(experts_modules(twin))) == 48
