"""Tiny random models of every MoE family the installed transformers can build.

A family is a row: name, model class, configuration class, and what its configuration needs beside the common sizes.
Families a release does not have are left out by `families()`; `test_zoo_is_complete` notices ones we do not list.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

EXPERTS, TOP_K, HIDDEN, MIDDLE, LAYERS, VOCABULARY = 16, 4, 64, 32, 4, 160

# Every configuration takes those of these names it has a field for.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"), TOP_K),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), MIDDLE),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), 0),
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_dt_rank"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size", "chunk_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"), 16),
    **dict.fromkeys(("q_lora_rank", "qk_head_dim", "router_hidden_size", "sliding_window", "index_topk"), 32),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "index_n_heads", "topk_group"), 2),
    **{"vocab_size": VOCABULARY, "intermediate_size": 2 * MIDDLE, "max_position_embeddings": 256},
    **{"n_group": 4, "linear_num_value_heads": 4, "mamba_d_conv": 4, "mamba_expand": 2, "conv_L_cache": 3},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "image_token_id": 3, "swiglu_limit": 7.0},
    "dtype": "float32",
}


class Family(NamedTuple):
    name: str
    model: str
    config: str
    extra: dict[str, Any]
    module: str


def _family(name: str, model: str, config: str, module: str = "", **extra: Any) -> Family:
    return Family(name, model, config, extra, module or name)


_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SPARSE = ["dense"] + ["sparse"] * (LAYERS - 1)
FAMILIES = (
    _family("afmoe", "AfmoeForCausalLM", "AfmoeConfig"),
    _family("aria_text", "AriaTextForCausalLM", "AriaTextConfig", "aria", intermediate_size=MIDDLE),
    _family("axk1", "AXK1ForCausalLM", "AXK1Config"),
    _family("axk2", "AXK2ForCausalLM", "AXK2Config", n_group=None, topk_group=None),
    _family("bailing_hybrid", "BailingHybridForCausalLM", "BailingHybridConfig", layer_group_size=2),
    _family("beam", "BeamForCausalLM", "BeamConfig"),
    _family("cohere2_moe", "Cohere2MoeForCausalLM", "Cohere2MoeConfig", num_shared_experts=1),
    _family(
        "deepseek_ocr2",
        "DeepseekOcr2TextModel",
        "DeepseekOcr2TextConfig",
        mlp_layer_types=_SPARSE,
        topk_method="greedy",
    ),
    _family("deepseek_v2", "DeepseekV2ForCausalLM", "DeepseekV2Config", topk_method="group_limited_greedy"),
    _family("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config"),
    _family("deepseek_v32", "DeepseekV32ForCausalLM", "DeepseekV32Config"),
    _family("deepseek_v4", "DeepseekV4ForCausalLM", "DeepseekV4Config"),
    _family("diffusion_gemma", "DiffusionGemmaEncoderTextModel", "DiffusionGemmaTextConfig"),
    _family("dots1", "Dots1ForCausalLM", "Dots1Config", n_shared_experts=1),
    _family(
        "dots3_note",
        "Dots3NoteForCausalLM",
        "Dots3NoteTextConfig",
        shared_experts_intermediate_size=MIDDLE,
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim"), 32),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 16),
    ),
    _family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig"),
    _family(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeTextModel",
        "Ernie4_5_VLMoeTextConfig",
        moe_intermediate_size=[MIDDLE, MIDDLE],
        rope_parameters={**_MROPE, "mrope_section": [2, 2, 4]},
    ),
    _family("exaone_moe", "ExaoneMoeForCausalLM", "ExaoneMoeConfig"),
    _family("flex_olmo", "FlexOlmoForCausalLM", "FlexOlmoConfig"),
    _family("flint", "FlintForCausalLM", "FlintConfig"),
    _family(
        "gemma4",
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        enable_moe_block=True,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        global_head_dim=16,
    ),
    _family("glm4_moe", "Glm4MoeForCausalLM", "Glm4MoeConfig"),
    _family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig"),
    _family(
        "glm4v_moe",
        "Glm4vMoeTextModel",
        "Glm4vMoeTextConfig",
        rope_parameters={**_MROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0},
    ),
    _family(
        "glm5_next",
        "Glm5NextTextModel",
        "Glm5NextTextConfig",
        num_key_value_heads=4,
        qk_rope_head_dim=0,
        head_dim=0,
        linear_head_dim=16,
        linear_num_heads=4,
        index_kpool=4,
        hc_mult=2,
    ),
    _family("glm_moe_dsa", "GlmMoeDsaForCausalLM", "GlmMoeDsaConfig"),
    _family("gpt_oss", "GptOssForCausalLM", "GptOssConfig"),
    _family("granitemoe", "GraniteMoeForCausalLM", "GraniteMoeConfig"),
    _family("granitemoe_swa", "GraniteMoeSWAForCausalLM", "GraniteMoeSWAConfig"),
    _family("granitemoehybrid", "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig"),
    _family("granitemoeshared", "GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig"),
    _family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config"),
    _family("hy_v3", "HYV3ForCausalLM", "HYV3Config"),
    _family("hy_v4", "HYV4ForCausalLM", "HYV4Config"),
    _family(
        "inkling",
        "InklingForCausalLM",
        "InklingTextConfig",
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        mlp_layer_types=_SPARSE,
    ),
    _family(
        "inkling2",
        "Inkling2ForCausalLM",
        "Inkling2TextConfig",
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
    ),
    _family("jamba", "JambaForCausalLM", "JambaConfig"),
    _family(
        "kimi_linear",
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        linear_head_dim=16,
        linear_num_heads=4,
        n_group=1,
        topk_group=1,
    ),
    _family("kolibri1", "Kolibri1ForCausalLM", "Kolibri1Config"),
    _family("laguna", "LagunaForCausalLM", "LagunaConfig"),
    _family("lfm2_moe", "Lfm2MoeForCausalLM", "Lfm2MoeConfig", layer_types=["conv", "full_attention"] * 2),
    _family("mellum", "MellumForCausalLM", "MellumConfig"),
    _family("mimo_v2_flash", "MiMoV2FlashForCausalLM", "MiMoV2FlashConfig"),
    _family("minimax", "MiniMaxForCausalLM", "MiniMaxConfig"),
    _family("minimax_m2", "MiniMaxM2ForCausalLM", "MiniMaxM2Config"),
    _family("minimax_m3_vl", "MiniMaxM3VLTextModel", "MiniMaxM3VLTextConfig"),
    _family("mistral4", "Mistral4ForCausalLM", "Mistral4Config"),
    _family("mistral_large4", "MistralLarge4TextModel", "MistralLarge4TextConfig"),
    _family("mixtral", "MixtralForCausalLM", "MixtralConfig"),
    _family("muse_spark", "MuseSparkTextModel", "MuseSparkTextConfig", moe_hidden_size=32),
    _family("nemotron_h", "NemotronHForCausalLM", "NemotronHConfig"),
    _family("olmoe", "OlmoeForCausalLM", "OlmoeConfig"),
    _family("openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification", "OpenAIPrivacyFilterConfig"),
    _family("phimoe", "PhimoeForCausalLM", "PhimoeConfig", num_experts_per_tok=2),
    _family("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig"),
    _family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig"),
    _family("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", norm_topk_prob=True),
    _family("qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextConfig"),
    _family("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel", "Qwen3OmniMoeTextConfig"),
    _family("qwen3_vl_moe", "Qwen3VLMoeTextModel", "Qwen3VLMoeTextConfig"),
    _family(
        "qwen4_exp",
        "Qwen4ExpForCausalLM",
        "Qwen4ExpTextConfig",
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=32,
        indexer_compress_ratio=2,
        hc_count=2,
        hc_lowrank=16,
        ngram_vocab_size_base=97,
        make_ngram_vocab_size_divisible_by=4,
        split_ngram_parts=4,
        heads_per_ngram=2,
        ngram_size=2,
    ),
    _family("solar_open", "SolarOpenForCausalLM", "SolarOpenConfig"),
    _family("unlimited_ocr", "UnlimitedOcrTextModel", "UnlimitedOcrTextConfig"),
    _family("zaya", "ZayaForCausalLM", "ZayaConfig", num_experts_per_tok=1),
)
# Families outside transformers' experts registry: what ACE must say of them is tested too.
UNREGISTERED = (
    _family(
        "dbrx",
        "DbrxForCausalLM",
        "DbrxConfig",
        ffn_config={
            "hidden_size": HIDDEN,
            "ffn_hidden_size": MIDDLE,
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
            "ffn_act_fn": {"name": "silu"},
        },
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        max_seq_len=256,
    ),
    _family("jetmoe", "JetMoeForCausalLM", "JetMoeConfig"),
    _family("llama4", "Llama4ForCausalLM", "Llama4TextConfig"),
    _family("step3p7", "Step3p7TextModel", "Step3p7TextConfig"),
)


def _source(family: Family, kind: str) -> str:
    return f"transformers.models.{family.module}.{kind}_{family.module}"


def _registered(path: Path) -> bool:
    return path.exists() and "\n@use_experts_implementation" in path.read_text()


MODELS = Path(inspect.getfile(transformers)).parent / "models"


@cache
def families() -> list[str]:
    """Names of the registry families this release has."""
    return [f.name for f in FAMILIES if _registered(MODELS / f.module / f"modeling_{f.module}.py")]


def registry_modules() -> set[str]:
    """Every modelling file of this release with a decorated experts class."""
    return {p.parent.name for p in MODELS.glob("*/modeling_*.py") if _registered(p)}


def has(name: str) -> bool:
    return (MODELS / _find(name).module).is_dir()


def _find(name: str) -> Family:
    return next(f for f in (*FAMILIES, *UNREGISTERED) if f.name == name)


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **extra: Any) -> PreTrainedModel:
    """A tiny random model with norm and bias weights that are not the identity, ready to run."""
    family = _find(name)
    config_class = getattr(importlib.import_module(_source(family, "configuration")), family.config)
    model_class = getattr(importlib.import_module(_source(family, "modeling")), family.model)
    fields = set(config_class.__dataclass_fields__)
    arguments = {k: v for k, v in SIZES.items() if k in fields}
    if "kv_lora_rank" in fields:
        arguments["num_key_value_heads"] = 4
    config = config_class(**{**arguments, **family.extra, **extra})
    config.architectures = [family.model]
    torch.manual_seed(seed)
    model = model_class(config).eval()
    _roughen(model, torch.Generator().manual_seed(seed))
    return _cast(model, dtype)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """With routers in fp32 where the model wants them so, as `from_pretrained` would load it."""
    kept = [part for part in getattr(model, "_keep_in_fp32_modules_strict", None) or () if "gate" in part]
    for name, parameter in model.to(dtype).named_parameters():
        if any(part in name for part in kept):
            parameter.data = parameter.data.float()
    return model


@torch.no_grad()
def _roughen(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Freshly made norms are the identity; a test on them could not tell w from 1 + w."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def inputs(batch: int = 2, tokens: int = 12, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(5, VOCABULARY, (batch, tokens), generator=generator)}


@torch.no_grad()
def run(model: PreTrainedModel, **given: torch.Tensor) -> torch.Tensor:
    """Logits, or the last hidden state of a model without a head."""
    return model(**(given or inputs()), use_cache=False)[0]
