"""Peak memory and time of `ace plan --tables` on synthetic checkpoints with Qwen3-30B-A3B layers (128 experts, 2048×768, bf16).

    python benchmarks/tables_memory.py [--layers 2 8] [--out benchmarks/results/tables_memory.json]

Each size runs in a process of its own, so that its peak is its own. The three Gram products alone, in plain torch on
the same machine, are timed in this process right after.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from running import made_here, parser, store
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

EXPERTS, HIDDEN, MIDDLE, BLOCK = 128, 2048, 768, 128
CHILD = """
import json, resource, sys, time
from ace_moe import build_plan, progress
from ace_moe.tables import PAPER
start = time.perf_counter(); marks = []
with progress.reporting(lambda *task: marks.append(time.perf_counter()))():
    build_plan(sys.argv[1], PAPER).save(sys.argv[2])
print(json.dumps({"peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
                  "seconds": time.perf_counter() - start,
                  "seconds_per_layer": (marks[-1] - marks[0]) / (len(marks) - 1), "layers": len(marks) - 1}))
"""


def drawn(*shape: int) -> torch.Tensor:
    """Random weights, made on a GPU where there is one: the CPU takes minutes."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(shape, dtype=torch.bfloat16, device=where).normal_(0, 0.02).cpu()


def write_checkpoint(folder: Path, layers: int, fp8: bool = False) -> None:
    """Per-expert tensors, one shard per layer, as published checkpoints have them; FP8 with a factor for 128 × 128."""
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=MIDDLE, num_hidden_layers=layers, num_experts=EXPERTS,
        num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128, norm_topk_prob=True,
        vocab_size=1024, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    if fp8:
        config.quantization_config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    config.save_pretrained(folder)
    index: dict[str, str] = {}
    for layer in range(layers):
        torch.manual_seed(layer)
        tensors, prefix = {}, f"model.layers.{layer}"
        for expert in range(EXPERTS):
            for name, shape in (("gate", (MIDDLE, HIDDEN)), ("up", (MIDDLE, HIDDEN)), ("down", (HIDDEN, MIDDLE))):
                weight, at = drawn(*shape), f"{prefix}.mlp.experts.{expert}"
                tensors[f"{at}.{name}_proj.weight"] = (weight * 2048).to(torch.float8_e4m3fn) if fp8 else weight
                if fp8:
                    factors = torch.full((shape[0] // BLOCK, shape[1] // BLOCK), 1 / 2048)
                    tensors[f"{at}.{name}_proj.weight_scale_inv"] = factors
        tensors[f"{prefix}.mlp.gate.weight"] = drawn(EXPERTS, HIDDEN)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        shard = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, folder / shard)
        index |= dict.fromkeys(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def measure(layers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, layers)
        arguments = [sys.executable, "-c", CHILD, str(folder), str(folder / "plan.safetensors")]
        return json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def gram_products() -> float:
    """Seconds for one layer's 3 × 128 Gram products in fp32, nothing else."""
    wide, tall = torch.randn(MIDDLE, HIDDEN), torch.randn(HIDDEN, MIDDLE)
    start = time.perf_counter()
    for _ in range(EXPERTS):
        wide @ wide.T, wide @ wide.T, tall.T @ tall
    return time.perf_counter() - start


def main() -> None:
    options = parser(__doc__, layers=[2, 8]).parse_args()
    few, many = (measure(n) for n in options.layers)
    gram = min(gram_products() for _ in range(3))
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    result = {
        **made_here(),
        "machine": f"{torch.get_num_threads()} threads, {re.sub('.*: ', '', cpu)}, torch {torch.__version__}",
        "few": few, "many": many, "gram_seconds_per_layer": gram,
        "peak_ratio": many["peak_gb"] / few["peak_gb"], "time_ratio": many["seconds_per_layer"] / gram,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    store(options.out, result)


if __name__ == "__main__":
    main()
