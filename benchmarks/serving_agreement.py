"""Whether vLLM with the plugin says what transformers with ACE says: greedy tokens, log-probabilities, kept slots.

    python benchmarks/serving_agreement.py MODEL [--dtypes float32 bfloat16] [--budget 0.5] [--out FILE]
    python benchmarks/serving_agreement.py MODEL --dtypes bfloat16 --threshold 0.108 --text FILE --prompts 48

τ is put into a gap between the scores that the transformers integration sees, so that rounding may not flip a slot in
fp32. Further types use the same τ: in bf16 the two engines round differently already without skipping, and their agreement
at threshold 0 is shown beside. Where one token differs, all behind it may: prompts that agree to the end are counted too.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, or a CPU engine wants most of the memory
# or fp32 products on a GPU are TF32, and near ties route the other way
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "serving"))

import torch
from running import made_here, parser, store
from serving_cases import PROMPTS, Reference, in_a_gap, reference

from ace_moe import ACE, build_plan
from ace_moe.checkpoint.loading import load_model, load_tokenizer
from ace_moe.engines.vllm import engine_args
from ace_moe.engines.vllm.control import report, reset, set_threshold
from ace_moe.plan import Plan

WORDS = 24  # of a piece of text


def references(
    model: str, plan: Plan, dtype: str, threshold: float | None, options: argparse.Namespace
) -> list[Reference]:
    """At threshold 0 and at the budget: at a threshold in a gap, or at the one that fp32 had."""
    tokenizer = load_tokenizer(model)
    starts = [tokenizer(text)["input_ids"] for text in prompts(options)]
    loaded = load_model(model, dtype=dtype)
    ace = ACE(plan)
    with ace(loaded):
        dense, _ = reference(loaded, ace, 0.0, starts, options.tokens)
        if threshold is not None:
            found, _ = reference(loaded, ace, threshold, starts, options.tokens)
    if threshold is None:
        found = in_a_gap(loaded, plan, starts, options.budget, options.tokens)
    del loaded
    gc.collect()
    torch.cuda.empty_cache()
    return [dense, found]


def engine(model: str, plan: Path, dtype: str, options: argparse.Namespace) -> Any:
    from vllm import LLM

    return LLM(
        model, dtype=dtype, max_model_len=512, enforce_eager=options.eager, enable_prefix_caching=False, seed=0,
        **({"gpu_memory_utilization": 0.08} if torch.cuda.is_available() else {}),
        **engine_args(plan, 0.0, kernels=options.kernels == "on", restore=False),
    )  # fmt: skip


def prompts(options: argparse.Namespace) -> list[str]:
    """The tests' own, or so many pieces of a text."""
    if options.text is None:
        return list(PROMPTS)
    words = options.text.read_text(encoding="utf-8").split()
    return [" ".join(words[at : at + WORDS]) for at in range(0, len(words) - WORDS, len(words) // options.prompts)][
        : options.prompts
    ]


def compare(llm: Any, wanted: Reference, options: argparse.Namespace) -> dict[str, Any]:
    from vllm import SamplingParams, TokensPrompt

    set_threshold(llm, wanted.threshold)
    reset(llm)
    tokenizer = load_tokenizer(options.model)
    given = [TokensPrompt(prompt_token_ids=tokenizer(text)["input_ids"]) for text in prompts(options)]
    params = SamplingParams(
        temperature=0, max_tokens=options.tokens, ignore_eos=True, prompt_logprobs=1, detokenize=False
    )
    outs = llm.generate(given, params, use_tqdm=False)
    worst = max(
        abs(entry.logprob - float(expected[token]))
        for out, logprobs in zip(outs, wanted.logprobs, strict=True)
        for row, expected in zip(out.prompt_logprobs[1:], logprobs, strict=False)
        for token, entry in row.items()
    )
    pairs = [
        (a, b) for o, t in zip(outs, wanted.tokens, strict=True) for a, b in zip(o.outputs[0].token_ids, t, strict=True)
    ]
    whole = sum(list(o.outputs[0].token_ids) == t for o, t in zip(outs, wanted.tokens, strict=True))
    found = report(llm)
    kept = {k: sum(phase["kept"] for phase in layer.values()) for k, layer in found["layers"].items()}
    return {
        "threshold": wanted.threshold, "nearest_score": wanted.nearest, "realised": found["realised"],
        "tokens": len(pairs), "equal_tokens": sum(a == b for a, b in pairs), "worst_prompt_logprob": worst,
        "prompts": len(outs), "equal_prompts": whole,
        "kept": kept, "kept_transformers": {k: v for k, (_, v) in wanted.counts.items()},
    }  # fmt: skip


def main() -> None:
    made = parser(__doc__, dtypes=["float32", "bfloat16"], budget=0.5, tokens=32, eager=False)
    made.add_argument("model")
    made.add_argument("--threshold", type=float, help="τ; without it one in a gap is looked for")
    made.add_argument("--text", type=Path)
    made.add_argument("--prompts", type=int, default=48, help="pieces of the text")
    made.add_argument("--kernels", choices=["on", "off"], default="off")
    options = made.parse_args()
    plan = build_plan(options.model)
    folder = tempfile.TemporaryDirectory()
    path = plan.save(Path(folder.name) / "plan.safetensors")
    import vllm  # builds for the CPU have another name among the installed packages

    results = made_here(torch=torch.__version__, vllm=vllm.__version__)
    threshold = options.threshold
    for dtype in options.dtypes:
        wanted = references(options.model, plan, dtype, threshold, options)
        threshold = wanted[1].threshold
        llm = engine(options.model, path, dtype, options)
        for name, one in zip(("threshold 0", f"{options.budget:.0%}"), wanted, strict=True):
            row = results[f"{dtype} {name}"] = compare(llm, one, options)
            same = "equal" if row["kept"] == row["kept_transformers"] else "differ"
            tokens = f"{row['equal_tokens']}/{row['tokens']} tokens, {row['equal_prompts']}/{row['prompts']} prompts"
            worst, realised = f"worst |Δ log p| {row['worst_prompt_logprob']:.1e}", f"realised {row['realised']:.3f}"
            print(f"{dtype} {name}: {tokens}, {worst}, {realised}, kept slots {same}")
            store(options.out, results)
        del llm
        gc.collect()
    folder.cleanup()


if __name__ == "__main__":
    main()
