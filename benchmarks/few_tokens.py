"""Two to four tokens in one layer, at 0, 60 % and 60 % with restored slots: programs of different tokens side by side or not;
over all experts, and over 24 of them as skewed routers do.

    python benchmarks/few_tokens.py            # one GPU, Qwen3-30B-A3B's layer

Also the launch that moves thresholds, alone.
"""

from __future__ import annotations

import statistics

import torch
from tune import EXPERTS, HIDDEN, TOP_K, graph_time, layer

from ace_moe import rule
from ace_moe.kernels import experts
from ace_moe.kernels.track import launch_track

LAYERS = 6


def routings(tokens: int, way: str, used: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, float]:
    """ids, gates [T, k] and the share of slots that run."""
    gates, ids = torch.randn(tokens, used, generator=g).softmax(-1).topk(TOP_K)
    keep = torch.ones_like(ids, dtype=torch.bool)
    if way != "all":
        keep = gates >= gates.flatten().quantile(0.6)
        keep[:, 0] = True
        if way == "restored":
            keep = rule.restore(keep, ids, rule.union(ids, keep, EXPERTS), torch.ones(tokens, dtype=torch.bool))
    return torch.where(keep, ids, -1).cuda(), gates.bfloat16().cuda(), float(keep.float().mean())


def main() -> None:
    layers = [layer(seed) for seed in range(LAYERS)]
    for tokens in (2, 4):
        for way, used in ((w, u) for u in (EXPERTS, 24) for w in ("all", "60 %", "restored")):
            g = torch.Generator().manual_seed(tokens)
            x = [torch.randn(tokens, HIDDEN, device="cuda").bfloat16() for _ in layers]
            routed = [routings(tokens, way, used, g) for _ in layers]
            found = {}
            for beside in (False, True):
                experts.BESIDE = beside
                run = lambda: [experts.run(a, r[0], r[1], w) for a, r, w in zip(x, routed, layers, strict=True)]  # noqa: B023, E731
                found[beside] = graph_time(run) / LAYERS
            ran = statistics.mean(r[2] for r in routed)
            times = f"{found[False]:.2f} us apart, {found[True]:.2f} side by side"
            print(f"{tokens} tokens of {used:3} experts {way:8} ran {ran:.1%}: {times}", flush=True)
    counts = [torch.randint(0, 9, (49, 3), device="cuda") for _ in range(48)]
    tau, target = torch.rand(49, device="cuda"), torch.full((49,), 0.5, device="cuda")
    seen = torch.zeros(49, 2, dtype=torch.int64, device="cuda")

    def step() -> None:
        for _ in range(50):
            launch_track(counts, tau, target, seen, 384, 0.2, 1e-5, 4.0)

    print(f"moving thresholds of 48 layers: {graph_time(step) / 50:.2f} us", flush=True)


if __name__ == "__main__":
    main()
