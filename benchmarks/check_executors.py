"""What runs skipped slots in vLLM, model by model: the executor and why, a poison test, and a token's time at 0 % and 60 %.

    python benchmarks/check_executors.py --models fp8 mxfp4 --out executors_h200.json
    python benchmarks/check_executors.py --models qwen3.6 gemma-4 --batches 1 4 16 --out executors_h200.json
    python benchmarks/check_executors.py --models fp8 --tiny --eager --decode 4      # on a CPU, to try the script

Engines start together, each in a process of its own, and are timed in turn: vLLM alone, and one for each way to skip.
Weights are random and of sane size in every format (as in serving.py: norms 1, embeddings N(0, 10), the rest 0.02 wide),
thresholds are found so that the ratio is realised. `step_ms` is the time on the device, without the host: of a decode step's
captured graphs, or of a prompt's pass. The poison test fills every second expert with NaN or huge numbers, marks its slots as
skipped and asks for the same output to the last bit; where those slots are not marked it must be spoilt, or the poison would
prove nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from running import engine_options, made_here, parser, store
from serving_against import medians, settle, timed, to_time
from versions import HERE, Version, serve

from ace_moe.lab.bench.shapes import GEMMA4_26B, GPT_OSS_20B, QWEN3_30B, QWEN36_35B
from serving import TINY, engine_args, start, write_plan

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
# configuration and architecture, sizes, layers (two engines must fit), quantisation, and the ways to skip that are timed
MODELS: dict[str, tuple[str, str, dict[str, Any], int, dict[str, Any] | None, tuple[str, ...]]] = {
    "fp8": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3_30B, 12, FP8, ("auto",)),
    "mxfp4": ("GptOssConfig", "GptOssForCausalLM", GPT_OSS_20B, 16, MXFP4, ("auto", "stock routing")),
    "w4a16": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3_30B, 32, GPTQ, ("auto",)),
    "gemma-4": ("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA4_26B, 26, None, ("auto",)),
    "qwen3.6": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", QWEN36_35B, 28, None, ("auto",)),
}
# what vLLM is told, so that it needs neither FlashInfer nor CUTLASS for attention
ENGINE: dict[str, dict[str, Any]] = {
    "gemma-4": {"attention_backend": "TRITON_ATTN"},
    "qwen3.6": {"additional_config": {"gdn_prefill_backend": "triton"}},
}
WAYS: dict[str, dict[str, Any]] = {
    "auto": {}, "native": {"executor": "native"}, "kernels": {"kernels": True},
    "stock routing": {"executor": "native", "routing": "vllm"},
}  # fmt: skip
POISONED = (1, 4, 16, 300)  # tokens


# ---- an engine --------------------------------------------------------------------------------------------------


def sizes_of(model: str, options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The model's configuration, and the sizes a plan wants."""
    import transformers

    kind, architecture, sizes, layers, quantised, _ = MODELS[model]
    given = {**sizes, "num_hidden_layers": options.layers or layers}
    if options.tiny:
        assert kind == "Qwen3MoeConfig", "tiny models are Qwen3's"
        given = {**TINY, "hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    config = getattr(transformers, kind)(**given, architectures=[architecture], dtype="bfloat16")
    if quantised and not options.tiny:
        config.quantization_config = quantised
    of = {name: getattr(config, name, None) for name in ("num_local_experts", "top_k_experts", "moe_intermediate_size")}
    return config, {
        "hidden_size": config.hidden_size, "num_hidden_layers": config.num_hidden_layers, "vocab_size": config.vocab_size,
        "num_experts": getattr(config, "num_experts", None) or of["num_local_experts"],
        "num_experts_per_tok": getattr(config, "num_experts_per_tok", None) or of["top_k_experts"],
        "moe_intermediate_size": of["moe_intermediate_size"] or config.intermediate_size,
    }  # fmt: skip


class Engine:
    """Serves one model in one way."""

    def __init__(self, options: argparse.Namespace):
        model, _, way = options.serve.partition("/")
        config, sizes = sizes_of(model, options)
        folder = Path(tempfile.mkdtemp())
        config.save_pretrained(folder)
        self.vocabulary, self.stock = int(sizes["vocab_size"]), way == "vLLM"
        given = {"allow_other_weights": True, "restore": False, "policy": "share", **WAYS.get(way, {})}
        ace = {} if self.stock else engine_args(write_plan(folder / "plan.safetensors", sizes), 0.0, **given)
        own = dict(ENGINE.get(model, {}))
        more = {**own.pop("additional_config", {}), **ace.pop("additional_config", {})}
        self.llm = start(folder, options, worker="poison.PoisonWorker", **ace, **own, additional_config=more)

    def facts(self) -> Any:
        return self.llm.collective_rpc("check_facts")[0]

    def poison(self) -> Any:
        return self.llm.collective_rpc("check_poison", args=(list(POISONED),))[0]

    def time(self, tau: float | None, batch: int, prompt: int, tokens: int, seed: int) -> list[float]:
        return timed(self.llm, None if self.stock else tau, batch, prompt, tokens, seed, self.vocabulary)


# ---- the check --------------------------------------------------------------------------------------------------


def measure(engines: dict[str, Version], size: tuple[int, int, int], ratio: float) -> dict[str, Any]:
    """Medians of each way at one size, the rounds interleaved."""
    ways: list[tuple[str, str, float | None]] = [("vLLM", "vLLM", None)]
    for name in engines:
        if name != "vLLM":
            ways += [(f"{name} 0%", name, 0.0), (f"{name} {ratio:.0%}", name, settle(engines[name], ratio, size))]
    return {**medians(engines, ways, size, "step_ms"), "thresholds": {w: t for w, _, t in ways}}


def show(model: str, row: dict[str, Any]) -> None:
    for what in ("ms", "step_ms"):
        base = row[what]["vLLM"] or 1.0
        parts = (f"{way} {ms:.3f} ({ms / base:.3f}, {row['realised'][way]:.0%})" for way, ms in row[what].items())
        print(
            f"{model:>8} {row['batch']:>3} x {row['prompt']:<4} {row['tokens']:>3} {what:>7}  " + "  ".join(parts),
            flush=True,
        )


def check(model: str, engines: dict[str, Version], options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Into the results, stored after each row: an engine that ends takes no row along."""
    facts = {way: engine.facts() for way, engine in engines.items()}
    for way, found in facts.items():
        print(f"{model:>8} {way}: {json.dumps(found, ensure_ascii=False)}", flush=True)
    results[model] = {"layers": options.layers or MODELS[model][3], "executors": facts, "poison": {}, "rows": []}
    for size in to_time(options):
        results[model]["rows"].append(measure(engines, size, options.ratio))
        show(model, results[model]["rows"][-1])
        store(options.out, results)
    for way in engines:
        if way != "vLLM":
            results[model]["poison"][way] = poisoned = engines[way].poison()
            print(f"{model:>8} {way} poisoned: {json.dumps(poisoned)}", flush=True)
    store(options.out, results)


def launch(options: argparse.Namespace) -> dict[str, dict[str, Version]]:
    """All at once: an engine takes minutes to start, most of it on one core."""
    engines: dict[str, dict[str, Version]] = {}
    for model in options.models:
        engines[model] = {}
        for way in ("vLLM", *(["auto"] if options.tiny else MODELS[model][-1])):
            own = {"VLLM_CACHE_ROOT": tempfile.mkdtemp()}  # what one compiled is not the other's
            engines[model][way] = Version(__file__, HERE, [f"{model}/{way}", *sys.argv[1:]], **own)
    return engines


def all_ready(model: str, engines: dict[str, Version]) -> bool:
    """One model's engine that does not start leaves the others to be seen."""
    try:
        for engine in engines.values():
            engine.wait()
    except SystemExit as error:
        print(f"{model:>8} {error}", flush=True)
        return False
    return True


def main() -> None:
    made = engine_options(parser(__doc__, prompt=128, decode=48, ratio=0.6), memory=0.12, cache=2.0, length=1280)
    made.add_argument("--serve", help=argparse.SUPPRESS)
    made.add_argument("--models", nargs="+", choices=MODELS, default=["fp8", "mxfp4"])
    made.add_argument("--layers", type=int, help="as many layers in every model")
    made.add_argument("--batches", type=int, nargs="*", default=[4, 16])
    made.add_argument("--ttft", nargs="*", default=[], help="prompts: 4x1024")
    made.add_argument("--tiny", action="store_true", help="a tiny unquantised shape, for a CPU")
    options = made.parse_args()
    if options.serve:
        return serve(Engine(options))
    results, started = made_here(), launch(options)
    ready = {
        model: all_ready(model, engines) for model, engines in started.items()
    }  # one that starts would slow the others
    for model, engines in started.items():
        if ready[model]:
            check(model, engines, options, results)
        for engine in engines.values():
            engine.end()


if __name__ == "__main__":
    main()
