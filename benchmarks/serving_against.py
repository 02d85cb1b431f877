"""vLLM alone and with one or two versions of this package, engines timed in turn in one run.

    python benchmarks/serving_against.py OTHER --layers 24 --batches 1 4 9 16 64 --out serving_against_h200.json
    python benchmarks/serving_against.py --layers 4 --offload 6 --batches 1 4 --ttft --out offload_vllm_h200.json

`OTHER` is the folder of the version to compare with (`git worktree add OTHER COMMIT`), or none. The engines start together,
each in a process of its own; thresholds are found once, with this version. A batch of 9 runs in the graph captured for 16: its
padding must cost nothing. Weights, sizes and what is timed are those of serving.py; `device_ms` leaves the host out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # behind the version's own

from running import engine_options, made_here, parser, settled, store
from steps import on_device
from together import generate
from versions import HERE, Version, serve

ROUNDS = 7
Way = tuple[str, str, float | None]  # its name, the engine's, and τ; None for vLLM alone


class Engine:
    """One engine; knows only what serving.py has in every version."""

    def __init__(self, options: argparse.Namespace):
        import serving

        sizes = dict(serving.TINY if options.tiny else serving.QWEN3_30B)
        sizes |= {"num_hidden_layers": options.layers} if options.layers else {}
        self.vocabulary, folder = int(sizes["vocab_size"]), Path(tempfile.mkdtemp())
        given = {"allow_other_weights": True, "kernels": "auto", "routing": "fused"}
        given |= {"restore": False} if options.serve == "this" else {}  # versions before it had none
        plan = serving.write_plan(folder / "plan.safetensors", sizes)
        ace = {} if options.serve == "stock" else serving.engine_args(plan, 0.0, **given)
        self.llm = serving.start(serving.write_model(folder / "model", sizes), options, **ace)

    def time(self, tau: float | None, batch: int, prompt: int, tokens: int, seed: int) -> list[float]:
        return timed(self.llm, tau, batch, prompt, tokens, seed, self.vocabulary)


def timed(llm: Any, tau: float | None, batch: int, prompt: int, tokens: int, seed: int, vocabulary: int) -> list[float]:
    """Milliseconds until the first token where there is one alone, else of a further one; the realised ratio; milliseconds of the
    same on the device alone. `tau`: None for vLLM alone."""
    import serving

    if tau is not None:
        llm.collective_rpc("ace_set", kwargs={"threshold": tau})
        llm.collective_rpc("ace_reset")
    if tokens == 1:  # the first prompt behind a request to the workers waits for a host that has slept
        generate(llm, batch, prompt, tokens, seed + 1000, vocabulary)
    (wall, step), launched = on_device(llm, lambda: generate(llm, batch, prompt, tokens, seed, vocabulary))
    realised = 0.0 if tau is None else serving.ratios(llm)[serving.phase_of(tokens)]
    alone = sum(launched["passes"]) if tokens == 1 else sum(launched["replays"]) / (tokens - 1)
    return [1e3 * (wall if tokens == 1 else step), realised, alone]


def to_time(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Sequences, tokens of their prompts and tokens to write: decode batches, then prompts."""
    prompts = (map(int, size.split("x")) for size in options.ttft)
    decode = [(batch, options.prompt, options.decode + 1) for batch in options.batches]
    return [*decode, *((batch, prompt, 1) for batch, prompt in prompts)]


def settle(engine: Version, ratio: float, size: tuple[int, int, int]) -> float:
    return settled(lambda tau: engine.time(tau, *size, 7)[1], ratio, 30)


def medians(engines: dict[str, Version], ways: list[Way], size: tuple[int, int, int], alone: str) -> dict[str, Any]:
    """Of each way at one size, the rounds interleaved; `alone` is what time on the device goes by."""
    found: dict[str, list[list[float]]] = {way: [] for way, *_ in ways}
    for seed in range(ROUNDS + 1):  # the first warms up
        for way, name, tau in ways:
            found[way].append(engines[name].time(tau, *size, seed))
    row: dict[str, Any] = {"batch": size[0], "prompt": size[1], "tokens": size[2]}
    for at, what in enumerate(("ms", "realised", alone)):
        row[what] = {way: statistics.median(values[at] for values in times[1:]) for way, times in found.items()}
    return row | {"all_ms": {way: [round(values[0], 4) for values in times[1:]] for way, times in found.items()}}


def measure(engines: dict[str, Version], size: tuple[int, int, int], ratio: float) -> dict[str, Any]:
    tau = settle(engines["this"], ratio, size)
    own = [name for name in engines if name != "stock"]
    ways: list[Way] = [(f"{name} {r:.0%}", name, t) for name in own for r, t in ((0, 0.0), (ratio, tau))]
    found = medians(engines, [("vLLM", "stock", None), *ways], size, "device_ms")
    return {"ratio": ratio, "threshold": tau, **found}


def show(row: dict[str, Any], ratio: float) -> None:
    part = f"{ratio:.0%}"
    for what in ("ms", "device_ms"):
        ms = row[what] if all(row[what].values()) else dict.fromkeys(row[what], float("nan"))  # a CPU has no events
        print(
            f"{row['batch']:>3} x {row['prompt']:<5} {row['tokens']:>3} {what:>9}  "
            + "  ".join(f"{way} {value:.3f}" for way, value in ms.items())
            + "".join(
                f"  this/{name} {ratios(ms, name, part)}"
                for name in ("other", "vLLM")
                if f"{name} 0%" in ms or name in ms
            ),
            flush=True,
        )


def ratios(ms: dict[str, float], name: str, part: str) -> str:
    """Of this version to the other or to vLLM alone, unskipped and skipped."""
    beside = {at: ms.get(f"{name} {at}", ms.get(name)) for at in ("0%", part)}
    return " ".join(f"{ms[f'this {at}'] / value:.3f}" for at, value in beside.items() if value)


def launch(options: argparse.Namespace) -> dict[str, Version]:
    """All at once: an engine takes minutes to start, most of it on one core."""
    roots = {"stock": HERE, "this": HERE, **({"other": options.other.resolve()} if options.other else {})}
    flags = [flag for flag in sys.argv[1:] if flag != str(options.other)]
    engines = {}
    for name, root in roots.items():
        own = {"VLLM_CACHE_ROOT": tempfile.mkdtemp()}  # two versions must not read each other's compiled graphs
        engines[name] = Version(__file__, root, [name, *flags], **own)
    for engine in engines.values():
        engine.wait()
    return engines


def main() -> None:
    made = engine_options(parser(__doc__, prompt=256, decode=64, ratio=0.6), memory=0.3, cache=3.0, length=1280)
    made.add_argument("other", type=Path, nargs="?")
    made.add_argument("--serve", help=argparse.SUPPRESS)
    made.add_argument("--tiny", action="store_true", help="a tiny shape, for a CPU")
    made.add_argument("--layers", type=int, help="fewer layers")
    made.add_argument("--batches", type=int, nargs="*", default=[1, 4, 9, 16, 64])
    made.add_argument("--ttft", nargs="*", default=["4x1024"])
    made.add_argument("--offload", type=float, default=0.0, help="GiB of experts that stay in host memory")
    options = made.parse_args()
    if options.serve:
        return serve(Engine(options))
    engines, rows = launch(options), []
    for size in to_time(options):
        rows.append(measure(engines, size, options.ratio))
        show(rows[-1], options.ratio)
        store(options.out, made_here(rows=rows))
    for engine in engines.values():
        engine.end()


if __name__ == "__main__":
    main()
