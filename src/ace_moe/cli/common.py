"""What the commands share: the app, its streams, how errors are shown, and what is checked before long work."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from .. import progress
from ..errors import AceError, BudgetError, OptionError, brief
from ..version import __version__
from .options import option
from .show import print_line
from .terminal import Plain, hand_over, speak_plainly

if TYPE_CHECKING:
    from rich.progress import Progress

# What a newcomer needs first stands first; a command that no panel names comes last.
PANELS = {
    "See it": ("demo", "run", "chat"),
    "Use it": ("plan", "tune", "serve", "inspect", "policies", "plans"),
    "Measure": ("compare", "report", "perplexity", "eval", "lm-eval", "bench"),
    "Study": ("study", "trace", "simulate", "reproduce"),
}
RESUMES = ("plan", "budget", "tune", "compare", "perplexity", "eval", "study", "reproduce")


class Commands(typer.core.TyperGroup):
    """Commands in the order of their panels; and Ctrl-C is answered, where typer would exit without a word."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        for panel, names in PANELS.items():
            for name in set(names) & set(self.commands):
                self.commands[name].rich_help_panel = panel
        first = [name for names in PANELS.values() for name in names if name in self.commands]
        return first + [name for name in self.commands if name not in first]

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """The first page in rich's own words: typer's, with Markdown, takes as long to import as everything else here."""
        from rich.panel import Panel
        from rich.table import Table

        out.print(f"\n [bold yellow]Usage:[/] ace COMMAND …\n\n {self.help}\n", highlight=False)
        names = self.list_commands(ctx)
        for panel in dict.fromkeys(self.commands[name].rich_help_panel for name in names):
            table = Table.grid(padding=(0, 2))
            table.add_column(style="bold cyan", min_width=max(map(len, names)))
            for name in (n for n in names if self.commands[n].rich_help_panel == panel):
                table.add_row(name, (self.commands[name].help or "").partition("\n\n")[0].replace("\n", " "))
            out.print(Panel(table, title=panel, title_align="left", border_style="dim"), highlight=False)
        out.print(" ace COMMAND --help shows its options, ace --version the release.\n", highlight=False)

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            with progress.shown(Bars() if err.is_terminal else progress.Log(err.print)):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            goes_on = " The same command goes on from here." if ctx.invoked_subcommand in RESUMES else ""
            err.print(f"interrupted; nothing half-written is left behind.{goes_on}", soft_wrap=True)
            raise typer.Exit(130) from None


HELP: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": "rich"}
app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, **HELP)
out, err = Plain(), Plain(stderr=True)
SKIP = 0.3  # the budget where none is given
AUTO = "auto"  # the policy where none is given: policies.AUTO, which takes seconds to import
MOST_BUDGETS = 1000  # each takes passes of the model; a range this long has a step with a zero too many


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ace-moe {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[bool, option("Print it.", "--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Skip the expert slots of a Mixture-of-Experts model that contribute little."""


def main() -> None:
    """Run the command; an error of ours, or of the file system, is one paragraph and exit code 1."""
    speak_plainly()
    warnings.showwarning = lambda message, *_, **__: note(message)
    try:
        try:
            app()
        finally:
            hand_over()
    except BrokenPipeError:  # whoever read has seen enough
        sys.exit(1)
    except (AceError, OSError) as error:
        from rich.markup import escape

        err.print(f"[bold red]error:[/] {escape(_paragraph(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)


def _paragraph(error: Exception) -> str:
    if isinstance(error, AceError):
        return str(error)
    return f"The system refused a file or folder: {brief(error)}. Check its path, permissions and free space."


def say(line: str, console: Plain = out) -> None:
    """One line of the result."""
    print_line(console, line)


def note(message: object) -> None:
    """One line on the error stream beside the result."""
    from rich.markup import escape

    err.print(f"[yellow]note:[/] {escape(str(message))}", highlight=False, soft_wrap=True)


MUCH = 0.4  # of the slots: published models break above it
LOST = (
    "above 40 % of the slots published models lose what users notice: Qwen3-30B-A3B under the paper's rule 4 points of "
    "LiveCodeBench at 40 %, 9 at 50 %, 23 at 60 %, and 1 at 20 %. See docs/choosing.md; --quiet ends this note"
)


def warn_of_loss(budgets: Iterable[float], quiet: bool) -> None:
    """Once for a command that is asked to skip much, where nothing brings slots back."""
    if not quiet and max(budgets, default=0.0) > MUCH:
        note(LOST)


class Bars:
    """Progress on a terminal: a bar for every task that is under way, gone when the outermost has ended."""

    def __init__(self) -> None:
        self.bars: Progress | None = None
        self.ids: dict[int, Any] = {}

    def began(self, task: progress.Task) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if self.bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bars = Progress(*columns, console=err, transient=True)
            self.bars.start()
        self.ids[id(task)] = self.bars.add_task(task.label, total=task.total)

    def moved(self, task: progress.Task) -> None:
        if self.bars is not None and id(task) in self.ids:
            self.bars.update(self.ids[id(task)], completed=task.done, total=task.total)

    def ended(self, task: progress.Task) -> None:
        bar = self.ids.pop(id(task), None)
        if self.bars is None or bar is None:
            return
        if task.parent is None:
            self.bars.stop()
            self.bars = None
        else:
            self.bars.remove_task(bar)


def parse_budgets(text: str) -> list[float]:
    """ "0.1:0.6:0.1" (from : to : step) or "0.1,0.5"."""
    from ..budget import fraction

    try:
        if ":" not in text:
            return [fraction(float(part)) for part in text.split(",")]
        start, stop, step = (float(part) for part in text.split(":"))
        count = math.floor((stop - start) / step + 1e-6) + 1
        if not 1 <= count <= MOST_BUDGETS:
            raise ValueError
        return [fraction(round(start + i * step, 9)) for i in range(count)]
    except (ValueError, ArithmeticError):
        raise BudgetError(
            f"Budgets are fractions such as 0.5, 0.1,0.3 or 0.1:0.6:0.1 (from : to : step); {text!r} is not."
        ) from None


def reachable(text: str, usual: str, top_k: int, min_active: int = 1) -> list[float]:
    """Budgets as typed, each checked; of the usual ones, which nobody typed, those that the model has slots for."""
    from ..budget import check_budget, largest

    wanted, limit = parse_budgets(text), largest(top_k, min_active)
    if text == usual and 0 < limit < max(wanted):
        note(f"budgets above {limit:.1%} are left out: a token has {top_k} slots here and keeps {min_active}")
        wanted = [b for b in wanted if b <= limit]
    return [check_budget(b, top_k, min_active) for b in wanted]


def check_texts(texts: Iterable[Path], window: int, tokens: int | None, batch: int = 1) -> None:
    """What cannot serve is reported before gigabytes are loaded."""
    from ..text import check_sizes, read_text

    check_sizes(window, tokens, batch)
    for text in texts:
        read_text(text)


def check_plan(plan: Path | None, skip: float) -> None:
    """Without a plan nothing can be skipped."""
    if skip and plan is None:
        raise OptionError(f"Skipping {skip:.0%} needs a plan: give one with --plan, made by `ace plan`.")


def made_of(*files: Path | None) -> dict[str, str]:
    """The hashes of what went in, by name."""
    from ..files import hashes

    return hashes(path for path in files if path is not None)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))
