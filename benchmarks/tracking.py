"""Whether thresholds keep a budget by themselves: teacher-forced decoding over texts that follow one another, no pass before.

    python benchmarks/tracking.py MODEL --text wikipedia.jsonl code.jsonl books.jsonl docs.jsonl -o tracking.json

Decode steps of `--batch` sequences; each text has the same share of the tokens. After every step the slots the rule skipped
are read; what counts is the worst mean over any `--span` tokens behind the first `--warm`, switches between texts included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from running import made_here, parser, store
from torch import Tensor

from ace_moe import ACE, build_plan
from ace_moe.checkpoint.loading import load_model, load_tokenizer, load_windows
from ace_moe.decoding import Decoder
from ace_moe.policies import make


@torch.no_grad()
def stream(decoder: Decoder, ace: ACE, texts: list[Tensor], prompt: int) -> list[tuple[int, float]]:
    """(tokens, ratio the rule skipped) of every decode step; texts [B, L] each."""
    seen = [counted(ace)]
    for ids in texts:
        decoder.prefill(ids[:, :prompt])
        for i in range(prompt, ids.shape[1]):
            decoder.step(ids[:, i : i + 1])
            seen.append(counted(ace))
    steps = torch.stack(seen).diff(dim=0).tolist()
    return [(len(texts[0]), 1 - kept / routed) for routed, kept, *_ in steps]


def counted(ace: ACE) -> Tensor:
    """Slots that were routed and kept so far, all layers together: the row of decode."""
    return torch.stack([layer.counts[2] for layer in ace.deciders.values()]).sum(0)


def worst(steps: list[tuple[int, float]], asked: float, span: int, warm: int) -> float:
    """The largest difference of a mean over `span` tokens, in points."""
    ratios = torch.tensor([r for n, r in steps for _ in range(n)], dtype=torch.float64)[warm:]
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), ratios.cumsum(0)])
    span = min(span, len(ratios))
    return float(((sums[span:] - sums[:-span]) / span - asked).abs().max() * 100)


def main() -> None:
    sizes: dict[str, Any] = {"batch": 16, "tokens": 32768, "length": 272, "prompt": 16, "span": 20000, "warm": 4000}
    made = parser(__doc__, device="cpu", policy="share", skip=[0.1, 0.3, 0.6], **sizes)
    made.add_argument("model")
    made.add_argument("--text", nargs="+", type=Path, required=True)
    options = made.parse_args()
    model, tokenizer = load_model(options.model, options.device), load_tokenizer(options.model)
    plan = build_plan(options.model)
    rounds = max(1, options.tokens // (len(options.text) * options.batch * (options.length - options.prompt)))
    size = options.length * options.batch * rounds
    texts = [load_windows(model, tokenizer, text, options.length, size).ids for text in options.text]
    parts = [part.to(model.device) for ids in texts for part in ids.split(options.batch)]
    rows: list[dict[str, Any]] = []
    for skip in options.skip:
        budget = {"prefill": 0.0, "decode": skip}
        with ACE(plan, budget, policy=make(options.policy), control="track")(model) as ace:
            torch._dynamo.reset()
            steps = stream(Decoder(model, options.batch, options.length), ace, parts, options.prompt)
            tau = float(ace.thresholds[1])
        row = {"model": Path(options.model).name, "policy": options.policy, "batch": options.batch, "asked": skip,
               "tokens": sum(n for n, _ in steps), "worst_points": worst(steps, skip, options.span, options.warm),
               "mean": sum(n * r for n, r in steps) / sum(n for n, _ in steps), "threshold": tau}  # fmt: skip
        rows.append(row)
        print(json.dumps(row), flush=True)
        store(options.out, made_here(rows=rows))


if __name__ == "__main__":
    main()
