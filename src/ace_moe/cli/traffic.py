"""Your traffic: trace what a model's routers say of it, and simulate policies on that without the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError
from ..files import file_hash
from . import options as opt
from . import show
from .app import command
from .common import check_plan, check_texts, made_of, parse_budgets
from .groups import Deciding, Loading
from .options import option
from .outputs import check_output
from .terminal import note, out, print_json, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..decider import Deciders
    from ..engines.traces import Trace
    from ..lab.traffic.simulate import Simulation
    from ..lab.traffic.timing import Cost


USUAL = (1, 8, 32)  # sequences of a decode step
BATCH = "Sequences of a decode step. Default: 1,8,32, as far as the trace has requests."
TRACE = "A file of ace trace or ace serve --trace; or .npz of returned experts."


@command(epilog="Example: ace trace Qwen/Qwen3-30B-A3B --text sample.txt -o sample.trace")
def trace(
    model: opt.Model,
    text: Annotated[Path, option("Text of the kind the model serves: .txt, or .jsonl with `text`.")],
    deciding: Deciding,
    loading: Loading,
    output: Annotated[Path, option("Where the trace goes.", "--out", "--output", "-o")] = Path("ace.trace"),
    plan: opt.OptionalPlan = None,
    skip: Annotated[float, option("Trace under this budget, which needs a plan.")] = 0.0,
    workload: opt.WorkloadName = None,
    tokens: Annotated[int, option("Tokens of the text to read.")] = 16384,
    window: Annotated[int, option("Tokens in a window; each window counts as a request.")] = 256,
    batch: opt.Batch = 1,
    allow_other_weights: opt.AllowOtherWeights = False,
    as_json: opt.AsJson = False,
) -> None:
    """Keep what the routers say of a text: experts and gates of every slot, at most 2.2 bytes each.

    The file holds no tokens, but routing can betray what was said: treat it like the text. `ace serve --trace` keeps the same
    of served requests.
    """
    from ..checkpoint.loading import load_windows
    from ..engines.traces.file import save_trace
    from ..lab.traffic.tracing import read

    check_output(output, "trace", text, plan)
    check_texts([text], window, tokens, batch)
    check_plan(plan, skip)
    options = {"workload": workload, "allow_other_weights": allow_other_weights, **deciding.given}
    tokenizer, loaded = loading.load_both(model)
    windows = load_windows(loaded, tokenizer, text, window, tokens)
    with _under(loaded, plan, skip, options) as deciders:
        traced = read(loaded, deciders, windows, skip, batch)
    size = save_trace(traced, output).stat().st_size
    slots = sum(layer.ids.numel() for layer in traced.layers.values())
    if as_json:
        return print_json({"trace": str(output), "tokens": len(traced), "slots": slots, "bytes": size})
    said = f"{len(traced):,} tokens of {len(windows.ids)} windows, {slots:,} slots, {size / slots:.2f} bytes each"
    say(f"{output}: {said}. Next: ace simulate {opt.as_typed(output)}")


@contextmanager
def _under(model: PreTrainedModel, plan: Path | None, skip: float, options: dict[str, Any]) -> Iterator[Deciders]:
    """The model under a budget, or as it is: then no tables are needed."""
    from ..ace import ACE
    from ..checkpoint import MoEModel
    from ..mapping.passes import Everything, attached
    from ..plan import Plan

    if plan is None:
        with attached(model, Plan({}, MoEModel.of(model).fingerprint()), Everything()) as deciders:
            yield deciders
        return
    ace = ACE.load(plan, skip, **options)
    with ace(model):
        yield ace.deciders


@command(epilog="Example: ace simulate sample.trace --policy share --skip 0.2,0.4 --batch 1,8,32 --bench latency.json")
def simulate(
    trace: Annotated[Path, typer.Argument(help=TRACE)],
    deciding: Deciding,
    plan: opt.OptionalPlan = None,
    skip: Annotated[str, option("Fractions to skip: 0.3, 0.2,0.4 or from:to:step.")] = "0.2,0.3,0.4",
    batch: Annotated[str | None, option(BATCH)] = None,
    bench: Annotated[Path | None, option("Times of ace bench: what a step would take there.")] = None,
    ranks: Annotated[int | None, option("Experts over so many ranks, in contiguous blocks.", min=1)] = None,
    seed: Annotated[int, option("Of the steps that are drawn.", min=0, max=2**63 - 1)] = 0,
    output: Annotated[Path | None, option("The results, for ace report.", "--out", "-o")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """What a policy would skip on a trace, and how many experts a decode step would read. No model is loaded.

    Thresholds are quantiles of the trace. Steps are drawn from different requests.
    """
    from ..engines.traces.file import load_trace
    from ..lab.store import SIMULATE, ResultsFile, begin_run, put
    from ..lab.traffic.returned import SUFFIX, load_returned
    from ..lab.traffic.simulate import Simulation
    from ..lab.traffic.timing import cost_of
    from ..plan import Plan
    from ..policies import choose, policy_for
    from ..provenance import provenance

    check_output(output, "results", trace, plan, bench)
    traced = load_returned(trace) if trace.suffix == SUFFIX else load_trace(trace)
    known = None if plan is None else Plan.load(plan)
    policy = choose(**deciding.given) if known is None else policy_for(known, **deciding.given)
    wanted, sizes = parse_budgets(skip), _sizes(batch, len(traced.requests.unique()))
    cost = None if bench is None else cost_of(bench, traced.top_k)
    simulation = Simulation(traced, policy, known)
    taus = {budget: simulation.threshold(budget) for budget in wanted}
    rows = [_row(simulation, budget, taus[budget], size, seed, ranks, cost) for size in sizes for budget in wanted]
    facts = {"trace": trace.name, "model": traced.model, "tokens": len(traced), "under": traced.shared()}
    facts |= {"policy": policy.settings, "seed": seed}
    if output is not None:
        record = provenance(inputs=made_of(trace, plan, bench))
        files = {name: None if path is None else file_hash(path) for name, path in (("trace", trace), ("plan", plan))}
        file = ResultsFile(output, SIMULATE, {**files, "policy": policy.settings, "seed": seed, "ranks": ranks})
        with file.changed() as results:
            begin_run(results, {**facts, "command": record["command"], "provenance": record})
            for row in rows:
                put(results.setdefault("rows", []), row, ("batch", "skip"), newer=True)
    if as_json:
        return print_json({**facts, "rows": rows})
    out.print(_table(policy.key, rows))
    under = ", ".join(f"{n:,} under {skip}" for skip, n in traced.shared().items())
    say(f"{trace}: {len(traced):,} tokens of {len(traced.requests.unique())} requests ({under}), computed.")
    for unlike in _unlike(traced, wanted):
        note(unlike)


def _sizes(text: str | None, requests: int) -> list[int]:
    """What was asked for, or the usual ones that the trace has requests for."""
    if text is None:
        return [size for size in USUAL if size <= requests] or [1]
    try:
        sizes = [int(part) for part in text.split(",")]
        if min(sizes) < 1:
            raise ValueError
        return sizes
    except ValueError:
        raise OptionError(f"--batch is one or more whole numbers such as 1,8,32; {text!r} is not.") from None


def _row(
    simulation: Simulation, budget: float, tau: float, size: int, seed: int, ranks: int | None, cost: Cost | None
) -> dict[str, Any]:
    counts = simulation.count(tau, simulation.steps(size, seed), ranks)
    row = {"batch": size, "skip": budget, "threshold": tau, "skipped": simulation.ratio(tau), **asdict(counts)}
    if cost is not None:
        row |= {"tpot_ms": cost.tpot(size, counts.reads), "tpot_unskipped_ms": cost.tpot(size, counts.asked)}
    return {name: value for name, value in row.items() if value is not None}


def _table(policy: str, rows: list[dict[str, Any]]) -> Any:
    columns = ["batch", "asked to skip", "skipped", "slots run", "with restore", "experts read a layer"]
    timed, ranked = "tpot_ms" in rows[0], "ranks" in rows[0]
    columns += ["ms a step"] * timed + ["busiest rank reads"] * ranked
    lines = []
    for row in rows:
        cells = [str(row["batch"]), *(f"{row[name]:.1%}" for name in ("skip", "skipped", "slots", "restored"))]
        cells.append(f"{row['reads']:.1f} of {row['asked']:.1f}")
        cells += [f"{row['tpot_ms']:.2f} of {row['tpot_unskipped_ms']:.2f}"] if timed else []
        lines.append(cells + ([f"{row['ranks']['busiest']:.1f}"] if ranked else []))
    return show.table(f"{policy}, simulated", columns, lines)


def _unlike(trace: Trace, wanted: list[float]) -> list[str]:
    """What a reader should know of a trace that is not quite what is simulated."""
    from ..decider.rows import PHASES

    notes = []
    if not (trace.phases == PHASES.index("decode")).any():
        notes.append("the trace has no generated token: tokens of prompts stand in for them")
    if not trace.has_gates:
        notes.append("experts without gates: layers have as many experts as were seen")
    if any(skip not in wanted for skip in trace.skips) or any(skip not in trace.skips for skip in wanted):
        notes.append("routers of a model that skips say something else by a little: trace under the budget to see it")
    return notes
