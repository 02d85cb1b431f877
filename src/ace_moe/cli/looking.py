"""What there is: inspect, policies, and the tour of the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as opt
from . import show, show_texts
from .app import app
from .options import option
from .outputs import check_folder
from .terminal import err, out, print_json, say

if TYPE_CHECKING:
    from ..plan import Plan


@app.command(epilog="Examples: ace inspect Qwen/Qwen3-30B-A3B, ace inspect plan.safetensors")
def inspect(
    target: Annotated[str, typer.Argument(help="A model or a plan file.", metavar="MODEL|PLAN", callback=opt.embedded)],
    as_json: opt.AsJson = False,
) -> None:
    """What is in this model or this plan, and what ACE can do with it."""
    from ..checkpoint import MoEModel
    from ..plan import Plan

    if Path(target).is_file() or target.endswith(".safetensors"):
        return show_plan(Plan.load(target), as_json)
    moe = MoEModel.open(target)
    return print_json(show.model_json(moe)) if as_json else show.print_model(out, moe)


def show_plan(plan: Plan, as_json: bool) -> None:
    """The plan's tables, thresholds and texts."""
    texts = show_texts.texts_json(plan)
    if as_json:
        return print_json(show.plan_json(plan) | {"workloads": texts})
    show.print_plan(out, plan)
    return out.print(show_texts.texts_table(texts)) if texts else None


MAIN = ("share", "ace", "gsp", "rcr", "top_p", "relative", "fixed")  # what needs no text; `ace tune` chooses among them


@app.command(epilog="Example: ace policies --all")
def policies(
    everything: Annotated[bool, option("Also those to compare with, and those that need a text.", "--all")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """The methods that decide slots, for --policy and --methods, with what each needs."""
    from ..lab.policies import LAB_POLICIES
    from ..policies import POLICIES

    shown = {**POLICIES, **LAB_POLICIES} if everything else {name: POLICIES[name] for name in MAIN}
    found = {name: ((cls.__doc__ or "").strip().splitlines()[0], list(cls().tables)) for name, cls in shown.items()}
    if as_json:
        return print_json({name: {"about": about, "needs": needs} for name, (about, needs) in found.items()})
    rows = [[name, about, ", ".join(needs) or "–"] for name, (about, needs) in found.items()]
    out.print(show.table("policies", ["name", "what it does", "tables it needs"], rows, words=2))


@app.command(epilog="Example: ace demo")
def demo(
    output: Annotated[Path, option("Folder for the plan, the JSON and the picture.", "--out", "--output", "-o")] = Path(
        "ace-demo"
    ),
    as_json: opt.AsJson = False,
) -> None:
    """The embedded model: tables → plan → thresholds → perplexity at 0–60 % skipped, in about a minute on a laptop."""
    from .. import demo as tour
    from .show_written import print_pair

    check_folder(output)
    cells = tour.run(output, say=lambda line: err.print(line))
    picture = tour.draw(cells, output / "demo.png")
    pair = tour.pair(output)
    if as_json:
        return print_json({"cells": [vars(cell) for cell in cells], "pair": pair.to_json()})
    out.print(show.demo_table(cells))
    print_pair(out, pair)
    there = f", picture in {picture}" if picture else "; pip install 'ace-moe[report]' for a picture"
    say(f"plan and numbers in {output}/{there}")
    for line in tour.NEXT:
        say(line.format(plan=output / "plan.safetensors"))
