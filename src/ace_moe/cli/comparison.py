"""Which method suits a model, and how sure that is: compare, report, study."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BudgetError
from ..files import replace_whole
from . import show, show_results
from .common import (
    AsJson,
    Device,
    GainName,
    MinActive,
    MinMass,
    Model,
    PolicyName,
    app,
    here,
    note,
    out,
    parse_budgets,
    print_json,
)
from .groups import Deciding, Loading, command
from .outputs import check_output

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..evaluate.subject import Subject
    from ..plan import Plan
    from ..text import Windows

Text = Annotated[Path, typer.Option(help="Text to measure on: .txt, or .jsonl with `text`.")]
Window = Annotated[int, typer.Option(help="Tokens in a window.")]
Batch = Annotated[int, typer.Option(help="Windows at a time.")]
Budgets = Annotated[str, typer.Option(help="Fractions to skip: 0.5, 0.1,0.3 or from:to:step.")]
OptionalPlan = Annotated[
    Path | None,
    typer.Option("--plan", "-p", help="Tables made before, a file or owner/name; else computed now.", callback=here),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="The results file; if it is there, it is continued.")]


@command(
    epilog="Example: ace compare Qwen/Qwen3-30B-A3B --methods ace,share --text sample.txt --tokens 65536 -o results.json"
)
def compare(
    model: Model,
    text: Text,
    loading: Loading,
    methods: Annotated[
        str | None,
        typer.Option(
            help="all, or names: share,ace,ace:fusion=min … Default: fixed, share, share and top_p squared, ace, paper, and what "
            "the plan recommends."
        ),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="Fractions to skip: 0.5, 0.1,0.3 or from:to:step. Default: 10 to 60 %, and the steps of fixed."
        ),
    ] = None,
    gains: Annotated[
        str, typer.Option(help="kept, power, none, aligned, or cited: each method's own.")
    ] = "kept,power,none",
    output: Out = Path("results.json"),
    plan: OptionalPlan = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Text for the methods that need one. Default: what follows the measured tokens.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to measure on.")] = 16384,
    window: Window = 1024,
    batch: Batch = 1,
    min_active: MinActive = None,
    min_mass: MinMass = None,
    correct: Annotated[bool, typer.Option(help="Correct τ on the skipped model until the realised ratio fits.")] = True,
    rival: Annotated[str | None, typer.Option(help="Also show paired differences against this method.")] = None,
    as_json: AsJson = False,
) -> None:
    """Perplexity of every method at every budget and gain, with intervals; a killed run goes on where it was."""
    from ..evaluate.calibration import calibration_windows
    from ..evaluate.compare import compare as measure
    from ..evaluate.grid import BUDGETS, FIRST, Grid, first_methods, parse_gains, parse_methods
    from ..evaluate.subject import Subject
    from ..text import check_sizes, read_text

    check_output(output, "results", text, plan, calibration)
    check_sizes(window, tokens, batch)
    read_text(text)
    common = {k: v for k, v in (("min_active", min_active), ("min_mass", min_mass)) if v is not None}
    named = FIRST if methods is None else parse_methods(methods)
    grid = Grid(named, tuple(parse_budgets(budgets or BUDGETS)), parse_gains(gains), common, correct)
    tokenizer, loaded = loading.load_both(model)
    windows = _windows(loaded, tokenizer, text, window, tokens)
    learned, notice = calibration_windows(loaded, tokenizer, text, windows, calibration)
    if notice and grid.calibrated:
        note(notice)
    used = _plan(plan, model)
    grid = replace(grid, methods=first_methods(used)) if methods is None else grid
    grid = grid.stepped(used.top_k) if budgets is None else grid
    subject, start = Subject(loaded, used, windows, batch, learned), time.perf_counter()
    results = measure(subject, grid, output, _facts(subject, model, text, calibration, plan))
    _check_some(results)
    if as_json:
        return print_json({"out": str(output), **results})
    show_results.print_compare(out, results, rival)
    for method, refused in results["refused"].items():
        note(f"{method} at {', '.join(f'{b:.0%}' for b in refused['budgets'])}: {refused['reason']}")
    show.print_line(
        out, f"{output}: {len(results['cells'])} cells, {time.perf_counter() - start:.0f} s. Next: ace report {output}"
    )


def _check_some(results: dict[str, Any]) -> None:
    """A file without a cell is no result."""
    if not results["cells"]:
        reasons = dict.fromkeys(refused["reason"] for refused in results["refused"].values())
        raise BudgetError(f"Nothing was measured: {' '.join(reasons)}")


def _windows(loaded: PreTrainedModel, tokenizer: Any, text: Path, window: int, tokens: int) -> Windows:
    from ..loading import load_windows

    return load_windows(loaded, tokenizer, text, window, tokens)


def _plan(path: Path | None, model: str) -> Plan:
    from ..plan import Plan
    from ..tables.build import build_plan

    if path is not None:
        return Plan.load(path)
    return build_plan(model)


def _facts(subject: Subject, model: str, *files: Path | None) -> dict[str, Any]:
    from ..checkpoint.model import called
    from ..evaluate.subject import facts
    from ..files import file_hash

    return facts(subject, called(model), {path.name: file_hash(path) for path in files if path is not None})


@app.command(epilog="Example: ace report results.json -o report.html")
def report(
    results: Annotated[
        list[Path], typer.Argument(help="Files of ace compare, study thresholds, eval, simulate, bench.")
    ],
    output: Annotated[Path, typer.Option("--out", "--output", "-o", help="Where the page goes.")] = Path("report.html"),
    rival: Annotated[str | None, typer.Option(help="The others are compared with this method. Default: ace.")] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page. Default: the model's name.")] = None,
    as_json: AsJson = False,
) -> None:
    """One page with curves, tables and heat maps; it needs no network and opens in any browser."""
    from ..report.page import write_page

    check_output(output, "page", *results)
    write_page(results, output, rival, title)
    size = output.stat().st_size
    if as_json:
        return print_json({"out": str(output), "bytes": size})
    show.print_line(out, f"{output}: {size / 1024:.0f} kB; open it in a browser")


# ---- studies ------------------------------------------------------------------------------------------------------

study = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(
    study,
    name="study",
    help="Questions about one method: do its thresholds travel, do its tables know the truth?",
    epilog="Example: ace study thresholds Qwen/Qwen3-30B-A3B --text wiki.txt --text code.jsonl",
)


@study.command(
    "thresholds", epilog="Example: ace study thresholds MODEL --text wiki.txt --text code.jsonl -o thresholds.json"
)
def study_thresholds(
    model: Model,
    text: Annotated[list[Path], typer.Option(help="A workload; give the option once for each.")],
    budgets: Budgets = "0.1:0.6:0.1",
    output: Out = Path("thresholds.json"),
    plan: OptionalPlan = None,
    policy: PolicyName = "ace",
    gain: GainName = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 16384,
    window: Window = 1024,
    batch: Batch = 1,
    measured: Annotated[bool, typer.Option(help="Run carried thresholds; else read them off dense passes.")] = True,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Thresholds by workload, the ratio each realises on the others, and what finding them costs."""
    from ..evaluate import thresholds
    from ..evaluate.subject import Subject
    from ..policies import choose
    from ..text import check_sizes, read_text

    check_output(output, "results", plan, *text)
    check_sizes(window, tokens, batch)
    for path in text:
        read_text(path)
    made = choose(**Deciding(policy, gain=gain).settings)
    tokenizer, loaded = Loading(device).load_both(model)
    workloads = [_windows(loaded, tokenizer, path, window, tokens) for path in text]
    subject = Subject(loaded, _plan(plan, model), workloads[0], batch)
    setup = thresholds.Study(subject, made, tuple(parse_budgets(budgets)), measured)
    found = thresholds.study(setup, workloads, output, _facts(subject, model, *text, plan))
    if as_json:
        return print_json({"out": str(output), **{k: found[k] for k in ("workloads", "transfers", "cost")}})
    show_results.print_thresholds(out, found)
    show.print_line(out, f"{output}: {len(found['transfers'])} transfers. Next: ace report {output}")


@study.command("tables", epilog="Example: ace study tables MODEL --text sample.txt")
def study_tables(
    model: Model,
    text: Text,
    plan: OptionalPlan = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text.")] = 16384,
    window: Window = 1024,
    batch: Batch = 1,
    output: Annotated[Path | None, typer.Option("--out", "-o", help="A file for the results.")] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Correlation of each table with the true norm of expert outputs, layer by layer, in one pass."""
    from ..evaluate.oracle import by_expert, table_correlation
    from ..evaluate.subject import Subject
    from ..text import check_sizes, read_text

    if output is not None:
        check_output(output, "results", text, plan)
    check_sizes(window, tokens, batch)
    read_text(text)
    tokenizer, loaded = Loading(device).load_both(model)
    windows = _windows(loaded, tokenizer, text, window, tokens)
    used = _plan(plan, model)
    found = table_correlation(loaded, by_expert(used), windows, batch)
    if output is not None:
        facts = _facts(Subject(loaded, used, windows, batch), model, text, plan)
        replace_whole(output, (json.dumps({**facts, "layers": found}, indent=1) + "\n").encode())
    return print_json(found) if as_json else out.print(show_results.correlation_table(found))
