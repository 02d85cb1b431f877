"""The tour: the embedded model from checkpoint to perplexity at 0–60 % skipped, for the paper's rule and the best gain."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from ..ace import ACE
from ..checkpoint.loading import load_model, load_tokenizer, load_windows
from ..files import file_hash
from ..lab.report.figures import quality_curve
from ..mapping import Passes, map_budgets
from ..mapping.passes import attached
from ..plan import Plan
from ..policies import PRESETS, Ace, Policy
from ..provenance import provenance
from ..scoring.predictions import score
from ..tables import PAPER
from ..tables.build import build_plan
from ..text import Windows
from ..writing import Pair, tokens_of, write_pair

HERE = Path(__file__).parent
MODEL, TEXT = HERE / "demo-moe", HERE / "wikitext-2-slice.txt"
BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
WINDOW, TOKENS = 1024, 6 * 1024
PROMPT, NEW_TOKENS, SHOWN = "The river rises in the mountains and", 40, 0.3
NEXT = (
    "Next, with the same model:",
    "  ace chat demo --plan {plan}",
    "  ace run demo --plan {plan} --skip 0.5 --beside --prompt TEXT",
    "and with yours:  ace plan MODEL  ·  ace run MODEL --beside --prompt TEXT  ·  ace serve MODEL",
)


@dataclass(frozen=True)
class Cell:
    """One row of the demo's table."""

    rule: str
    budget: float
    threshold: float
    realised: float
    perplexity: float


@dataclass(frozen=True)
class Variant:
    """One way to decide slots, and whether its thresholds are corrected."""

    label: str
    policy: Policy
    correct: bool


RULES = (
    Variant("paper (gain kept)", PRESETS["paper"], correct=False),
    Variant("ace (gain power)", Ace(), correct=True),
)


def run(folder: Path, say: Callable[[str], None] = print) -> list[Cell]:
    """Tables → plan → thresholds → perplexity; leaves plan.safetensors and demo.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    say("1/3  tables from the checkpoint alone")
    plan = build_plan(MODEL, PAPER)
    plan.save(folder / "plan.safetensors")
    model = load_model(MODEL, device="cpu")
    windows = load_windows(model, load_tokenizer(MODEL), TEXT, WINDOW, TOKENS)
    cells: list[Cell] = []
    for number, rule in enumerate(RULES, start=2):
        how = "corrected" if rule.correct else "one pass"
        say(f"{number}/3  {rule.label}: thresholds for 10–60 %, {how}, and perplexity")
        measured, plan = _measure(rule, plan, model, windows)
        cells += measured if not cells else measured[1:]  # the unskipped model is the same for both
    record = provenance(model.device, {TEXT.name: file_hash(TEXT)})
    replace(plan, made=(record,)).save(folder / "plan.safetensors")
    results = {"command": record["command"], "provenance": record, "cells": [asdict(c) for c in cells]}
    (folder / "demo.json").write_text(json.dumps(results, indent=1))
    return cells


def _measure(rule: Variant, plan: Plan, model: PreTrainedModel, windows: Windows) -> tuple[list[Cell], Plan]:
    """Map every budget under a rule; perplexity unskipped and at each budget, and the plan with the thresholds."""
    mapped = map_budgets(model, plan, rule.policy, windows, BUDGETS, correct=rule.correct, again=True, run=score)
    scored = mapped.passes.results
    seen = {fit.threshold: (fit.realised, scored[fit.threshold]) for fit in mapped.fits if fit.threshold in scored}
    missing = [fit.threshold for fit in mapped.fits if fit.threshold not in scored]  # mapped by the dense pass alone
    if missing:
        with attached(model, plan, rule.policy) as deciders:
            passes = Passes(deciders, model, windows, run=score)
            seen |= {tau: (passes(tau).ratio(tau), passes.results[tau]) for tau in missing}
    cells = [Cell(rule.label, 0.0, 0.0, 0.0, scored[0.0].perplexity)]
    for fit in mapped.fits:
        realised, scores = seen[fit.threshold]
        cells.append(Cell(rule.label, fit.budget, fit.threshold, realised, scores.perplexity))
    return cells, mapped.plan


def pair(folder: Path) -> Pair:
    """What the model writes, unskipped and with a budget, by the plan that `run` left."""
    ace = ACE.load(folder / "plan.safetensors", SHOWN)
    model, tokenizer = load_model(MODEL, device="cpu"), load_tokenizer(MODEL)
    return write_pair(model, tokenizer, tokens_of(model, tokenizer, PROMPT), ace, NEW_TOKENS, SHOWN)


def draw(cells: list[Cell], path: Path) -> Path | None:
    """Perplexity against realised ratio for both rules."""
    dense = cells[0].perplexity
    curves = {rule.label: [(0.0, dense)] for rule in RULES}
    for cell in cells[1:]:
        curves[cell.rule].append((cell.realised, cell.perplexity))
    title = "demo-moe, WikiText-2: the same slots skipped, two ways to rescale the rest"
    return quality_curve(curves, dense, path, title)
