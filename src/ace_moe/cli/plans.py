"""From a checkpoint to a plan: tables, thresholds for budgets, or a bound on KL."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import BudgetError, OptionError, OutputError
from . import options as opt
from . import show
from .app import command
from .common import check_texts, made_of, parse_budgets, reachable, warn_of_loss
from .groups import Deciding, Loading
from .options import option
from .outputs import check_output, check_writable
from .terminal import note, out, print_json, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..mapping import Mapped
    from ..plan import Plan
    from ..policies import Policy
    from ..text import Windows

EVERY = "0.1:0.6:0.1"  # budgets that are mapped where none are named
PLAN = "Where the plan goes; one that is there is continued."
TEXTS = (
    "Unlabelled text of the kind the model will serve: .txt, or .jsonl with `text`; several are mapped one by one "
    "and together, as `mixed`. Default: the model writes its own."
)
TABLES = "Only add the tables of the paper's rule, from the checkpoint alone; no text, no pass."
MAX_KL = "Instead of budgets: the most that can be skipped with at most this KL (nats a token)."
CORRECT = "Correct τ on the skipped model until the realised ratio fits. Default: all but the paper's."
DEFAULT = "Use this text (of several: mixed) where none is named. Default: the first."


@command(epilog="Example: ace plan Qwen/Qwen3-30B-A3B --text sample.txt")
def plan(
    model: opt.Model,
    deciding: Deciding,
    loading: Loading,
    output: Annotated[Path, option(PLAN, "--out", "--output", "-o", "--plan", "-p")] = Path("plan.safetensors"),
    text: Annotated[list[Path] | None, option(TEXTS)] = None,
    budgets: opt.Budgets = EVERY,
    max_kl: Annotated[float | None, option(MAX_KL)] = None,
    tables: Annotated[bool, option(TABLES, "--tables")] = False,
    window: opt.Window = 1024,
    tokens: opt.Tokens = 65536,
    batch: opt.Batch = 1,
    correct: Annotated[bool | None, option(CORRECT)] = None,
    fidelity: Annotated[bool, option("Also measure how far each threshold moves predictions (KL).")] = True,
    again: Annotated[bool, option("Map budgets again that the plan has for this text already.")] = False,
    default: Annotated[bool, option(DEFAULT, "--default")] = False,
    quiet: opt.Quiet = False,
    allow_other_weights: opt.AllowOtherWeights = False,
    as_json: opt.AsJson = False,
) -> None:
    """Map budgets to thresholds on a text, into one file with the tables that the policy reads.

    Stopped by Ctrl-C, the same command goes on. --no-correct and --no-fidelity leave the first pass alone.
    """
    if tables and text:
        raise OptionError("--tables makes no pass over a text: leave --text out.")
    if tables:
        return _add_tables(model, output, loading.device, as_json)
    from ..checkpoint import MoEModel
    from ..lab.policies import CALIBRATIONS
    from ..mapping import windows_by_text
    from ..mapping.unfinished import Partial
    from ..policies import choose, policy_for
    from ..provenance import provenance
    from ..tables.build import check_tables

    choose(**deciding.given)  # reading a large checkpoint takes long: what would be refused after it is refused first
    _check_budgets(budgets, max_kl)
    check_texts(text or (), window, tokens, batch)
    read = _open(model, output)
    policy = policy_for(read, **deciding.given)
    check_tables(read, policy, CALIBRATIONS)
    wanted = [] if max_kl is not None else reachable(budgets, EVERY, read.top_k, policy.min_active)
    warn_of_loss([] if budgets == EVERY else wanted, quiet)  # a whole curve is not a wish
    loaded = loading.load(model)
    known = read.check_model(MoEModel.of(loaded).fingerprint(), allow_other_weights)
    file = PlanFile(output, read, known, provenance(loaded.device, made_of(*text or ())))
    texts = windows_by_text(loaded, model, text or (), window, tokens)
    how = {"correct": correct, "again": again, "judged": fidelity, "partial": Partial(output), "batch": batch}
    entries, passes = [], 0
    for mapped in _map_texts(loaded, file, policy, texts, wanted, max_kl, default, how):
        entries += mapped.entries
        passes += mapped.passes.count
        if not as_json:
            _print_mapped(output, mapped)
    if as_json:
        return print_json({"plan": str(output), "passes": passes, "thresholds": [show.entry_json(t) for t in entries]})
    if entries:
        skip = "" if budgets == EVERY and max_kl is None else f" --skip {entries[0].budget:g}"
        say(f"Next: {_run_command(model, output, policy, skip)}")


@dataclass(frozen=True)
class PlanFile:
    """A plan file under change: the plan as it was read, the same checked against the model, and who changes it."""

    path: Path
    read: Plan
    known: Plan
    record: dict[str, Any]

    def save(self, plan: Plan) -> None:
        """Write the plan with the command that made it, unless nothing is new."""
        from ..plan import update

        changed = plan if plan == self.known else replace(plan, made=(*self.known.made, self.record))
        update(self.path, self.read, changed)


def _map_texts(
    model: PreTrainedModel,
    file: PlanFile,
    policy: Policy,
    texts: list[Windows],
    budgets: list[float],
    max_kl: float | None,
    default: bool,
    how: dict[str, Any],
) -> Iterator[Mapped]:
    """Map the budgets, or the most within `max_kl`, on one text after another, each into the file."""
    from ..lab.policies import calibration_part, prepare
    from ..mapping import map_budgets, most_within

    plan = file.known
    for windows in texts:
        plan = prepare(plan, policy, model, calibration_part(windows))
        if max_kl is not None:
            ratio, plan = most_within(model, plan, policy, windows, max_kl, how["batch"])
            note(f"{ratio:.0%} can be skipped within a KL of {max_kl:g} on {windows.workload.name}")
            budgets = [ratio] if ratio else []
            how = {**how, "correct": False}  # the threshold that was judged, not one beside it
        mapped = map_budgets(model, plan, policy, windows, budgets, save=file.save, **how)
        plan = mapped.plan.with_default(windows.workload) if default else mapped.plan
        file.save(plan)
        yield mapped


def _print_mapped(output: Path, mapped: Mapped) -> None:
    out.print(show.entries_table(mapped.entries))
    text = mapped.passes.windows.workload
    said = f"{len(mapped.fits)} thresholds from {text.tokens:,} tokens of {text.name}"
    say(f"{output}: {said} in {mapped.passes.count} passes.")


def _run_command(model: str, plan: Path, policy: Policy, skip: str) -> str:
    """The command that shows the plan at work, to copy; a policy from outside is named, as no file says which code runs."""
    from ..policies import is_ours

    named = "" if is_ours(policy.key) else f" --policy {opt.as_typed(policy.key)}"
    return f"ace run {opt.as_typed(model)} --plan {opt.as_typed(plan)}{named}{skip} --beside --prompt TEXT"


def _check_budgets(budgets: str, max_kl: float | None) -> None:
    """Refuse budgets that are not fractions, a bound on KL that is not one, and the two together."""
    parse_budgets(budgets)
    if max_kl is None:
        return
    if budgets != EVERY:
        raise BudgetError("--max-kl finds the budget itself: leave --budgets out.")
    if not 0 < max_kl < math.inf:
        raise BudgetError(f"--max-kl is a number of nats above 0, such as 0.05; not {max_kl:g}.")


def _open(model: str, path: Path) -> Plan:
    """The plan of the file, or a new one of this model, which is written at once."""
    from ..provenance import provenance
    from ..tables.build import build_plan

    if (known := _existing(path)) is not None:
        check_writable(path)
        return known
    if path.suffix != ".safetensors" and len(path.parts) == 2 and not path.parent.is_dir():
        raise OutputError(
            f"There is no folder {path.parent}. If {path} is a plan of the hub, published plans stay as they are: take a copy "
            f"with `ace plans get {path} -o plan.safetensors`, and name that."
        )
    check_output(path, "plan")
    plan = replace(build_plan(model), made=(provenance(),))
    plan.save(path)
    return plan


def _add_tables(model: str, path: Path, device: str | None, as_json: bool) -> None:
    """Add the tables of the paper's rule to the plan of the file, or to a new one, and show them."""
    from ..checkpoint.loading import check_device
    from ..plan import update
    from ..provenance import provenance
    from ..tables import PAPER
    from ..tables.build import build_plan

    check_output(path, "plan")
    if device is not None:
        check_device(device)
    known, start = _existing(path), time.perf_counter()
    plan = replace(build_plan(model, PAPER, device=device), made=(provenance(device or "cpu"),))
    if known is None:
        plan.save(path)
    else:
        known = known.check_model(plan.fingerprint)
        joined = known.with_tables(plan.tables)
        plan = update(path, known, replace(joined, made=(*known.made, *plan.made), undefined=plan.undefined))
    seconds = time.perf_counter() - start
    if as_json:
        facts = {"plan": str(path), "layers": len(plan.layers), "undefined": plan.undefined, "seconds": seconds}
        return print_json(facts)
    for reason in plan.undefined.values():
        note(reason)
    out.print(show.plan_table(plan))
    following = f"ace plan {opt.as_typed(model)} --plan {opt.as_typed(path)} --text FILE"
    say(f"{path}: {len(plan.layers)} layers in {seconds:.1f} s. Next: {following}")


def _existing(path: Path) -> Plan | None:
    """The plan of a file; None where there is no file, or an empty one. A damaged plan is refused: nothing is written over."""
    from ..plan import Plan

    return Plan.load(path) if path.exists() and path.stat().st_size else None
