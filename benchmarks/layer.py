"""One MoE layer: our kernels against stock grouped_mm and vLLM's, and what deciding costs. Qwen3-30B-A3B shapes, uniform routing.

    python benchmarks/layer.py [--parts experts deciding equal] [--tokens 1 2 4 …] [--profile] [--out FILE]

experts   the experts alone, nothing skipped and 60 %
deciding  microseconds of the rule's launch by policy, and of routing and rule in one
equal     router, rule and experts by policy, each at the τ at which it reads as many experts as the others; where a batch
          needs every expert whatever is skipped, at the τ at which it runs as many slots

Every time is a CUDA graph over 8 layers' distinct weights and routings, or over 64 launches of the rule; medians. `bytes`
counts each needed expert once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from check_gpu import experts_module
from running import Row, made_here, parser, settled, store
from torch import Tensor
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from tune import EXPERTS, HIDDEN, MIDDLE, TOP_K, graph_time, layer, routing

from ace_moe.decider import Decider, row_of
from ace_moe.decider.rows import Same
from ace_moe.decider.state import State
from ace_moe.kernels import experts
from ace_moe.kernels.experts import Weights
from ace_moe.kernels.routing import TopK, reference
from ace_moe.lab.bench.run import read_rate
from ace_moe.policies import make

BYTES_PER_EXPERT = 3 * HIDDEN * MIDDLE * 2
POLICIES = ("share", "share:squared=true", "top_p", "ace")
EQUAL = ("share", "share:squared=true", "top_p")
KIND = TopK(TOP_K, False, True)
LAUNCHES = 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Routed = tuple[Tensor, Tensor, Tensor]  # x [T, d], ids and gates [T, k]


def stock_layers(weights: list[Weights]) -> list[Qwen3MoeExperts]:
    modules = []
    for w in weights:
        module = experts_module(2, 64, 64, torch.bfloat16)
        module.num_experts = EXPERTS
        module.gate_up_proj, module.down_proj = torch.nn.Parameter(w.w_in, False), torch.nn.Parameter(w.w_out, False)
        modules.append(module)
    return modules


def vllm_time(inputs: list[Routed], weights: list[Weights]) -> float | None:
    """vLLM's fused_moe Triton kernels with its own tuned tiles, where it is installed and nothing is skipped."""
    try:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    except ImportError:
        return None
    given = [(x, w.w_in, w.w_out, gates.float(), ids.int()) for (x, ids, gates), w in zip(inputs, weights, strict=True)]
    return graph_time(lambda: [fused_experts(*g) for g in given]) / len(weights)


def measure(tokens: int, skip: float, weights: list[Weights], modules: list[Qwen3MoeExperts]) -> Row:
    inputs = [routing(tokens, skip, seed) for seed in range(len(weights))]
    pairs = list(zip(inputs, weights, modules, strict=True))
    ours = graph_time(lambda: [experts.run(*i, w) for i, w, _ in pairs]) / len(weights)
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


# ---- deciding --------------------------------------------------------------------------------------------------------


def decider(policy: str, tau: float = 0.0) -> Decider:
    """A layer that decides as an engine's does, all tokens decode."""
    made, state = make(policy), State()
    state.set(torch.full((4,), tau))
    tables = {name: torch.rand(EXPERTS) + 0.5 for name in made.tables}
    return Decider(
        "0",
        made,
        tables,
        state,
        experts=EXPERTS,
        tokens=Same(row_of("decode")),
        device=DEVICE,
        kernels=True,
        opaque=False,
    )


def many(step: Callable[[], object]) -> float:
    """Microseconds of one launch, the middle of three graphs: a launch is short beside what clocks do between two."""
    return sorted(graph_time(lambda: [step() for _ in range(LAUNCHES)]) for _ in range(3))[1] / LAUNCHES


def deciding(tokens: int) -> Row:
    """Microseconds of the rule by policy, of routing and rule in one kernel, and of stock's softmax and top-k."""
    logits = torch.randn(tokens, EXPERTS, device=DEVICE).bfloat16()
    ids, gates = reference(KIND, logits)
    gates, layers = gates.bfloat16(), {policy: decider(policy, 0.1) for policy in POLICIES}
    row: Row = {"tokens": tokens, "stock_route_us": many(lambda: reference(KIND, logits))}
    for policy, made in layers.items():
        row[f"rule_us {policy}"] = many(partial(made.decide, ids, gates))
        row[f"route_and_rule_us {policy}"] = many(partial(made.route, logits, KIND, torch.bfloat16))
    return row


# ---- policies at equal reads -----------------------------------------------------------------------------------------


def reads(made: Decider, logits: list[Tensor]) -> tuple[float, float]:
    """(experts read in the mean of the steps, share of slots kept), logits [T, E] of each step."""
    kept = [ids[ids < EXPERTS] for ids, _ in (made.route(z, KIND, torch.bfloat16) for z in logits)]
    slots = sum(len(z) for z in logits) * TOP_K
    return sum(len(k.unique()) for k in kept) / len(kept), sum(len(k) for k in kept) / slots


def meet(made: Decider, logits: list[Tensor], target: tuple[float, float], rounds: int = 20) -> float:
    """Sets and returns the τ of the target's reads, or of its slots where it reads all experts: both fall as τ grows."""
    which = int(target[0] > 0.95 * EXPERTS)

    def saved(tau: float) -> float:
        use(made, tau)
        return -reads(made, logits)[which]

    return use(made, settled(saved, -target[which], rounds))


def use(made: Decider, tau: float) -> float:
    made.state.set(torch.full((4,), tau))
    return tau


def equal(tokens: int, weights: list[Weights], skip: float) -> list[Row]:
    """Router, rule and experts by policy, where each reads as many experts as `share` does at this skip ratio."""
    g = torch.Generator().manual_seed(tokens)
    logits = [torch.randn(tokens, EXPERTS, generator=g).to(DEVICE, torch.bfloat16) for _ in weights]
    inputs = [torch.randn(tokens, HIDDEN, generator=g).to(DEVICE, torch.bfloat16) for _ in weights]
    first, rows = decider(EQUAL[0]), []
    shares = torch.cat([reference(KIND, z)[1] for z in logits]).flatten()
    use(first, float(shares.quantile(skip)) if skip else 0.0)
    target, steps = reads(first, logits), list(zip(inputs, logits, weights, strict=True))
    for policy in EQUAL:
        made = decider(policy)
        tau = meet(made, logits, target) if skip else 0.0
        union, kept = reads(made, logits)
        us = graph_time(partial(whole, made, steps)) / len(weights)
        rows.append({"tokens": tokens, "policy": policy, "tau": tau, "union": union, "kept": kept, "layer_us": us})
    return rows


def whole(made: Decider, steps: list[tuple[Tensor, Tensor, Weights]]) -> list[Tensor]:
    return [experts.run(x, *made.route(z, KIND, torch.bfloat16), w) for x, z, w in steps]


def profile(tokens: int, skip: float, weights: list[Weights]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    inputs = routing(tokens, skip)
    experts.run(*inputs, weights[0])
    with record(activities=[ProfilerActivity.CUDA]) as seen:
        for w in weights:
            experts.run(*inputs, w)
        torch.cuda.synchronize()
    for event in sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:9]:
        print(f"      {event.self_device_time_total / len(weights):8.1f} us  {event.key[:60]}")


# ---- the whole -------------------------------------------------------------------------------------------------------


def run_experts(
    tokens: int, weights: list[Weights], modules: list[Qwen3MoeExperts], ceiling: float, profiled: bool
) -> list[Row]:
    rows = [measure(tokens, skip, weights, modules) for skip in (0.0, 0.6)]
    for row, skip in zip(rows, (0.0, 0.6), strict=True):
        print(
            f"{tokens:6d} tokens, kept {row['kept']:.2f}, {row['union']:5.1f} experts: ours {row['ours_us']:7.1f} us "
            f"({row['tb_s']:.2f} TB/s, {row['tb_s'] / ceiling:.0%}), stock {row['stock_us']:7.1f} us "
            f"= {row['stock_us'] / row['ours_us']:.2f}x"
            + (f", vLLM {row['vllm_us']:7.1f} us" if row["vllm_us"] else ""),
            flush=True,
        )
        if profiled:
            profile(tokens, skip, weights)
    return rows


def shown(rows: list[Row]) -> list[Row]:
    for row in rows:
        print("  ".join(f"{n} {v:.3f}" if isinstance(v, float) else f"{n} {v}" for n, v in row.items()), flush=True)
    return rows


def main() -> None:
    made = parser(__doc__, tokens=[1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096], profile=False)
    parts = ("experts", "deciding", "equal")
    made.add_argument("--parts", nargs="+", choices=parts, default=parts)
    made.add_argument(
        "--deciding", type=int, nargs="+", default=[1, 16, 64, 4096], help="tokens of the rule and of equal"
    )
    made.add_argument("--skip", type=float, default=0.5, help="what share skips where the others read as much")
    options = made.parse_args()
    ceiling = read_rate(torch.device("cuda"))
    assert ceiling is not None
    result = made_here(ceiling_tb_s=ceiling)
    print(f"{result['device']}, read ceiling {ceiling:.2f} TB/s")
    if "deciding" in options.parts:
        result["deciding"] = [row for tokens in options.deciding for row in shown([deciding(tokens)])]
    weights = [layer(seed) for seed in range(8)] if set(options.parts) - {"deciding"} else []
    if "experts" in options.parts:
        given = (weights, stock_layers(weights), ceiling, options.profile)
        result["rows"] = [row for tokens in options.tokens for row in run_experts(tokens, *given)]
    if "equal" in options.parts:
        result["equal"] = [row for tokens in options.deciding for row in shown(equal(tokens, weights, options.skip))]
    store(options.out, result)


if __name__ == "__main__":
    main()
