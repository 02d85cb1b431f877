"""Requests to vLLM that are all there when it begins: by itself it begins with the first of them, and a pass becomes two."""

from __future__ import annotations

import time
from typing import Any

import torch


def generate(llm: Any, batch: int, prompt: int, tokens: int, seed: int, vocabulary: int) -> tuple[float, float]:
    """(seconds until all requests had their first token, seconds per further token)."""
    from vllm import SamplingParams, TokensPrompt

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, vocabulary, (batch, prompt), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine.engine_core
    engine.call_utility("pause_scheduler", "keep", False)
    llm.enqueue([TokensPrompt(prompt_token_ids=p) for p in ids], params, use_tqdm=False)
    began = time.perf_counter()
    engine.call_utility("resume_scheduler")
    outs = llm.wait_for_completion(use_tqdm=False)
    wall = time.perf_counter() - began
    first, last = (max(getattr(o.metrics, name) for o in outs) for name in ("first_token_ts", "last_token_ts"))
    return (wall, 0.0) if tokens == 1 else (wall, (last - first) / (tokens - 1))
