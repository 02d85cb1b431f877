"""How fast: bench."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import OptionError
from ..files import replace_whole
from .common import AsJson, Device, app, note, out, parse_budgets, print_json
from .outputs import check_output

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..bench.run import Row

QUICK, PAPER, FULL = "quick", "paper", "full"


@app.command(epilog="Example: ace bench --shape qwen3-30b-a3b --skip 0,0.6 --rows full -o latency.json")
def bench(
    model: Annotated[str | None, typer.Argument(help="A checkpoint; leave it out with --shape.", metavar="MODEL")] = None,
    shape: Annotated[str | None, typer.Option(help="Random weights of a known shape: qwen3-30b-a3b …")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", "-p", help="Tables made before.", metavar="PLAN")] = None,
    skip: Annotated[str, typer.Option(help="Ratios to time, 0 among them: 0,0.6 or from:to:step.")] = "0,0.6",
    rows: Annotated[str, typer.Option(help="quick, paper (its five rows) or full (and batches to 64).")] = QUICK,
    prefill: Annotated[str | None, typer.Option(help="Prompts instead of --rows: 1024x1,1024x16 (tokens x batch).")] = None,
    decode: Annotated[str | None, typer.Option(help="Decode batches instead of --rows: 1,16 or 256x1 (cached x batch).")] = None,
    stock: Annotated[str, typer.Option(help="Stock experts: grouped_mm, batched_mm, eager, generate:grouped_mm.")] = "grouped_mm",
    layers: Annotated[int | None, typer.Option(help="With --shape: fewer layers.")] = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", help="The results, written after each row.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Also draw the rows into this picture.")] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Time to first token and per output token, stock and skipped, in one run."""
    from ..bench.run import Bench, read_rate, result
    from ..plan import Plan
    from .bench_table import chart as draw
    from .bench_table import latency_table

    for path, kind in ((output, "results"), (chart, "picture")):
        if path is not None:
            check_output(path, kind, plan)
    prompts, batches = _grid(rows, prefill, decode)
    ratios = parse_budgets(skip)
    loaded = _model(model, shape, layers, device)
    ceiling = read_rate(loaded.device)
    found: list[Row] = []
    command = shlex.join(["ace", *sys.argv[1:]])

    def say(row: Row) -> None:
        found.append(row)
        if output is not None:
            replace_whole(output, (json.dumps(result(command, found, ceiling), indent=1) + "\n").encode())
        if not as_json:
            out.print(_line(row), highlight=False)

    timer = Bench(loaded, ratios, say, Plan.load(plan) if plan else None)
    paths = stock.split(",")
    for size in prompts:
        list(timer.prefill(*size, paths))
    for length, batch in batches:
        list(timer.decode(batch, paths, length))
    if shape is not None and any(row.valid is False for row in found):
        note(
            "Routing is more than 5 % away from uniform in some rows: there fewer experts are read than a trained model would."
        )
    if as_json:
        print_json(result(command, found, ceiling))
    else:
        out.print(latency_table(found))
    if chart is not None:
        draw(found, chart)


def _grid(rows: str, prefill: str | None, decode: str | None) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    from ..bench.run import PAPER as TABLE

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


def _sizes(text: str, length: int | None) -> list[tuple[int, int]]:
    """ "1024x4,512x1", or batches alone where a length is given."""
    try:
        pairs = [part.split("x") for part in text.split(",") if part]
        sizes = [(int(p[0]), int(p[1])) if len(p) == 2 or length is None else (length, int(p[0])) for p in pairs]
        if any(min(size) < 1 for size in sizes):
            raise ValueError
        return sizes
    except (ValueError, IndexError):
        raise OptionError(f"Sizes are tokens x batch such as 1024x4,512x1; {text!r} is not.") from None


def _model(model: str | None, shape: str | None, layers: int | None, device: str | None) -> PreTrainedModel:
    import torch

    from ..bench.shapes import build
    from ..loading import load_model

    if (model is None) == (shape is None):
        raise OptionError("Name a checkpoint or a shape (--shape qwen3-30b-a3b), not both.")
    if shape is not None:
        return build(shape, device or ("cuda" if torch.cuda.is_available() else "cpu"), layers)
    return load_model(str(model), device=device)


def _line(row: Row) -> str:
    gpu = "" if row.gpu_ms is None else f"gpu {row.gpu_ms:8.3f} ms, "
    size = f"{row.tokens}x{row.batch}"
    return f"{row.what} {size:>8} {row.path:>11} {row.realised:6.1%}: {gpu}wall {row.wall_ms:8.3f} ms"
