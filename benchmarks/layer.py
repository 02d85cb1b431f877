"""The experts of one MoE layer: our kernels against stock grouped_mm and vLLM's, Qwen3-30B-A3B shapes, uniform routing.

    python benchmarks/layer.py [--tokens 1 2 4 8 16 32 64 256 1024 4096] [--profile] [--out FILE]

Every time is a CUDA graph over 8 layers' distinct weights and routings, medians. `bytes` counts each needed expert once.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from check_gpu import experts_module
from transformers.integrations.moe import grouped_mm_experts_forward
from tune import EXPERTS, HIDDEN, MIDDLE, TOP_K, graph_time, layer, routing

from ace_moe.bench.run import read_rate
from ace_moe.dispatch import FastPath
from ace_moe.dispatch import experts as dispatch
from ace_moe.kernels.routing import TopK, reference
from ace_moe.policies import Routing, make

BYTES_PER_EXPERT = 3 * HIDDEN * MIDDLE * 2


def stock_layers(weights):
    modules = []
    for w in weights:
        module = experts_module(2, 64, 64, torch.bfloat16)
        module.num_experts = EXPERTS
        module.gate_up_proj, module.down_proj = torch.nn.Parameter(w.w_in, False), torch.nn.Parameter(w.w_out, False)
        modules.append(module)
    return modules


def vllm_time(inputs, weights):
    """vLLM's fused_moe Triton kernels with its own tuned tiles, where it is installed and nothing is skipped."""
    try:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    except ImportError:
        return None
    given = [(x, w.w_in, w.w_out, gates.float(), ids.int()) for (x, ids, gates), w in zip(inputs, weights, strict=True)]
    return graph_time(lambda: [fused_experts(*g) for g in given]) / len(weights)


def measure(tokens, skip, weights, modules):
    inputs = [routing(tokens, skip, seed) for seed in range(len(weights))]
    pairs = list(zip(inputs, weights, modules, strict=True))
    ours = graph_time(lambda: [dispatch.run(*i, w) for i, w, _ in pairs]) / len(weights)
    with torch.no_grad():
        compact = [(x, ids, gates.bfloat16()) for x, ids, gates in inputs]
        stock = graph_time(
            lambda: [grouped_mm_experts_forward(m, *i) for i, m in zip(compact, modules, strict=True)]
        ) / len(weights)
    union = sum(len(ids[ids < EXPERTS].unique()) for _, ids, _ in inputs) / len(inputs)
    kept = sum(int((ids < EXPERTS).sum()) for _, ids, _ in inputs) / sum(ids.numel() for _, ids, _ in inputs)
    vllm = vllm_time(inputs, weights) if kept == 1 else None
    return {"tokens": tokens, "kept": kept, "union": union, "ours_us": ours, "stock_us": stock, "vllm_us": vllm,
            "tb_s": union * BYTES_PER_EXPERT / ours / 1e6}  # fmt: skip


def deciding(tokens):
    """Microseconds of the rule alone, of routing and rule in one kernel, and of stock's softmax and top-k."""
    policy = make("ace")
    fast = FastPath(None, policy)
    fast.top_k = TopK(TOP_K, False, True)
    logits = torch.randn(tokens, EXPERTS, device="cuda").bfloat16()
    tables = {n: torch.rand(EXPERTS, device="cuda") + 0.5 for n in ("gsp", "rcr")}
    threshold, counts = torch.tensor(0.12, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    ids, gates = reference(fast.top_k, logits)
    routing = Routing(ids, gates.bfloat16(), tables, threshold)
    steps = {
        "rule_us": lambda: fast.rule(routing, counts, EXPERTS),
        "route_and_rule_us": lambda: fast.route(logits, tables, threshold, None, counts),
        "stock_route_us": lambda: reference(fast.top_k, logits),
    }
    return {"tokens": tokens} | {n: graph_time(lambda s=s: [s() for _ in range(16)]) / 16 for n, s in steps.items()}


def profile(tokens, skip, weights):
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    inputs = routing(tokens, skip)
    dispatch.run(*inputs, weights[0])
    with record(activities=[ProfilerActivity.CUDA]) as seen:
        for w in weights:
            dispatch.run(*inputs, w)
        torch.cuda.synchronize()
    for event in sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:9]:
        print(f"      {event.self_device_time_total / len(weights):8.1f} us  {event.key[:60]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    weights = [layer(seed) for seed in range(8)]
    modules = stock_layers(weights)
    ceiling = read_rate(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, read ceiling {ceiling:.2f} TB/s")
    rows = []
    for tokens in options.tokens:
        for skip in (0.0, 0.6):
            row = measure(tokens, skip, weights, modules)
            rows.append(row)
            print(
                f"{tokens:6d} tokens, kept {row['kept']:.2f}, {row['union']:5.1f} experts: ours {row['ours_us']:7.1f} us "
                f"({row['tb_s']:.2f} TB/s, {row['tb_s'] / ceiling:.0%}), stock {row['stock_us']:7.1f} us "
                f"= {row['stock_us'] / row['ours_us']:.2f}x"
                + (f", vLLM {row['vllm_us']:7.1f} us" if row["vllm_us"] else ""),
                flush=True,
            )
            if options.profile:
                profile(tokens, skip, weights)
    decisions = [deciding(tokens) for tokens in options.tokens]
    for row in decisions:
        print("  ".join(f"{name} {value:.1f}" for name, value in row.items()))
    if options.out:
        command = "python benchmarks/layer.py --tokens " + " ".join(map(str, options.tokens))
        result = {"command": command, "device": torch.cuda.get_device_name(), "ceiling_tb_s": ceiling, "rows": rows,
                  "deciding": decisions}  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
