"""Plans shared and kept: `ace plans` lists the cache; get, push and clear work on one plan."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from . import show
from .app import app
from .options import option
from .outputs import check_output
from .terminal import out, print_json, say

plans = typer.Typer(
    invoke_without_command=True,
    help="Plans shared on the hub and kept in the cache.",
    epilog="Examples: ace plans, ace plans get owner/name, ace plans push plan.safetensors owner/name",
)
app.add_typer(plans, name="plans")
Name = Annotated[str, typer.Argument(help="The repository: owner/name.", metavar="OWNER/NAME")]
PlanFile = Annotated[Path, typer.Argument(help="A plan file, or owner/name.", metavar="PLAN", callback=opt.here)]
BaseModel = Annotated[str | None, option("The model's own repository, for the card: owner/name.")]


@plans.callback()
def kept(context: typer.Context, as_json: opt.AsJson = False) -> None:
    """List the plans that are kept: fetched from the hub, or made for models that were given none."""
    from ..plan.cache import Kept, kept

    if context.invoked_subcommand is not None:
        return
    plans = kept()
    if as_json:
        return print_json([{"name": k.label, "path": str(k.path), "bytes": k.size} for k in plans])
    if not plans:
        return say("No plan is kept. `ace plans get OWNER/NAME` fetches one.")

    def row(plan: Kept) -> list[str]:
        changed = datetime.datetime.fromtimestamp(plan.changed).date().isoformat()
        return [plan.label, "the hub" if plan.commit else "made here", f"{plan.size / 1e6:.1f}", changed]

    out.print(show.table("plans kept", ["plan", "from", "MB", "date"], map(row, plans)))


@plans.command(epilog="Example: ace plans get owner/name -o plan.safetensors")
def get(
    plan: PlanFile,
    output: Annotated[Path, option("Where the copy goes.", "--output", "-o")] = Path("plan.safetensors"),
) -> None:
    """A copy of a plan that you may write thresholds into."""
    from ..plan import Plan

    check_output(output, "plan", plan)
    Plan.load(plan).save(output)
    say(f"{output}: a copy of {plan.name}.")


@plans.command(epilog="Example: ace plans push plan.safetensors owner/name --base-model Qwen/Qwen3-30B-A3B")
def push(
    plan: PlanFile,
    name: Name,
    base_model: BaseModel = None,
    private: Annotated[bool, option("For you and whom you let in.")] = False,
) -> None:
    """Publish a plan on the hub, with a card that says what it is."""
    from ..plan import Plan
    from ..plan.hub import push

    say(f"pushed: {push(Plan.load(plan), name, base_model, private)}")


@plans.command(epilog="Example: ace plans clear owner/name")
def clear(
    name: Annotated[str | None, typer.Argument(help="As `ace plans` lists it. Default: all.", metavar="PLAN")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Forget plans that are kept; files elsewhere stay."""
    from ..plan.cache import clear

    cleared = clear(name)
    if as_json:
        return print_json([k.label for k in cleared])
    say(f"forgotten: {', '.join(k.label for k in cleared) or 'none was kept'}")
