"""Models by shape alone: random weights, because latency needs shapes, not knowledge.

Norm weights are 1, embeddings N(0, 10) and everything else N(0, 0.02): router logits spread as in trained models, and what a
token is outweighs what untrained layers add, which is the same for all tokens; so routing is close to uniform.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ...checkpoint.structure import model_class
from ...errors import StructureError

QWEN3_30B = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "norm_topk_prob": True, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN36_35B = {
    "hidden_size": 2048, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_hidden_layers": 40,
    "num_experts": 256, "num_experts_per_tok": 8, "vocab_size": 248320,
}  # fmt: skip
GEMMA4_26B = {
    "hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704, "num_hidden_layers": 30,
    "num_experts": 128, "top_k_experts": 8, "enable_moe_block": True, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0, "vocab_size": 262144, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
GPT_OSS_20B = {
    "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_local_experts": 32,
    "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    "sliding_window": 128,
}  # fmt: skip
GLM45_AIR = {
    "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "vocab_size": 151552,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": ("Qwen3MoeConfig", QWEN3_30B),
    "qwen3.6-35b-a3b": ("Qwen3_5MoeTextConfig", QWEN36_35B),
    "gemma-4-26b-a4b": ("Gemma4TextConfig", GEMMA4_26B),
    "gpt-oss-20b": ("GptOssConfig", GPT_OSS_20B),
    "glm-4.5-air": ("Glm4MoeConfig", GLM45_AIR),
}


def hollow(shape: str, layers: int | None = None, **changes: Any) -> PreTrainedModel:
    """A model of a named shape without memory; `layers` makes it shallower."""
    import transformers

    if shape not in SHAPES:
        raise StructureError(f"There is no shape {shape!r}. Choose one of: {', '.join(SHAPES)}.")
    name, sizes = SHAPES[shape]
    changes |= {"num_hidden_layers": layers} if layers else {}
    config = getattr(transformers, name)(**{**sizes, **changes})
    with torch.device("meta"):
        return model_class(config)(config).to(torch.bfloat16).eval()


def fill(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Fill a hollow model with random weights."""
    model.to_empty(device=device)
    model.init_weights()
    return _roughen(model)


def build(shape: str, device: str, layers: int | None = None, **changes: Any) -> PreTrainedModel:
    return fill(hollow(shape, layers, **changes), device)


@torch.no_grad()
def _roughen(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator(model.device).manual_seed(0)
    embeddings = model.get_input_embeddings().weight
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 10 if parameter is embeddings else 0.02, generator=generator)
    return model
