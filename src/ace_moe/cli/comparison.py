"""Which method suits a model, and how sure that is: compare, report, study."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BudgetError, OptionError
from . import options as opt
from . import show_results
from .app import HELP, app, command
from .common import check_texts, made_of, parse_budgets, reachable
from .groups import Deciding, Loading
from .options import option
from .outputs import check_output
from .plans import EVERY
from .terminal import note, out, print_json, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..lab.compare.subject import Subject
    from ..plan import Plan

METHODS = (
    "all, or names: share,ace,ace:fusion=min … Default: fixed, share, share and top_p squared, ace, paper, and what "
    "the plan recommends."
)
BUDGETS = "Fractions to skip: 0.5, 0.1,0.3 or from:to:step. Default: 10 to 60 %, and the steps of fixed."
CALIBRATION = "Text for the methods that need one. Default: what follows the measured tokens."


@command(
    epilog="Example: ace compare Qwen/Qwen3-30B-A3B --methods ace,share --text sample.txt --tokens 65536 -o results.json"
)
def compare(
    model: opt.Model,
    text: opt.Text,
    loading: Loading,
    methods: Annotated[str | None, option(METHODS)] = None,
    budgets: Annotated[str | None, option(BUDGETS)] = None,
    gains: Annotated[str, option("kept, power, none, or cited: each method's own.")] = "kept,power,none",
    output: opt.Results = Path("results.json"),
    plan: opt.Tables = None,
    calibration: Annotated[Path | None, option(CALIBRATION)] = None,
    tokens: Annotated[int, option("Tokens of the text to measure on.")] = 16384,
    window: opt.Window = 1024,
    batch: opt.Batch = 1,
    min_active: opt.MinActive = None,
    min_mass: opt.MinMass = None,
    correct: Annotated[bool, option("Correct τ on the skipped model until the realised ratio fits.")] = True,
    rival: Annotated[str | None, option("Also show paired differences against this method.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Perplexity of every method at every budget and gain, with intervals; a killed run goes on where it was."""
    from ..checkpoint.loading import load_windows
    from ..lab.compare.calibration import calibration_windows
    from ..lab.compare.cells import compare as measure
    from ..lab.compare.grid import FIRST, Grid, first_methods, parse_gains, parse_methods
    from ..lab.compare.subject import Subject

    check_output(output, "results", text, plan, calibration)
    check_texts([text], window, tokens, batch)
    common = {k: v for k, v in (("min_active", min_active), ("min_mass", min_mass)) if v is not None}
    named = FIRST if methods is None else parse_methods(methods)
    grid = Grid(named, tuple(parse_budgets(budgets or EVERY)), parse_gains(gains), common, correct)
    if rival is not None and rival not in named and not output.exists():
        raise OptionError(f"--rival is one of the methods that are compared: {', '.join(named)}; not {rival!r}.")
    tokenizer, loaded = loading.load_both(model)
    windows = load_windows(loaded, tokenizer, text, window, tokens)
    learned, notice = calibration_windows(loaded, tokenizer, text, windows, calibration)
    if notice and grid.calibrated:
        note(notice)
    used = _plan(plan, loaded)
    grid = replace(grid, methods=first_methods(used)) if methods is None else grid
    grid = grid.stepped(used.top_k) if budgets is None else grid
    subject, start = Subject(loaded, used, windows, batch, learned), time.perf_counter()
    results = measure(subject, grid, output, _facts(subject, model, text, calibration, plan))
    if not results["cells"]:
        reasons = dict.fromkeys(refused["reason"] for refused in results["refused"].values())
        raise BudgetError(f"Nothing was measured: {' '.join(reasons)}")
    if as_json:
        return print_json({"out": str(output), **results})
    show_results.print_compare(out, results, rival)
    for method, refused in results["refused"].items():
        note(f"{method} at {', '.join(f'{b:.0%}' for b in refused['budgets'])}: {refused['reason']}")
    seconds = time.perf_counter() - start
    say(f"{output}: {len(results['cells'])} cells, {seconds:.0f} s. Next: ace report {opt.as_typed(output)}")


def _plan(path: Path | None, model: PreTrainedModel) -> Plan:
    """The plan that was given, else one made of the loaded model's weights."""
    from ..plan import Plan
    from ..tables.build import build_plan

    return build_plan(model) if path is None else Plan.load(path)


def _facts(subject: Subject, model: str, *files: Path | None) -> dict[str, Any]:
    from ..checkpoint.model import called
    from ..lab.compare.subject import facts

    return facts(subject, called(model), made_of(*files))


@app.command(epilog="Example: ace report results.json -o report.html")
def report(
    results: Annotated[
        list[Path], typer.Argument(help="Files of ace compare, study thresholds, eval, simulate, bench.")
    ],
    output: Annotated[Path, option("Where the page goes.", "--out", "--output", "-o")] = Path("report.html"),
    rival: Annotated[str | None, option("The others are compared with this method. Default: ace.")] = None,
    title: Annotated[str | None, option("Heading of the page. Default: the model's name.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """One page with curves, tables and heat maps; it needs no network and opens in any browser."""
    from ..lab.report.page import write_page

    check_output(output, "page", *results)
    write_page(results, output, rival, title)
    size = output.stat().st_size
    if as_json:
        return print_json({"out": str(output), "bytes": size})
    say(f"{output}: {size / 1024:.0f} kB; open it in a browser")


# ---- studies ------------------------------------------------------------------------------------------------------

study = typer.Typer(**HELP)
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
    model: opt.Model,
    text: Annotated[list[Path], option("A workload; give the option once for each.")],
    budgets: opt.Budgets = EVERY,
    output: opt.Results = Path("thresholds.json"),
    plan: opt.Tables = None,
    policy: opt.PolicyName = "ace",
    gain: opt.GainName = None,
    tokens: opt.TokensOfEach = 16384,
    window: opt.Window = 1024,
    batch: opt.Batch = 1,
    measured: Annotated[bool, option("Run carried thresholds; else read them off dense passes.")] = True,
    device: opt.Device = None,
    as_json: opt.AsJson = False,
) -> None:
    """Thresholds by workload, the ratio each realises on the others, and what finding them costs."""
    from ..checkpoint.loading import load_windows
    from ..lab.compare import thresholds
    from ..lab.compare.subject import Subject
    from ..policies import choose

    check_output(output, "results", plan, *text)
    check_texts(text, window, tokens, batch)
    made = choose(**Deciding(policy, gain=gain).given)
    tokenizer, loaded = Loading(device).load_both(model)
    used = _plan(plan, loaded)
    wanted = reachable(budgets, EVERY, used.top_k, made.min_active)
    workloads = [load_windows(loaded, tokenizer, path, window, tokens) for path in text]
    subject = Subject(loaded, used, workloads[0], batch)
    setup = thresholds.Study(subject, made, tuple(wanted), measured)
    found = thresholds.study(setup, workloads, output, _facts(subject, model, *text, plan))
    if as_json:
        return print_json({"out": str(output), **{k: found[k] for k in ("workloads", "transfers", "cost")}})
    show_results.print_thresholds(out, found)
    say(f"{output}: {len(found['transfers'])} transfers. Next: ace report {opt.as_typed(output)}")


@study.command("tables", epilog="Example: ace study tables MODEL --text sample.txt")
def study_tables(
    model: opt.Model,
    text: opt.Text,
    plan: opt.Tables = None,
    tokens: Annotated[int, option("Tokens of the text.")] = 16384,
    window: opt.Window = 1024,
    batch: opt.Batch = 1,
    output: Annotated[Path | None, option("A file for the results.", "--out", "-o")] = None,
    device: opt.Device = None,
    as_json: opt.AsJson = False,
) -> None:
    """Correlation of each table with the true norm of expert outputs, layer by layer, in one pass."""
    from ..checkpoint.loading import load_windows
    from ..lab.compare.oracle import by_expert, table_correlation
    from ..lab.compare.subject import Subject, identity_of
    from ..lab.store import TABLES, ResultsFile, begin_run

    check_output(output, "results", text, plan)
    check_texts([text], window, tokens, batch)
    tokenizer, loaded = Loading(device).load_both(model)
    windows = load_windows(loaded, tokenizer, text, window, tokens)
    used = _plan(plan, loaded)
    found = table_correlation(loaded, by_expert(used), windows, batch)
    if output is not None:
        identity = {**identity_of(loaded), "text": windows.workload.sha256, "window": window, "batch": batch}
        with ResultsFile(output, TABLES, identity).changed() as results:
            begin_run(results, _facts(Subject(loaded, used, windows, batch), model, text, plan))
            layers = results.setdefault("layers", {})
            for key, layer in found.items():
                layers[key] = layers.get(key, {}) | layer
    return print_json(found) if as_json else out.print(show_results.correlation_table(found))
