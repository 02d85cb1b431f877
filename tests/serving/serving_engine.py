"""Runs one vLLM engine in a process of its own, by a JSON file, and writes what came out as JSON.

    python serving_engine.py SPEC OUT

SPEC: model, prompts (token ids), max_tokens, ace (or null), llm (arguments of vllm.LLM), steps, logprobs (8 unless told).
Each step is a change of budget ({"threshold": 0.1}, {"skip": 0.5} or {}) followed by one generation of all prompts, or of
those in "only"; "extra" are the requests' own arguments.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# An engine in another process starts on the first request while the rest are still on their way: which requests share a
# step, and with it the last bits of a product, would depend on the load of the machine.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from ace_moe.engines.vllm import control
from ace_moe.engines.vllm.control import AceWorker, together
from ace_moe.engines.vllm.skipping import find


class AuditedWorker(AceWorker):
    """Counts the slots that reach the CPU kernel itself."""

    def audit_begin(self) -> None:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        kernel = getattr(cpu_moe.cpu_fused_moe, "inner", cpu_moe.cpu_fused_moe)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counted.slots += args[7].numel()  # type: ignore[attr-defined]
            return kernel(*args, **kwargs)

        counted.slots, counted.inner = 0, kernel  # type: ignore[attr-defined]
        cpu_moe.cpu_fused_moe = counted

    def audit_read(self) -> int:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        return cpu_moe.cpu_fused_moe.slots

    def trace_begin(self) -> None:
        """Write down what the runner says of every step: lengths, computed, prompts and drafts of its requests."""
        classes = find(self.vllm_config).classes  # type: ignore[union-attr]
        mark, self.trace = type(classes).mark, []

        def traced(step: Any) -> None:
            self.trace.append([part.tolist() if hasattr(part, "tolist") else part for part in step])
            mark(classes, step)

        classes.mark = traced  # type: ignore[method-assign]

    def trace_read(self) -> list[Any]:
        return self.trace

    def module_classes(self) -> list[str]:
        """Every class in the model, and of the routers, which are no modules."""
        modules = list(self.model_runner.model.modules())  # type: ignore[attr-defined]
        routers = [m.router for m in modules if hasattr(m, "router")]
        return sorted({f"{type(m).__module__}.{type(m).__name__}" for m in [*modules, *routers]})

    def runner(self) -> str:
        """Where the model runner's class is from: it says which generation this is."""
        return type(self.model_runner).__module__  # type: ignore[attr-defined]

    def hooked(self) -> bool:
        classes = (*type(self.model_runner).__mro__, *type(self).__mro__)  # type: ignore[attr-defined]
        return any(hasattr(cls, "_ace_hooked") for cls in classes)


def main(spec_path: str, out_path: str) -> None:
    from vllm import LLM

    from ace_moe.engines.vllm import KEY

    spec = json.loads(Path(spec_path).read_text())
    ace = {"additional_config": {KEY: spec["ace"]}} if spec["ace"] is not None else {}
    given: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 512, "seed": 0, "enable_prefix_caching": False, "max_logprobs": 16,
        "worker_extension_cls": "serving_engine.AuditedWorker",
    }  # fmt: skip
    llm = LLM(spec["model"], **given | ace | spec["llm"])
    start = together(llm.collective_rpc("ace_report")) if ace else None
    results = [step(llm, spec, change) for change in spec["steps"]]
    extra = {name: llm.collective_rpc(name)[0] for name in ("module_classes", "hooked", "runner")}
    Path(out_path).write_text(json.dumps({"start": start, "steps": results, **extra}))


def step(llm: Any, spec: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    on = spec["ace"] is not None
    budget = {k: v for k, v in change.items() if k not in ("only", "extra")}
    if on and budget:
        control.change(llm, **budget)
    if on:
        llm.collective_rpc("ace_reset")
        llm.collective_rpc("trace_begin")
    llm.collective_rpc("audit_begin")
    prompts = [spec["prompts"][i] for i in change.get("only", range(len(spec["prompts"])))]
    found = generate(llm, prompts, spec["max_tokens"], spec.get("logprobs", 8), change.get("extra"))
    report = together(llm.collective_rpc("ace_report")) if on else None
    trace = llm.collective_rpc("trace_read")[0] if on else None
    return {**found, "report": report, "trace": trace, "executed": llm.collective_rpc("audit_read")}


def generate(
    llm: Any, prompts: list[list[int]], tokens: int, logprobs: int | None, extra: list[Any] | None = None
) -> dict[str, Any]:
    """Greedy tokens of all prompts at once, and the log-probabilities of the likeliest at every position."""
    from vllm import SamplingParams, TokensPrompt

    common: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    common |= {"prompt_logprobs": logprobs, "logprobs": logprobs}
    params = [SamplingParams(**common, extra_args=own) for own in extra or [None] * len(prompts)]
    outs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in outs],
        "cached": [o.num_cached_tokens for o in outs],
        "prompt_logprobs": [[_values(row) for row in (o.prompt_logprobs or ())[1:]] for o in outs],
        "logprobs": [[_values(row) for row in o.outputs[0].logprobs or ()] for o in outs],
    }


def _values(row: dict[int, Any]) -> dict[str, float]:
    return {str(token): entry.logprob for token, entry in row.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
