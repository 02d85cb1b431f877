"""What restored slots are worth: decode batches of different sequences, teacher-forced, with and without, at one threshold.

    python benchmarks/restore_quality.py MODEL --policy top_p:squared=true --text a.txt b.jsonl -o restore.json

Each text gives `--batch` sequences. The threshold is found by letting it keep the budget over the decode steps, then frozen;
both runs use it. KL and agreement are against the same model with nothing skipped, over decoded tokens; experts read are
counted in the layers. Intervals are over sequences.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from running import made_here, parser, store
from torch import Tensor

from ace_moe import ACE, build_plan
from ace_moe.checkpoint.loading import load_model, load_tokenizer, load_windows
from ace_moe.policies import make
from ace_moe.policies.registry import parse


@torch.no_grad()
def decode(model: Any, ids: Tensor, prompt: int) -> Tensor:
    """Log-probabilities [B, L − prompt, V] behind each decoded token; ids [B, L]."""
    out = model(ids[:, :prompt], use_cache=True, logits_to_keep=1)
    found = []
    for i in range(prompt, ids.shape[1]):
        out = model(ids[:, i : i + 1], past_key_values=out.past_key_values)
        found.append(out.logits[:, -1].float().log_softmax(-1))
    return torch.stack(found, 1)


def compare(dense: Tensor, other: Tensor) -> dict[str, Any]:
    """Means over tokens, and KL by sequence."""
    kl = (dense.exp() * (dense - other)).sum(-1)
    agree = (dense.argmax(-1) == other.argmax(-1)).float()
    by_sequence = [round(float(x), 5) for x in kl.mean(1)]
    return {"kl": float(kl.mean()), "agreement": float(agree.mean()), "by_sequence": by_sequence}


def interval(plain: list[float], restored: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % of the ratio of means, resampling sequences in pairs."""
    a, b = torch.tensor(plain), torch.tensor(restored)
    at = torch.randint(len(a), (draws, len(a)), generator=torch.Generator().manual_seed(0))
    low, high = (b[at].mean(1) / a[at].mean(1)).quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def measure(model: Any, plan: Any, policy: Any, ids: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    budget = {"prefill": 0.0, "decode": options.skip}
    with ACE(plan, budget, policy=policy, control="track")(model) as ace:
        for _ in range(options.settle):
            decode(model, ids, options.prompt)
        tau = float(ace.freeze()[1])
    found: dict[str, Any] = {"threshold": tau}
    with ACE(plan, 0.0, policy=policy, reads=True)(model) as ace:
        dense = decode(model, ids, options.prompt)
        for name, on in (("plain", False), ("restored", True)):
            ace.set_threshold(torch.tensor([0.0, tau]))
            ace.set_restore(on)
            ace.reset()
            logits, report = decode(model, ids, options.prompt), ace.report()
            facts = {k: report["decode"][k] for k in ("skipped", "realised")}
            found[name] = compare(dense, logits) | facts | {"reads": report["reads"]["generated"]}
    plain, restored = found["plain"], found["restored"]
    found["kl_ratio"] = restored["kl"] / plain["kl"]
    found["kl_ratio_95"] = interval(plain["by_sequence"], restored["by_sequence"])
    return found


def main() -> None:
    made = parser(__doc__, policy="share", skip=0.6, batch=16, prompt=32, length=160, settle=1)
    made.add_argument("model")
    made.add_argument("--text", nargs="+", type=Path, required=True)
    options = made.parse_args()
    model, tokenizer, rows = load_model(options.model, device="cpu"), load_tokenizer(options.model), []
    name, settings = parse(options.policy)
    plan, policy = build_plan(options.model), make(name, **settings)
    for text in options.text:
        windows = load_windows(model, tokenizer, text, options.length, options.batch * options.length)
        row = {"model": Path(options.model).name, "text": text.name, "policy": options.policy, "skip": options.skip,
               "batch": options.batch, **measure(model, plan, policy, windows.ids, options)}  # fmt: skip
        rows.append(row)
        plain, restored = row["plain"], row["restored"]
        low, high = row["kl_ratio_95"]
        reads = f"{plain['reads']['ratio']:.3f} / {restored['reads']['ratio']:.3f}"
        print(
            f"{row['model']:10} {text.name:22} KL {plain['kl']:.4f} -> {restored['kl']:.4f} ({row['kl_ratio']:.2f}x, "
            f"{low:.2f}–{high:.2f})  skipped {plain['skipped']:.1%}  not run {restored['realised']:.1%}  reads {reads}",
            flush=True,
        )
        store(options.out, made_here(rows=rows))


if __name__ == "__main__":
    main()
