"""What `ace tune` chooses, held against every candidate it tried, on texts it did not see.

    python benchmarks/tuned.py MODEL --tune wiki103.valid.txt --texts wiki.test.raw books.jsonl … [--device cuda] [-o FILE]

Tuned on one text at the budgets, then measured on the others: each candidate's thresholds come from the unskipped model on the
text itself, so all skip the same, and KL is moved to the budget from the ratio that was realised. `--candidates N`: the best N by
tuning beside every score with `power`; 0 takes all.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from running import parser, store

from ace_moe import build_plan
from ace_moe.checkpoint.loading import load_model
from ace_moe.files import hashes
from ace_moe.lab.tune import Tuned, tune
from ace_moe.lab.tune.candidates import BASELINE, key_of, label, scores
from ace_moe.lab.tune.evidence import Evidence, Part, logs_at
from ace_moe.lab.tune.trials import Trials
from ace_moe.mapping import TextSource
from ace_moe.mapping.unfinished import Journal
from ace_moe.policies import PRESETS, Ace, TokenPolicy, make
from ace_moe.provenance import provenance
from ace_moe.text import Text

ALLOWED = 0.05  # how far the choice may be behind the best candidate


def measure(search: Trials, policies: list[TokenPolicy], count: int) -> dict[str, Any]:
    """By candidate: KL at each budget, change of perplexity, KL by window for pairs."""
    found, part, tokens = {}, Part(0, count), search.windows.ids.shape[1] - 1
    tell = Evidence(search.journal, search.budgets, part, tokens)
    for policy in policies:
        search.measure(policy, count)
        rows, row = search.journal.rows[key_of(policy)], tell.row(policy)
        found[label(policy)] = {
            "kl": [math.exp(x) / tokens for x in logs_at(rows, search.budgets, part)],
            "realised": row["realised"],
            "perplexity_change": row["perplexity_change"],
            "by_window": [[round(cell[0] / tokens, 6) for cell in window] for window in rows[:count]],
        }
    return found


def judge(texts: dict[str, dict[str, Any]], auto: str, budgets: list[float]) -> dict[str, Any]:
    """KL in the mean over texts, and how far the choice is behind the best candidate, at each budget and in all."""
    names = list(next(iter(texts.values())))
    mean = {n: [sum(t[n]["kl"][i] for t in texts.values()) / len(texts) for i in range(len(budgets))] for n in names}
    total = {n: sum(map(math.log, kls)) / len(kls) for n, kls in mean.items()}
    best = min(total, key=lambda n: total[n])
    behind = math.exp(total[auto] - total[best]) - 1
    each = [mean[auto][i] / min(kls[i] for kls in mean.values()) - 1 for i in range(len(budgets))]
    found = {"mean_kl": mean, "auto": auto, "best": best, "behind": behind}
    return {**found, "behind_each": each, "met": behind <= ALLOWED}


def listed(tuned: Tuned, number: int) -> list[TokenPolicy]:
    """What is measured: named methods, the choice, and the best of the rest."""
    tried = [_made(row["settings"]) for row in tuned.tried]
    rest = [p for p in tried if label(p) in {label(s) for s in scores()}]
    named = [tuned.policy, PRESETS["paper"], Ace(), BASELINE]
    return list(dict.fromkeys([*named, *tried[: number or len(tried)], *rest]))


def _made(settings: dict[str, Any]) -> TokenPolicy:
    common = {name: settings[name] for name in ("gain", "min_active", "min_mass", "factor")}
    made = make(settings["policy"], **settings["params"], **common)
    assert isinstance(made, TokenPolicy)
    return made


def main() -> None:
    made = parser(__doc__, budgets=[0.4, 0.5, 0.6], window=1024, candidates=12, device="cpu")
    made.add_argument("model", type=Path)
    made.add_argument("--tune", type=Path, required=True)
    made.add_argument("--texts", type=Path, nargs="+", required=True)
    made.add_argument("--tokens", type=int, default=16384, help="of the text that is tuned on")
    made.add_argument("--windows", type=int, default=4, help="of each text that is measured on")
    made.add_argument("--work", type=Path, help="a file beside which a stopped search goes on")
    options = made.parse_args()
    model, plan, start = load_model(options.model, options.device), build_plan(options.model), time.perf_counter()
    windows = TextSource(options.model, Text.of(options.tune), options.window, options.tokens).windows(model)
    tuned = tune(model, plan, windows, options.budgets, path=options.work)
    seconds = time.perf_counter() - start
    result: dict[str, Any] = {
        "kind": "tuned",
        "provenance": provenance(model.device, hashes((options.tune, *options.texts))),
        "model": options.model.name,
        **{"budgets": options.budgets, "window": options.window, "windows": options.windows, "seconds": seconds},
        **{"recommendation": tuned.recommendation, "tried": tuned.tried, "texts": {}},
    }
    result["command"] = result["provenance"]["command"]
    policies = listed(tuned, options.candidates)
    for text in options.texts:
        read = TextSource(options.model, Text.of(text), options.window, options.windows * options.window).windows(model)
        search = Trials(model, tuned.searched, read, options.budgets, Journal(None, {}))
        usable = [p for p in policies if search.has(p.tables)]
        result["texts"][text.name] = measure(search, usable, len(read.ids))
        result["judged"] = judge(result["texts"], label(tuned.policy), options.budgets)
        store(options.out, result)
        print(text.name, f"{time.perf_counter() - start:.0f} s", flush=True)
    for name, kls in sorted(result["judged"]["mean_kl"].items(), key=lambda item: item[1][0]):
        print(f"{name:60s}", *(f"{kl:.4f}" for kl in kls))
    print({k: v for k, v in result["judged"].items() if k != "mean_kl"}, f"tuned in {seconds:.0f} s")


if __name__ == "__main__":
    main()
