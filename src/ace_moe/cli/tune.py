"""The settings that suit a model: tune."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from . import options as opt
from . import show
from .app import command
from .common import check_texts, made_of, reachable
from .groups import Loading
from .options import option
from .outputs import check_writable
from .terminal import note, out, print_json, say

if TYPE_CHECKING:
    from ..plan import Plan

USUAL = "0.4:0.6:0.1"  # budgets
SHOWN = 12  # candidates of a table
TEXT = "Unlabelled text of the kind the model will serve. Default: the model writes its own."


@command(epilog="Example: ace tune Qwen/Qwen3-30B-A3B --plan qwen3.safetensors --text sample.txt")
def tune(
    model: opt.Model,
    plan: opt.PlanPath,
    loading: Loading,
    text: Annotated[Path | None, option(TEXT)] = None,
    budgets: Annotated[str, option("Fractions to skip that count: 0.5, 0.4,0.6 or from:to:step.")] = USUAL,
    window: opt.Window = 1024,
    tokens: Annotated[int, option("Tokens of the text to use; a quarter is held out.")] = 16384,
    allow_other_weights: opt.AllowOtherWeights = False,
    as_json: opt.AsJson = False,
) -> None:
    """Find the score, gain, layer factors and floor that move this model's predictions least, and recommend them in the plan.

    A run that was stopped goes on where it was. Afterwards `policy auto`, the default everywhere, is what was found.
    """
    from ..checkpoint import MoEModel
    from ..lab.tune import tune as search
    from ..mapping import TextSource
    from ..plan import Plan, update
    from ..provenance import provenance
    from ..text import Text

    read = Plan.load(plan)
    wanted = reachable(budgets, USUAL, read.top_k)
    check_writable(plan)
    check_texts(filter(None, [text]), window, tokens)
    loaded = loading.load(model)
    had = read.check_model(MoEModel.of(loaded).fingerprint(), allow_other_weights)
    record = provenance(loaded.device, made_of(text))

    def save(now: Plan) -> None:
        update(plan, read, replace(now, made=(*had.made, record)))

    windows = TextSource(model, None if text is None else Text.of(text), window, tokens).windows(loaded)
    found = search(loaded, had, windows, wanted, path=plan, save=save)
    if as_json:
        return print_json({"plan": str(plan), **found.recommendation, "tried": found.tried})
    budgets_tried = found.recommendation["budgets"]  # in order, and without 0, however they were typed
    out.print(_tried(found.tried, budgets_tried))
    out.print(_evidence(found.recommendation))
    _warn(found.recommendation)
    label = found.recommendation["evidence"]["choice"]["label"]
    following = f'ace run {opt.as_typed(model)} --plan {opt.as_typed(plan)} --skip {budgets_tried[0]:g} --prompt "…"'
    say(f"{plan}: {label} is recommended. Next: {following}")


def _tried(tried: list[dict[str, Any]], budgets: list[float]) -> Table:
    rows = []
    for row in tried[:SHOWN]:
        pairs = zip(row["kl"], row["perplexity_change"], strict=True)
        rows.append([row["label"], str(row["windows"]), *(f"{kl:.4f} {change:+.1%}" for kl, change in pairs)])
    title = f"the best of {len(tried)} candidates: KL and change of perplexity where they were chosen"
    return show.table(title, ["candidate", "windows", *(f"{b:.0%}" for b in budgets)], rows)


def _evidence(recommendation: dict[str, Any]) -> Table:
    evidence = recommendation["evidence"]
    rows = []
    for name in ("choice", "runner_up", "baseline"):
        cells = [
            f"{c['kl']['value']:.4f} ({c['kl_change']['value']:+.0%}), {c['perplexity_change']:+.1%}, {c['agreement']:.1%}"
            for c in evidence[name]["measured"]
        ]
        rows.append([name.replace("_", "-"), evidence[name]["label"], *cells])
    title = f"on {evidence['held_out']['tokens']:,} tokens held out: KL (against the baseline's), perplexity, agreement"
    return show.table(title, ["", "candidate", *(f"{b:.0%}" for b in recommendation["budgets"])], rows)


def _warn(recommendation: dict[str, Any]) -> None:
    """A choice that is nearer to the unskipped model and yet predicts the text worse than the baseline is said to."""
    evidence = recommendation["evidence"]
    pairs = zip(evidence["choice"]["measured"], evidence["baseline"]["measured"], strict=True)
    worse = max(mine["perplexity_change"] - theirs["perplexity_change"] for mine, theirs in pairs)
    if worse > 0.005:
        note(
            f"KL is lower than the gate share's, perplexity up to {worse:.1%} higher: look at a task that matters to you"
        )
