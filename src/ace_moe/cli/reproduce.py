"""The paper's tables for a model of yours: reproduce."""

from __future__ import annotations

import io
import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .. import progress
from ..errors import AceError, OptionError
from ..files import write_whole
from . import options as opt
from . import show
from .app import app
from .common import check_texts, parse_budgets
from .options import option
from .outputs import check_folder
from .terminal import note, out, print_json, say

if TYPE_CHECKING:
    from ..lab.reproduce import CommandStep, PaperTable, Setup

STATE = "reproduce.json"
WIDEST = 8  # columns of a table in a terminal
CPU, GPU = 1e10, 4e13  # operations a second that a plain pass reaches, roughly


@app.command(epilog="Example: ace reproduce Qwen/Qwen3-30B-A3B-Instruct-2507 --table fusion --text wiki.test.raw")
def reproduce(
    model: opt.Model,
    text: Annotated[Path, option("WikiText-2's test text, or another.")],
    table: Annotated[str, option("main, components, fusion, stability, cost, latency or all.")] = "all",
    folder: Annotated[Path, option("Folder for everything that is measured.", "--out", "-o")] = Path("reproduce"),
    workload: Annotated[
        list[Path] | None, option("A text for stability and cost; give the option once for each.")
    ] = None,
    budgets: Annotated[str, option("Fractions to skip. The paper's by default.")] = "0.1:0.6:0.1",
    tasks: Annotated[str, option("For accuracy: paper, or names of tasks.")] = "paper",
    data: Annotated[Path | None, option("Folder with the tasks' questions. Default: the hub's data.")] = None,
    harness: opt.HarnessName = "evalscope",
    limit: opt.Limit = None,
    run_code: opt.RunCode = False,
    tokens: opt.TokensOfEach = 1 << 18,
    window: opt.Window = 2048,
    batch: opt.Batch = 1,
    device: opt.Device = None,
    dry_run: Annotated[bool, option("Say what would be run, and stop.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """The paper's tables on your model, by the commands you could type yourself; a stopped run goes on where it was.

    What cannot be measured here is refused by name and the rest goes on. The paper's own figures stand beside for its models.
    """
    from ..checkpoint.model import called
    from ..lab.reproduce import Setup, tables
    from ..lab.reproduce.filled import filled

    check_texts((text, *(workload or ())), window, tokens, batch)
    check_folder(folder)
    where = Setup(
        model, called(model), folder, text, tuple(workload or ()), data, tasks, harness, limit, run_code, tokens, window,
        batch, device, tuple(parse_budgets(budgets)),
    )  # fmt: skip
    wanted = tables(where, table)
    if not as_json:
        out.print(_outlook(where, wanted))
    if dry_run:
        return print_json([_listed(each) for each in wanted]) if as_json else None
    state = _run(where, wanted)
    found = {each.name: filled(folder, each, state["refused"]) for each in wanted}
    write_whole(folder / "tables.md", _page(wanted, found).encode(), "The page")
    if as_json:
        return print_json({"out": str(folder), "refused": state["refused"], "tables": found})
    for each in wanted:
        for part in _parts(found[each.name]):
            columns, rows = _grid(part)
            out.print(show.table(each.title, ["", *columns], rows))
    for why in dict.fromkeys(state["refused"].values()):
        names = [name for name, reason in state["refused"].items() if reason == why]
        note(f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {why}")
    say(f"{folder / 'tables.md'}: {sum(map(len, found.values()))} cells")


# ---- before ---------------------------------------------------------------------------------------------------------------


def _listed(table: PaperTable) -> dict[str, Any]:
    told = [{"command": f"ace {' '.join(s.argv)}", "needs": s.needs, "lacks": s.lacks} for s in table.steps]
    steps = [{"name": s.name, **more} for s, more in zip(table.steps, told, strict=True)]
    return {"table": table.name, "cells": len(table.cells), "steps": steps}


def _outlook(setup: Setup, wanted: list[PaperTable]) -> Any:
    """Cells, time and needs of each table, before anything runs."""
    a_pass = _seconds(setup)
    rows = []
    for table in wanted:
        passes = sum(step.passes for step in table.steps if not step.lacks)
        needs = sorted({step.needs for step in table.steps if step.needs} | {s.lacks for s in table.steps if s.lacks})
        asked = " + tasks" * any(s.argv[0] == "eval" and not s.lacks for s in table.steps)
        rows.append([table.name, str(len(table.cells)), f"{passes}", _span(passes * a_pass) + asked, "; ".join(needs)])
    return show.table("to be measured", ["table", "cells", "passes", "roughly", "needs"], rows)


def _seconds(setup: Setup) -> float:
    """Seconds of one pass: those of the first one, else by arithmetic from the weights that a token runs through."""
    from ..checkpoint import MoEModel
    from ..lab.bench.memory import checkpoint_bytes

    try:
        return json.loads((setup.folder / "compare.json").read_text(encoding="utf-8"))["dense"]["seconds"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    import torch

    left_out = [
        (layer["experts"] - layer["top_k"]) * 3 * layer["hidden"] * layer["intermediate"]
        for layer in MoEModel.open(setup.model).structure().values()
    ]
    run = max(checkpoint_bytes(setup.model) / 2 - sum(left_out), 1)
    on_gpu = (setup.device or ("cuda" if torch.cuda.is_available() else "cpu")).startswith("cuda")
    return 2 * run * setup.tokens / (GPU if on_gpu else CPU)


def _span(seconds: float) -> str:
    if seconds < 6000:
        return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


# ---- running --------------------------------------------------------------------------------------------------------------


def _run(setup: Setup, wanted: list[PaperTable]) -> dict[str, Any]:
    """Run every step once, in order; those that ended before, with the same arguments, are not run again."""
    from ..lab.reproduce.filled import done

    setup.folder.mkdir(parents=True, exist_ok=True)
    state = _state(setup.folder)
    state["refused"] = {}
    steps = list({step.name: step for table in wanted for step in table.steps}.values())
    with progress.task("commands", len(steps)) as task:
        for step in steps:
            if not done(setup.folder, step, state["ran"]):
                _try(step, state)
                write_whole(setup.folder / STATE, json.dumps(state, indent=1).encode(), "The list of commands")
            task.advance()
    return state


def _state(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"kind": "reproduce", "ran": {}}
        if found["kind"] != "reproduce" or not isinstance(found["ran"], dict):
            raise ValueError("of another kind")
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{path} is not ours or damaged ({error}). Choose another folder with --out.") from error
    return found


def _try(step: CommandStep, state: dict[str, Any]) -> None:
    """A command that refuses is named with its reason, and the others go on."""
    start = time.perf_counter()
    try:
        if step.lacks:
            raise OptionError(step.lacks)
        _command(step.argv)
    except AceError as error:
        state["refused"][step.name] = str(error)
        return
    state["ran"][step.name] = list(step.argv)
    note(f"{step.name}: {_span(time.perf_counter() - start)}")


def _command(argv: tuple[str, ...]) -> None:
    """Run a command as if it had been typed: what it writes says so, and what it would print is in its file."""
    before, sys.argv = sys.argv, ["ace", *argv]
    try:
        with redirect_stdout(io.StringIO()):
            if app(list(argv), standalone_mode=False) == 130:
                raise KeyboardInterrupt
    finally:
        sys.argv = before


# ---- after ----------------------------------------------------------------------------------------------------------------


def _grid(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns, and rows of cells: our figure, and the paper's in brackets."""
    columns = list(dict.fromkeys(cell["column"] for cell in found))
    rows: dict[str, dict[str, str]] = {}
    for cell in found:
        rows.setdefault(cell["row"], {})[cell["column"]] = _cell(cell)
    return columns, [[name, *(cells.get(c, "") for c in columns)] for name, cells in rows.items()]


def _cell(cell: dict[str, Any]) -> str:
    ours = "–" if cell["value"] is None else f"{cell['value']:.4g}" if cell["value"] < 1 else f"{cell['value']:.2f}"
    return ours if cell["paper"] is None else f"{ours} ({cell['paper']:g})"


def _parts(found: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Cut a wide table into parts that fit a terminal, by what is measured."""
    kinds = dict.fromkeys(cell["column"].split()[-1] for cell in found)
    wide = len({cell["column"] for cell in found}) > WIDEST
    return [[c for c in found if c["column"].split()[-1] == kind] for kind in kinds] if wide else [found]


def _page(wanted: list[PaperTable], found: dict[str, list[dict[str, Any]]]) -> str:
    """The same as a document, with the reason of every cell that is empty and the command behind each table."""
    parts = ["# The paper's tables\n\nOurs, and in brackets what the paper printed for this model, where it has it.\n"]
    for table in wanted:
        columns, rows = _grid(found[table.name])
        lines = [f"| {' | '.join(row)} |" for row in (["", *columns], ["---"] * (len(columns) + 1), *rows)]
        why = dict.fromkeys(cell["refused"] for cell in found[table.name] if cell["refused"])
        commands = [f"    ace {' '.join(Path(a).name if '/' in a else a for a in step.argv)}" for step in table.steps]
        reasons = [f"- –: {reason}" for reason in why]
        parts.append("\n".join([f"## {table.title}\n", *lines, "", *reasons, "", *commands, ""]))
    return "\n".join(parts)
