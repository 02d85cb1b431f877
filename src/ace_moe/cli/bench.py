"""The command bench: how fast a model runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError
from . import options as opt
from .app import app
from .common import SKIP, check_texts, made_of, parse_budgets
from .options import option, plan_option
from .outputs import check_output
from .terminal import note, out, print_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..lab.bench.routers import RandomRouter
    from ..lab.bench.run import Row
    from ..lab.store import ResultsFile

Sizes = list[tuple[int, int]]  # tokens, batch
QUICK, PAPER, FULL = "quick", "paper", "full"
ROUTING = "With --shape: uniform; flat: gates as flat as Qwen3-30B-A3B's; skewed: and some experts popular."
UNION = "With --routing skewed: experts that 16 tokens read. Default 49 of 128, an assumption; chance gives 82."


@app.command(epilog="Example: ace bench --shape qwen3-30b-a3b --skip 0,0.6 --rows full -o latency.json")
def bench(
    model: Annotated[
        str | None, typer.Argument(help="None with --shape.", metavar="MODEL", callback=opt.embedded)
    ] = None,
    shape: Annotated[str | None, option("Random weights of a known shape: qwen3-30b-a3b …")] = None,
    plan: Annotated[Path | None, plan_option("Tables made before.")] = None,
    skip: Annotated[str, option("Ratios to time, 0 among them: 0,0.6 or from:to:step.")] = f"0,{SKIP}",
    rows: Annotated[str, option("quick, paper (its five rows) or full (and batches to 64).")] = QUICK,
    prefill: Annotated[str | None, option("Prompts instead of --rows: 1024x1,1024x16 (tokens x batch).")] = None,
    decode: Annotated[str | None, option("Decode batches instead of --rows: 1,16 or 256x1 (cached x batch).")] = None,
    stock: Annotated[str, option("Stock experts: grouped_mm, batched_mm, eager, generate:grouped_mm.")] = "grouped_mm",
    layers: Annotated[int | None, option("With --shape: fewer layers.", min=1)] = None,
    routing: Annotated[str, option(ROUTING)] = "uniform",
    union: Annotated[float | None, option(UNION)] = None,
    text: Annotated[Path | None, option("With MODEL: time on this text, and show each ratio's KL on it.")] = None,
    tokens: Annotated[int, option("With --text: tokens of it to use.")] = 16384,
    window: Annotated[int, option("With --text: tokens in a window.")] = 1024,
    output: Annotated[Path | None, option("The results, written after each row.", "--out", "-o")] = None,
    chart: Annotated[Path | None, option("Also draw the rows into this picture.", callback=opt.home)] = None,
    device: opt.Device = None,
    as_json: opt.AsJson = False,
) -> None:
    """Time to first token and per output token, stock and skipped, in one run."""
    from ..checkpoint.loading import load_tokenizer, load_windows
    from ..lab.bench.routers import shape_routers
    from ..lab.bench.run import Bench, check_stock, describe
    from ..plan import Plan
    from .bench_table import chart as draw
    from .bench_table import check_chart, latency_table

    check_output(output, "results", plan)
    check_chart(chart, plan)
    prompts, batches = _grid(rows, prefill, decode)
    ratios, paths = parse_budgets(skip), stock.split(",")
    _check(model, shape, layers, routing, union, text)
    check_stock(paths)
    if text is not None:
        check_texts([text], window, tokens)
    loaded = _model(model, shape, layers, device, [*prompts, *batches], len(paths) + 2)
    router = shape_routers(loaded, routing, union) if shape is not None else None
    windows = None if text is None else load_windows(loaded, load_tokenizer(str(model)), text, window, tokens)
    facts = describe(loaded.device, made_of(plan, text))
    if shape is not None:
        facts["routing"] = _routing_facts(routing, router)
    log = RowLog(_results_file(output, model, shape, layers, text, facts), facts, quiet=as_json)
    expected = None if router is None else router.union
    timer = Bench(loaded, ratios, log.add, Plan.load(plan) if plan else None, windows, expected)
    if text is not None:
        facts["fidelity"] = {"text": text.name, "ratios": {str(r): f for r, f in timer.fidelity.items()}}
    for size in prompts:
        list(timer.prefill(*size, paths))
    for length, batch in batches:
        list(timer.decode(batch, paths, length))
    _notes(timer.why, log.rows, routing if shape else None)
    if as_json:
        print_json({**facts, "rows": [asdict(row) for row in log.rows]})
    else:
        out.print(latency_table(log.rows))
    if chart is not None:
        draw(log.rows, chart)


def _results_file(
    output: Path | None,
    model: str | None,
    shape: str | None,
    layers: int | None,
    text: Path | None,
    facts: dict[str, Any],
) -> ResultsFile | None:
    """The file of the rows, which another model, routing, text or device may not continue."""
    from ..checkpoint.model import called
    from ..lab.store import BENCH, ResultsFile

    if output is None:
        return None
    about = {"model": shape or called(str(model)), "layers": layers, "routing": facts.get("routing")}
    return ResultsFile(output, BENCH, {**about, **made_of(text), "device": facts["device"]})


@dataclass
class RowLog:
    """Rows as they come: each is printed, and is in the file before the next one is measured."""

    file: ResultsFile | None
    facts: dict[str, Any]
    quiet: bool
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        from ..lab.store import begin_run, put

        self.rows.append(row)
        if self.file is not None:
            with self.file.changed() as results:
                run = begin_run(results, self.facts)
                key = ("what", "path", "tokens", "batch", "requested")
                put(results.setdefault("rows", []), {**asdict(row), "run": run}, key, newer=True)
        if not self.quiet:
            out.print(_line(row), highlight=False)


def _notes(why: str | None, rows: list[Row], routing: str | None) -> None:
    """Note what the reader of the times must know; `routing` of random weights."""
    if why:
        note(f"Run without graphs, decode steps by `generate`: {why}")
    if routing is not None and any(row.valid is False for row in rows):
        reads = f"the experts that {routing} routing reads"
        note(f"More than 5 % from {reads} in some rows: their times are of another routing.")


def _check(
    model: str | None, shape: str | None, layers: int | None, routing: str, union: float | None, text: Path | None
) -> None:
    """Options that contradict each other, before anything is loaded."""
    from ..lab.bench.routers import UNIFORM, check_kind

    if (model is None) == (shape is None):
        raise OptionError("Name a checkpoint or a shape (--shape qwen3-30b-a3b), not both.")
    if shape is None and layers is not None:
        raise OptionError("A checkpoint has the layers it has; --layers is for --shape.")
    if shape is None and (routing != UNIFORM or union is not None):
        raise OptionError("A checkpoint routes by its own weights; --routing and --union are for --shape.")
    check_kind(routing, union)
    if text is not None and shape is not None:
        raise OptionError("Random weights predict nothing: --text is for a checkpoint, not for --shape.")


def _routing_facts(routing: str, router: RandomRouter | None) -> dict[str, Any]:
    """Describe, for the file, how a random model was made to route."""
    from ..lab.bench.routers import ASSUMED, BATCH, SKEWED

    if router is None:
        return {"kind": routing}
    facts = {"kind": routing, "spread": router.spread, "skew": router.skew, f"union_{BATCH}": router.union(BATCH)}
    return {**facts, "note": ASSUMED} if routing == SKEWED else facts


def _grid(rows: str, prefill: str | None, decode: str | None) -> tuple[Sizes, Sizes]:
    from ..lab.bench.run import PAPER as TABLE

    batches = [(256, 1), (256, 4), (256, 16), (256, 64)]
    grids = {
        QUICK: ([(1024, 1)], batches[:1]),
        PAPER: (list(TABLE), list(TABLE)),
        FULL: ([*TABLE, (1024, 16), (8192, 1)], batches),
    }
    if rows not in grids:
        raise OptionError(f"--rows is one of {', '.join(grids)}; {rows!r} is not.")
    prompts, steps = grids[rows]
    if prefill is None and decode is None:
        return prompts, steps
    return _sizes(prefill or "", None), _sizes(decode or "", 256)


def _sizes(text: str, length: int | None) -> Sizes:
    """ "1024x4,512x1", or batches alone where a length is given."""
    try:
        pairs = [part.split("x") for part in text.split(",") if part]
        sizes = [(int(p[0]), int(p[1])) if len(p) == 2 or length is None else (length, int(p[0])) for p in pairs]
        if any(min(size) < 1 for size in sizes) or any(len(p) > 2 for p in pairs):
            raise ValueError
        return sizes
    except (ValueError, IndexError):
        raise OptionError(f"Sizes are tokens x batch such as 1024x4,512x1; {text!r} is not.") from None


def _model(
    model: str | None, shape: str | None, layers: int | None, device: str | None, sizes: Sizes, paths: int
) -> PreTrainedModel:
    """Loaded or made, if there is room for it and for what is timed."""
    from ..checkpoint import resolve
    from ..checkpoint.loading import check_device, default_device, load_model
    from ..checkpoint.model import load_config
    from ..lab.bench.memory import check_fits, checkpoint_bytes
    from ..lab.bench.shapes import fill, hollow

    device = device or default_device()
    check_device(device)
    if shape is not None:
        made = hollow(shape, layers)
        check_fits(sum(2 * p.numel() for p in made.parameters()), made.config, sizes, paths, device)
        return fill(made, device)
    check_fits(checkpoint_bytes(str(model)), load_config(resolve(str(model))), sizes, paths, device)
    return load_model(str(model), device=device)


def _line(row: Row) -> str:
    gpu = "" if row.gpu_ms is None else f"gpu {row.gpu_ms:8.3f} ms, "
    size, read = f"{row.tokens}x{row.batch}", f"experts {row.executed:.1f} of {row.experts:.1f}"
    kl = "" if row.kl is None else f", KL {row.kl:.4f}"
    return f"{row.what} {size:>8} {row.path:>11} {row.realised:6.1%}: {gpu}wall {row.wall_ms:8.3f} ms, {read}{kl}"
