"""Options that mean the same in every command, and how one is written down."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from ..files import expand

EMBEDDED = str(Path(__file__).parents[1] / "demo" / "demo-moe")


def option(meaning: str, *names: str, **more: Any) -> Any:
    """With `-o` among its names it is where results go."""
    return typer.Option(*names, help=meaning, **({"callback": home} if "-o" in names else {}), **more)


def home(path: Path | None) -> Path | None:
    """Shells leave the `~` of --out=~/plan.safetensors to us."""
    return path if path is None else expand(path)


def plan_option(meaning: str) -> Any:
    return option(meaning, "--plan", "-p", metavar="PLAN", callback=here)


def here(plan: Path | None) -> Path | None:
    """Where a plan option takes a repository's name: its plan, fetched."""
    from ..plan.hub import located

    return plan if plan is None else located(plan)


def embedded(name: str | None) -> str | None:
    """ "demo" is the model that comes with the package, unless there is such a folder."""
    return name if name != "demo" or Path(name).exists() else EMBEDDED


def as_typed(name: str | Path) -> str:
    """A model or a file as it stands in a command to copy."""
    return "demo" if name == EMBEDDED else shlex.quote(str(name))


FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True}  # of commands that hand on what they do not know
HUB_OR_FOLDER = "A checkpoint folder, a hub repository (owner/name), or demo."
THE_PLAN = "The plan: a file, or owner/name."

# ---- what is used -------------------------------------------------------------------------------------------------------

Model = Annotated[str, typer.Argument(help=HUB_OR_FOLDER, metavar="MODEL", callback=embedded)]
PlanPath = Annotated[Path, plan_option(THE_PLAN)]
OptionalPlan = Annotated[Path | None, plan_option(THE_PLAN)]
Tables = Annotated[Path | None, plan_option("Tables made before, a file or owner/name; else computed now.")]
AllowOtherWeights = Annotated[bool, option("The model is a quantised copy of the plan's.")]
Device = Annotated[str | None, option("cpu, cuda, cuda:1 … Default: the GPU if there is one.")]
Expand = Annotated[bool, option("Decode a quantised checkpoint into an unquantised model first.")]

# ---- how slots are decided ----------------------------------------------------------------------------------------------

POLICIES = (
    "The method that decides slots: auto (what the plan recommends or was mapped with last, else share), ace, gsp, rcr, "
    "share, fixed, top_p … (ace policies lists all)."
)
GAINS = "How kept gates are rescaled: power, kept, none, or a number such as 1.05."
THRESHOLDS = "Thresholds of this text, if the plan has several. Default: the plan's own."
Skip = Annotated[float, option("The budget: fraction of routed slots to skip.")]
PolicyName = Annotated[str, option(POLICIES)]
GainName = Annotated[str | None, option(GAINS)]
MinActive = Annotated[int | None, option("Experts that always run for a token.")]
MinMass = Annotated[float | None, option("Share of a token's gate mass that always runs.")]
WorkloadName = Annotated[str | None, option(THRESHOLDS, "--workload")]

# ---- what is read -------------------------------------------------------------------------------------------------------

Text = Annotated[Path, option("Text to measure on: .txt, or .jsonl with `text`.")]
Budgets = Annotated[str, option("Fractions to skip: 0.5, 0.1,0.3 or from:to:step.")]
Tokens = Annotated[int, option("Tokens of the text to use.")]
TokensOfEach = Annotated[int, option("Tokens of each text.")]
Window = Annotated[int, option("Tokens in a window.")]
Batch = Annotated[int, option("Windows at a time.")]
Limit = Annotated[int | None, option("Questions of each task. Default: all.")]
RunCode = Annotated[bool, option("Allow tasks that run code the model wrote.", "--run-code")]
HarnessName = Annotated[str, option("lm-eval or evalscope, which the paper used.")]

# ---- what is said -------------------------------------------------------------------------------------------------------

Results = Annotated[Path, option("The results file; if it is there, it is continued.", "--out", "-o")]
AsJson = Annotated[bool, option("Print one JSON object instead of a table.", "--json")]
Quiet = Annotated[bool, option("No advice on how much to skip.", "--quiet")]
