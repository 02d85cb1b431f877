"""Thresholds mapped on one text and carried to another: what ratio is realised, uncorrected and corrected.

python benchmarks/threshold_transfer.py MODEL MAP_TEXT MEASURE_TEXT [--tokens 16384] [--out FILE]
"""

from __future__ import annotations

from pathlib import Path

from running import made_here, parser, store

from ace_moe import ACE, build_plan
from ace_moe.checkpoint.loading import load_model, load_tokenizer, load_windows
from ace_moe.mapping import Passes
from ace_moe.mapping.fit import correct, quantile_fits
from ace_moe.policies import make

BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


def transfer(ace: ACE, mapped: Passes, measured: Passes) -> list[dict[str, float]]:
    """One row per budget; ratios in percent."""
    rows = []
    for fit in quantile_fits(mapped(0.0), BUDGETS):
        better = correct(mapped, fit)
        row = {"budget": fit.budget, "threshold": fit.threshold, "corrected_threshold": better.threshold}
        row |= {"mapped_realised": better.realised, "mapped_passes": better.passes}
        for name, tau in (("uncorrected", fit.threshold), ("corrected", better.threshold)):
            row[f"measured_{name}"] = measured(tau).ratio(tau)
        rows.append(row)
        print({k: round(v, 5) for k, v in row.items()})
    return rows


def main() -> None:
    made = parser(__doc__, tokens=16384)
    made.add_argument("model")
    made.add_argument("map_text", type=Path)
    made.add_argument("measure_text", type=Path)
    options = made.parse_args()
    model, plan = load_model(options.model), build_plan(options.model)
    tokenizer = load_tokenizer(options.model)
    texts = [load_windows(model, tokenizer, t, 1024, options.tokens) for t in (options.map_text, options.measure_text)]
    result = made_here(tokens=[t.workload.tokens for t in texts])
    for min_active in (1, 2):
        print(f"min_active {min_active}")
        ace = ACE(plan, policy=make("ace", min_active=min_active))
        with ace(model):
            result[f"min_active_{min_active}"] = transfer(ace, *(Passes(ace.deciders, model, t) for t in texts))
    store(options.out, result)


if __name__ == "__main__":
    main()
