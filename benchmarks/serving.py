"""vLLM with and without skipping, interleaved in one run: TPOT by batch size and TTFT, on one GPU, by shape alone.

    python benchmarks/serving.py --repeats 9 --out benchmarks/results/serving_h200.json
    python benchmarks/serving.py --tiny --eager --batches 1 4 --ttft 2x64      # two minutes on a CPU, to try the script

Two engines share the GPU: vLLM as it is, and vLLM with the plugin, whose threshold is changed while it runs. Weights are
dummy weights made realistic (norms 1, embeddings N(0, 10) so that tokens stay apart, everything else N(0, 0.02)), so routing
is close to uniform; the spread of router logits and the union of distinct experts before and after skipping are stored.
Tables are all 1: random weights have no expert that matters more, and a made-up table would shrink the union more than
routing does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from running import engine_options, made_here, parser, store
from together import generate

from ace_moe.cli.serving import parse_kernels
from ace_moe.engines.vllm import engine_args, register
from ace_moe.engines.vllm.control import AceWorker, report, reset, set_threshold
from ace_moe.lab.bench.shapes import QWEN3_30B
from ace_moe.mapping.recipe import bisect

register()  # also where the package is on the path without being installed: workers import this module
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 4, "num_experts": 32,
    "num_experts_per_tok": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024,
    "norm_topk_prob": True, "max_position_embeddings": 4096,
}  # fmt: skip
SIZES = [1, 2, 4, 8, 16, 32, 64]
# by layer: ids [T, k] before and after the rule, and the spread of logits
Seen = dict[str, tuple[torch.Tensor, torch.Tensor, float]]


class BenchWorker(AceWorker):
    """RPCs of the benchmark: realistic weights, and a look at the routing of one pass."""

    @torch.no_grad()
    def bench_weights(self) -> int:
        model = self.model_runner.model  # type: ignore[attr-defined]
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(0)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 10 if "embed_tokens" in name else 0.02, generator=generator)
            else:
                parameter.data.fill_(1)
        return sum(p.numel() for p in model.parameters())

    def bench_watch(self) -> None:
        """Record routed and kept ids and the spread of logits in passes that run outside CUDA graphs (long prompts)."""
        self.seen: Seen = {}
        for module in self.model_runner.model.modules():  # type: ignore[attr-defined]
            if hasattr(module, "ace_decider"):
                _watch(module, self.seen)

    def bench_seen(self, batches: list[int]) -> dict[str, Any]:
        for module in self.model_runner.model.modules():  # type: ignore[attr-defined]
            if hasattr(module, "ace_decider"):
                del module.router._compute_routing
        layers = {key: _unions(*found, batches) for key, found in self.seen.items()}
        return {"tokens": next(iter(self.seen.values()))[0].shape[0], "layers": layers}


def _watch(module: Any, seen: Seen) -> None:
    stock: Any = type(module.router).__mro__[1]  # in front of the rule

    def _compute_routing(hidden: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        gates, ids = stock._compute_routing(module.router, hidden, logits, *args, **kwargs)
        new_ids, new_gates = module.ace_decider.decide(ids, gates)
        seen[module.ace_decider.key] = (ids.cpu(), new_ids.cpu(), float(logits.float().std(-1).mean()))
        return new_gates, new_ids

    module.router._compute_routing = _compute_routing


def _unions(ids: torch.Tensor, kept: torch.Tensor, spread: float, batches: list[int]) -> dict[str, Any]:
    """Distinct experts that B random tokens need, before and after skipping; mean of 20 draws."""
    generator = torch.Generator().manual_seed(0)
    out: dict[str, Any] = {"logit_std": spread, "union": {}}
    for batch in batches:
        draws = [torch.randperm(len(ids), generator=generator)[:batch] for _ in range(20)]
        before = statistics.mean(len(ids[d].unique()) for d in draws)
        after = statistics.mean(len(set(kept[d].flatten().tolist()) - {-1}) for d in draws)
        out["union"][str(batch)] = [before, after]
    return out


# ---- model and engines ------------------------------------------------------------------------------------------


def write_model(folder: Path, sizes: dict[str, Any]) -> Path:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(**sizes, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16", tie_word_embeddings=False)
    config.save_pretrained(folder)
    return folder


def write_plan(path: Path, sizes: dict[str, Any], budgets: dict[float, float] | None = None) -> Path:
    """`budgets`: thresholds of policy `share`, as if they had been mapped."""
    from ace_moe.plan import Fingerprint, Plan, Routers
    from ace_moe.plan.entries import Threshold, Workload
    from ace_moe.policies import make

    experts, hidden = sizes["num_experts"], sizes["hidden_size"]
    layer = {
        "experts": experts, "top_k": sizes["num_experts_per_tok"], "hidden": hidden,
        "intermediate": sizes["moe_intermediate_size"], "router": f"same:{experts}x{hidden}",
    }  # fmt: skip
    keys = [str(n) for n in range(sizes["num_hidden_layers"])]
    tables = {key: {"gsp": torch.ones(experts), "rcr": torch.ones(experts)} for key in keys}
    share, text = make("share").settings, Workload("none", "0" * 64, 1)
    entries = [
        Threshold(**share, budget=b, threshold=tau, realised=0.0, corrected=False, passes=1, workload=text)
        for b, tau in (budgets or {}).items()
    ]
    plan = Plan(tables, Fingerprint(dict.fromkeys(keys, layer), Routers("dummy")), "dummy")
    return plan.with_thresholds(entries).save(path)


def start(
    model: Path, options: argparse.Namespace, chunk: int = 16384, worker: str = "serving.BenchWorker",
    sizes: Sequence[int] = SIZES, **ace: Any,
) -> Any:  # fmt: skip
    """`sizes`: batches whose steps are captured; the largest is as many sequences as run at once."""
    from vllm import LLM

    began = time.perf_counter()
    graphs: dict[str, Any] = {"enforce_eager": True} if options.eager else {
        "compilation_config": {"cudagraph_capture_sizes": list(sizes)}
    }  # fmt: skip
    memory = {"gpu_memory_utilization": options.memory, "kv_cache_memory_bytes": int(options.cache * 2**30)}
    arguments = {"worker_extension_cls": worker, **memory, **graphs}
    if getattr(options, "offload", 0):
        arguments |= {"cpu_offload_gb": options.offload, "cpu_offload_params": {"w13_weight", "w2_weight"}}
    llm = LLM(
        str(model), load_format="dummy", skip_tokenizer_init=True, max_model_len=options.length, max_num_seqs=max(sizes),
        max_num_batched_tokens=chunk, enable_prefix_caching=False, disable_log_stats=False, seed=0, **{**ace, **arguments},
    )  # fmt: skip
    llm.collective_rpc("bench_weights")
    print(f"engine {'with ACE' if ace else 'as it is'} ready in {time.perf_counter() - began:.0f} s", flush=True)
    return llm


# ---- measuring --------------------------------------------------------------------------------------------------


def ratios(llm: Any) -> dict[str, float]:
    found = report(llm)
    return {phase: found[phase]["skipped"] for phase in ("prefill", "decode")}


def phase_of(tokens: int) -> str:
    return "prefill" if tokens == 1 else "decode"


class Run:
    """Both engines, measured in turn."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        sizes = dict(TINY if options.tiny else QWEN3_30B)
        sizes |= {"num_hidden_layers": options.layers} if options.layers else {}
        self.options, self.vocabulary = options, int(sizes["vocab_size"])
        model, plan = write_model(folder / "model", sizes), write_plan(folder / "plan.safetensors", sizes)
        given = {"kernels": parse_kernels(options.kernels), "routing": options.routing, "restore": options.restore}
        self.ace = start(model, options, **engine_args(plan, 0.0, allow_other_weights=True, **given))
        self.stock = None if options.no_stock else start(model, options)
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def prepare(self) -> None:
        """Warm up, and look at the routing."""
        prompt = self.options.prompt
        for llm in filter(None, (self.stock, self.ace)):
            generate(llm, max(self.options.batches), prompt, 8, 0, self.vocabulary)  # kernels compile here
        tau = self.threshold(16, prompt, 1)
        set_threshold(self.ace, tau)
        self.ace.collective_rpc("bench_watch")
        generate(self.ace, 16, max(prompt, 128), 1, 9, self.vocabulary)
        seen = self.ace.collective_rpc("bench_seen", args=(self.options.batches,))[0]
        found = report(self.ace)
        executors = found["executors"]
        self.facts = {"executors": executors, "refused": found["refused"], "routing": seen}
        spread = [layer["logit_std"] for layer in seen["layers"].values()]
        unions = [layer["union"] for layer in seen["layers"].values()]
        text = ", ".join(
            f"{b}: {statistics.mean(u[b][0] for u in unions):.1f} → {statistics.mean(u[b][1] for u in unions):.1f}"
            for b in unions[0]
        )
        print(f"executors {executors}, logit std {min(spread):.2f}–{max(spread):.2f}, union {text}", flush=True)

    def threshold(self, batch: int, prompt: int, tokens: int) -> float:
        """τ for the ratio at this size: a few tokens are not like a thousand."""

        def realised(tau: float) -> float:
            set_threshold(self.ace, tau)
            reset(self.ace)
            generate(self.ace, batch, prompt, tokens, 7, self.vocabulary)
            return ratios(self.ace)[phase_of(tokens)]

        return bisect(realised, self.options.ratio, 0.002, 14).threshold

    def ways(self, tau: float) -> list[tuple[str, Any, float | None]]:
        stock: list[tuple[str, Any, float | None]] = [("vLLM", self.stock, None)] if self.stock else []
        return [*stock, ("τ = 0", self.ace, 0.0), (f"{self.options.ratio:.0%}", self.ace, tau)]

    def measure(self, what: str, batch: int, prompt: int, tokens: int) -> None:
        """Interleaved repeats; one row for each way."""
        ways = self.ways(self.threshold(batch, prompt, tokens))
        times: dict[str, list[float]] = {name: [] for name, *_ in ways}
        found: dict[str, list[float]] = {name: [] for name, *_ in ways}
        for repeat in range(self.options.repeats + 1):
            for name, llm, tau in ways:
                if tau is not None:
                    set_threshold(llm, tau)
                    reset(llm)
                wall, per_token = generate(llm, batch, prompt, tokens, repeat, self.vocabulary)
                if repeat:  # the first warms up
                    times[name].append(1e3 * (wall if tokens == 1 else per_token))
                found[name].append(0.0 if tau is None else ratios(llm)[phase_of(tokens)])
        base = statistics.median(next(iter(times.values())))
        for name, _, tau in ways:
            values = times[name]
            realised = statistics.mean(found[name])
            row = {
                "what": what, "batch": batch, "prompt": prompt, "tokens": tokens, "way": name, "threshold": tau,
                "realised": realised, "median_ms": statistics.median(values), "all_ms": values,
                "speed": base / statistics.median(values),
            }  # fmt: skip
            self.rows.append(row)
            print(f"{what} {batch:>3} x {prompt:<5} {name:>6} {realised:6.1%} {row['median_ms']:9.3f} ms  "
                  f"{row['speed']:.3f}x  ({min(values):.3f}–{max(values):.3f})", flush=True)  # fmt: skip
        self.save()

    def save(self) -> None:
        import vllm

        versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        store(self.options.out, made_here(**versions, **self.facts, rows=self.rows))


def main() -> None:
    made = engine_options(parser(__doc__, repeats=5), memory=0.46, cache=3.0, length=1280)
    made.add_argument("--tiny", action="store_true", help="a tiny shape, for a CPU")
    made.add_argument("--layers", type=int, help="fewer layers")
    made.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64])
    made.add_argument("--prompt", type=int, default=256, help="tokens of a prompt in front of decoding")
    made.add_argument("--decode", type=int, default=64, help="tokens to decode")
    made.add_argument("--ttft", nargs="*", default=["16x1024"], help="batch x prompt")
    made.add_argument("--ratio", type=float, default=0.6, help="realised ratio to compare at")
    made.add_argument("--kernels", default="auto", help="our kernels: auto, on, off or a largest number of tokens")
    made.add_argument(
        "--routing", default="fused", help="vllm: its own top-k, then the rule; fused: one kernel for both"
    )
    made.add_argument("--restore", action="store_true", help="run slots whose expert is read anyway")
    made.add_argument("--offload", type=float, default=0, help="GiB of experts in host memory")
    made.add_argument("--no-stock", action="store_true", help="leave out the engine without the plugin")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options, Path(folder))
        run.prepare()
        for batch in options.batches:
            run.measure("TPOT", batch, options.prompt, options.decode + 1)
        for size in options.ttft:
            batch, prompt = map(int, size.split("x"))
            run.measure("TTFT", batch, prompt, 1)


if __name__ == "__main__":
    main()
