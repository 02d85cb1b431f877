"""The app: its commands in order, groups of options as options, progress, and how errors end."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
import typer.core

from .. import progress
from ..errors import AceError, brief
from ..version import __version__
from .options import option
from .terminal import err, hand_over, note, out, speak_plainly

if TYPE_CHECKING:
    from rich.progress import Progress

# What a newcomer needs first stands first; a command that no panel names comes last.
PANELS = {
    "See it": ("demo", "run", "chat"),
    "Use it": ("plan", "tune", "serve", "inspect", "policies", "plans"),
    "Measure": ("compare", "report", "perplexity", "eval", "lm-eval", "bench"),
    "Study": ("study", "trace", "simulate", "reproduce"),
}
RESUMES = ("plan", "tune", "compare", "perplexity", "eval", "study", "reproduce")


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

        refused = f"The system refused a file or folder: {brief(error)}. Check its path, permissions and free space."
        paragraph = str(error) if isinstance(error, AceError) else refused
        err.print(f"[bold red]error:[/] {escape(paragraph)}", highlight=False, soft_wrap=True)
        sys.exit(1)


# ---- progress ----


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


# ---- groups of options ----


def command(name: str | None = None, **about: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a command whose groups of options (dataclasses) are flattened; Python calls the function as it is written."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        app.command(name, **about)(_flat(function))
        return function

    return register


def _flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an option for each field of its groups, behind its own."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    own = [p.replace(annotation=hints[n]) for n, p in inspect.signature(function).parameters.items() if n not in groups]

    @wraps(function)
    def flat(**given: Any) -> Any:
        made = {n: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for n, kind in groups.items()}  # type: ignore[operator]
        return function(**given, **made)

    parameters = [*own, *(p for kind in groups.values() for p in _parameters(kind))]
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints, kind = get_type_hints(group, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(group)]
