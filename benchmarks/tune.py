"""Tile sizes for the kernels on this GPU: tries many, prints the best for each number of tokens.

    python benchmarks/tune.py [--tokens 1 4 16 32 64 256 1024 4096] [--out FILE] [--workers 12]

Qwen3-30B-A3B layers with random weights; each measurement is a CUDA graph over several layers' distinct weights, so that
no weight is found in the cache. Worker processes compile all candidates first.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import time
from collections.abc import Callable

import torch
from running import made_here, parser, store

from ace_moe.kernels import experts
from ace_moe.kernels.activation import SILU, Activation
from ace_moe.kernels.config import Tiles
from ace_moe.lab.bench.run import read_rate

EXPERTS, HIDDEN, MIDDLE, TOP_K = 128, 2048, 768, 8
# rows of an expert up to → heights of a tile and of its last one; then width, depth, warps and stages of a product
HEIGHTS = {16: [(16, 16)], 64: [(64, 64), (64, 32), (64, 16), (32, 16)], math.inf: [(128, 128), (128, 64)]}
WIDE = [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4)]
NARROW = [
    (16, 256, 4, 4), (32, 128, 4, 4), (32, 128, 2, 4), (32, 128, 4, 6), (64, 64, 4, 6), (64, 128, 4, 4), (32, 256, 4, 3),
]  # fmt: skip
LAYOUT = experts.Layout(True, False, False, Activation(SILU))


def layer(seed: int) -> experts.Weights:
    torch.manual_seed(seed)
    w_in = torch.empty(EXPERTS, 2 * MIDDLE, HIDDEN, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    w_out = torch.empty(EXPERTS, HIDDEN, MIDDLE, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    return experts.Weights(w_in, w_out, None, None, LAYOUT)


def routing(tokens: int, skip: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids, gates of uniform routing; the last slots of each token are skipped, the ratio met in the mean."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=g, device="cuda").bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=g, device="cuda").argsort(1)[:, :TOP_K].contiguous()
    gates = torch.rand(tokens, TOP_K, generator=g, device="cuda").softmax(-1)
    if skip:
        kept = TOP_K * (1 - skip)
        each = int(kept) + (torch.rand(tokens, 1, generator=g, device="cuda") < kept - int(kept))
        ids = torch.where(torch.arange(TOP_K, device="cuda") < each, ids, EXPERTS)
    return x, ids, gates


def candidates(tokens: int) -> list[Tiles]:
    """Where two products are tuned apart, up varies with a fixed down, then the other way round."""
    return one_by_one() if tokens <= experts.ONE else sorted_by_expert(tokens * TOP_K // EXPERTS)


def one_by_one() -> list[Tiles]:
    ups = itertools.product((1, 2, 4), (512, 1024, 2048), (1, 2, 4, 8))
    downs = itertools.product((2, 4, 8), (2, 4, 8), (256, 1024), (2, 4), (1, 2, 3))
    return [Tiles(4, bn, bk, w, 1, 4, 256, 2, 2) for bn, bk, w in ups] + [
        Tiles(slots, 2, 512, 1, 1, bn, bk, w, ahead)
        for slots, bn, bk, w, ahead in downs
        if 48 <= ahead * slots * bn * bk // (16 * w) <= 256  # bytes a thread holds
    ]


def sorted_by_expert(rows: int) -> list[Tiles]:
    heights = next(found for most, found in HEIGHTS.items() if rows <= most)
    shapes = WIDE if rows > 16 else NARROW
    downs = [*shapes, (256, 64, 8, 3), (256, 64, 8, 4)] if rows > 64 else shapes
    base, base_down = shapes[-1], downs[-1]
    ups = [Tiles(bm, *up, *base_down, tail) for (bm, tail), up in itertools.product(heights, shapes)]
    return ups + [Tiles(bm, *base, *down, tail) for (bm, tail), down in itertools.product(heights, downs)]


def use(tiles: Tiles) -> None:
    experts.one_tiles = lambda *_: tiles
    experts.many_tiles = lambda *_: tiles


def compile_all(work: list[tuple[int, Tiles]], one: int) -> None:
    experts.ONE = one
    weights = layer(0)
    for tokens, tiles in work:
        use(tiles)
        try:
            experts.run(*routing(tokens, 0.0), weights)
            torch.cuda.synchronize()
        except Exception:  # too much shared memory: the timing loop meets it again and leaves it out
            pass


def graph_time(step: Callable[[], object], repeats: int = 30) -> float:
    """Median microseconds of one replay, after some that wake the clocks up."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(10):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def layers_time(tokens: int, skip: float, layers: list[experts.Weights]) -> float:
    """Microseconds per layer, each layer with its own routing."""
    inputs = [routing(tokens, skip, seed) for seed in range(len(layers))]
    return graph_time(lambda: [experts.run(*i, w) for i, w in zip(inputs, layers, strict=True)]) / len(layers)


def best(tokens: int, layers: list[experts.Weights], skip: float) -> list[tuple[float, Tiles]]:
    found = []
    for tiles in candidates(tokens):
        use(tiles)
        try:
            found.append((layers_time(tokens, 0.0, layers) + layers_time(tokens, skip, layers), tiles))
        except Exception as error:
            if "out of resource" not in str(error) and "OutOfResources" not in type(error).__name__:
                print("failed", tiles, str(error)[:200])
    return sorted(found)


def merged(found: list[tuple[float, Tiles]], tokens: int) -> Tiles:
    """The best up with the best down, where they were tuned apart."""
    every = candidates(tokens)
    ups = {t for t in every if t[5:9] == every[0][5:9]}
    downs = {t for t in every if t[1:5] == every[-1][1:5]}
    up = next(t for _, t in found if t in ups)
    down = next(t for _, t in found if t in downs and (tokens <= experts.ONE or (t.bm, t.tail) == (up.bm, up.tail)))
    return Tiles(down.bm, *up[1:5], *down[5:9], up.tail)


def main() -> None:
    made = parser(__doc__, tokens=[1, 4, 16, 32, 64, 256, 1024, 4096], workers=12, layers=8)
    made.add_argument("--skip", type=float, default=0.6, help="tuned for the sum of the times at 0 and at this ratio")
    made.add_argument("--one", type=int, default=experts.ONE, help="tokens up to which a product per slot is tried")
    options = made.parse_args()
    experts.ONE = options.one
    started = time.time()
    work = [(t, c) for t in options.tokens for c in candidates(t)]
    context = multiprocessing.get_context("spawn")
    pool = [
        context.Process(target=compile_all, args=(work[i :: options.workers], options.one))
        for i in range(options.workers)
    ]
    for process in pool:
        process.start()
    for process in pool:
        process.join()
    print(f"{len(work)} candidates compiled in {time.time() - started:.0f} s", flush=True)
    layers = [layer(seed) for seed in range(options.layers)]
    result = made_here(ceiling_tb_s=read_rate(torch.device("cuda")), tokens={})
    print(result, flush=True)
    for tokens in options.tokens:
        found = best(tokens, layers, options.skip)
        chosen = merged(found, tokens)
        use(chosen)
        row = {"tiles": chosen, "us": layers_time(tokens, 0.0, layers), "us_60": layers_time(tokens, 0.6, layers)}
        row["next"] = [(round(us, 1), tuple(t)) for us, t in found[:4]]
        result["tokens"][tokens] = row
        print(tokens, tuple(chosen), f"{row['us']:.1f} us, 60 %: {row['us_60']:.1f} us; {row['next']}", flush=True)
        store(options.out, result)
    print(f"{time.time() - started:.0f} s in all")


if __name__ == "__main__":
    main()
