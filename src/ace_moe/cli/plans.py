"""From a checkpoint to a plan: tables, budget, and both at once."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import BudgetError, OptionError
from . import options as opt
from . import show
from .app import command
from .common import check_texts, made_of, parse_budgets, reachable, warn_of_loss
from .groups import Deciding, Loading
from .options import option
from .outputs import check_output, check_writable
from .terminal import note, out, print_json, say

if TYPE_CHECKING:
    from ..plan import Plan
    from ..tables.work import Job

EVERY = "0.1:0.6:0.1"  # budgets that are mapped where none are named
TEXTS = (
    "Unlabelled text of the kind the model will serve: .txt, or .jsonl with `text`; several are mapped one by one "
    "and together, as `mixed`. Default: the model writes its own."
)
MAX_KL = "Instead of budgets: the most that can be skipped with at most this KL (nats a token)."
READS = "Instead of budgets: what must be skipped to read this part of the experts in decode."
CORRECT = "Correct τ on the skipped model until the realised ratio fits. Default: all but the paper's."
DEFAULT = "Use this text (of several: mixed) where none is named. Default: the first."
Texts = Annotated[list[Path] | None, option(TEXTS)]
Out = Annotated[Path, option("Where the plan goes.", "--out", "--output", "-o")]


@dataclass(frozen=True)
class Aim:
    """A budget in other words, found on each text."""

    max_kl: Annotated[float | None, option(MAX_KL)] = None
    reads: Annotated[float | None, option(READS)] = None
    sequences: Annotated[int, option("Sequences of a decode step, for --reads.")] = 16

    @property
    def given(self) -> bool:
        return self.max_kl is not None or self.reads is not None

    def check(self, budgets: str) -> None:
        if self.given and budgets != EVERY:
            raise BudgetError("--max-kl and --reads find the budget themselves: leave --budgets out.")
        if self.max_kl is not None and not 0 < self.max_kl < math.inf:
            raise BudgetError(f"--max-kl is a number of nats above 0, such as 0.05; not {self.max_kl:g}.")
        if self.reads is not None and (not 0 < self.reads < 1 or self.sequences < 1 or self.max_kl is not None):
            raise BudgetError(
                "--reads is a part of the experts between 0 and 1, for one or more --sequences, without --max-kl."
            )

    def found(self, model: Any, plan: Plan, policy: Any, windows: Any, batch: int) -> tuple[list[float], Plan]:
        """The budget, if there is one, and the plan with what was measured on the way."""
        from ..mapping import least_reading, most_within

        if self.max_kl is not None:
            ratio, plan = most_within(model, plan, policy, windows, self.max_kl, batch)
            note(f"{ratio:.0%} can be skipped within a KL of {self.max_kl:g} on {windows.workload.name}")
        else:
            assert self.reads is not None
            ratio, plan = least_reading(model, plan, policy, windows, self.reads, self.sequences)
            note(f"{ratio:.0%} skipped reads at most {self.reads:.0%} of the experts of {self.sequences} sequences")
        return [ratio] if ratio else [], plan


@command(epilog="Example: ace plan Qwen/Qwen3-30B-A3B --text sample.txt")
def plan(
    model: opt.Model,
    deciding: Deciding,
    loading: Loading,
    output: Out = Path("plan.safetensors"),
    text: Texts = None,
    budgets: opt.Budgets = EVERY,
    window: opt.Window = 1024,
    tokens: opt.Tokens = 65536,
    as_json: opt.AsJson = False,
) -> None:
    """Everything skipping needs, in one file: tables from the checkpoint, then thresholds for your budgets on a text.

    The same as `ace tables` and then `ace budget`, which have more options. A plan that is there is continued.
    """
    from ..policies import choose

    if not output.exists():  # reading a large checkpoint takes long: what `budget` would refuse is refused first
        choose(**deciding.given)
        parse_budgets(budgets)
        check_texts(text or (), window, tokens)
        tables(model, output, quiet=True)
    budget(model, output, deciding, loading, Aim(), text, budgets, window=window, tokens=tokens, as_json=as_json)
    if not as_json:
        say(f"Next: ace run {opt.as_typed(model)} --plan {opt.as_typed(output)} --beside --prompt TEXT")


@command(epilog="Example: ace tables Qwen/Qwen3-30B-A3B -o qwen3.safetensors")
def tables(
    model: opt.Model,
    output: Out = Path("plan.safetensors"),
    device: Annotated[str, option("Where the products are computed; several for workers: cuda:0,cuda:1.")] = "cpu",
    stream: Annotated[bool, option("Keep nothing of a hub repository: a shard at a time.", "--stream")] = False,
    workers: Annotated[int, option("Processes that share the layers.", min=1)] = 1,
    layers: Annotated[str | None, option("Only MoE layers first:past-the-last, for several machines.")] = None,
    push: Annotated[str | None, option("Publish the plan on the hub: owner/name.")] = None,
    quiet: Annotated[bool, option("Print nothing but notes.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Compute the tables from the checkpoint alone and write a plan. No data, no GPU needed."""
    from .. import sharing
    from ..checkpoint import MoEModel
    from ..checkpoint.loading import check_device
    from ..provenance import provenance
    from ..tables.build import build_plan
    from ..tables.parts import Parts
    from ..tables.work import Job, parse_layers

    devices = tuple(device.split(","))
    for name in devices:
        check_device(name)
    check_output(output, "plan")
    if push is not None:
        sharing.check_push(push)
    start = time.perf_counter()
    in_parts = stream or workers > 1 or layers is not None
    if len(devices) > workers:
        raise OptionError(f"{len(devices)} devices are for as many processes: add --workers {len(devices)}.")
    if in_parts:
        found = _in_parts(Job(model, output, stream, workers, devices, parse_layers(layers)), as_json)
        if found is None:
            return
    else:
        found = build_plan(MoEModel.open(model), device=device)
    plan = replace(found, made=(provenance(devices[0]),))
    plan.save(output)
    if in_parts:
        Parts(output).remove()
    seconds = time.perf_counter() - start
    pushed = None if push is None else sharing.push(plan, push, None if Path(model).exists() else model)
    if as_json:
        facts = {"plan": str(output), "layers": len(plan.tables), "undefined": plan.undefined, "seconds": seconds}
        return print_json(facts | ({"pushed": pushed} if pushed else {}))
    for reason in plan.undefined.values():
        note(reason)
    if quiet:
        return None
    out.print(show.plan_table(plan))
    following = f"ace budget {opt.as_typed(model)} --plan {opt.as_typed(output)}"
    say(f"{output}: {len(plan.tables)} layers in {seconds:.1f} s. Next: {following}")
    if pushed:
        say(f"pushed: {pushed}")


def _in_parts(job: Job, as_json: bool) -> Plan | None:
    """The plan; None where layers are left to others, whose files then come into the same folder."""
    from ..tables.parts import Parts
    from ..tables.work import build_in_parts

    plan, missing = build_in_parts(job, say=note)
    if plan is not None:
        return plan
    folder, keys = Parts(job.output).folder, [site.key for site in missing]
    if as_json:
        print_json({"parts": str(folder), "missing": keys})
    else:
        left = f"{len(keys)} layers are missing ({keys[0]} … {keys[-1]})"
        say(f"{folder}: {left}. Put the other machines' files there and run the command again.")
    return None


@command(epilog="Example: ace budget Qwen/Qwen3-30B-A3B --plan qwen3.safetensors --text sample.txt")
def budget(
    model: opt.Model,
    plan: opt.PlanPath,
    deciding: Deciding,
    loading: Loading,
    aim: Aim,
    text: Texts = None,
    budgets: opt.Budgets = EVERY,
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
    """Map budgets to thresholds: a pass over a text, two or three more for each budget, into the plan.

    Stopped by Ctrl-C, the same command goes on. --no-correct and --no-fidelity leave the first pass alone.

    What the policy needs beside, further tables or a calibration on the text's first windows, goes into the plan too.
    """
    from ..checkpoint import MoEModel
    from ..decider.settings import check_tables, policy_for
    from ..mapping import map_budgets, texts_for
    from ..mapping.unfinished import Partial
    from ..plan import Plan, update
    from ..provenance import provenance
    from ..tables import TABLES

    read = Plan.load(plan)
    made = policy_for(read, **deciding.given)
    check_tables(read, made, set(TABLES), calibrates=True)
    wanted = [] if aim.given else reachable(budgets, EVERY, read.top_k, made.min_active)
    check_writable(plan)
    check_texts(text or (), window, tokens, batch)
    warn_of_loss([] if budgets == EVERY else wanted, quiet)  # a whole curve is no wish
    aim.check(budgets)
    loaded = loading.load(model)
    workloads = texts_for(loaded, model, text or (), window, tokens)
    had = read.check_model(MoEModel.of(loaded).fingerprint(), allow_other_weights)
    if aim.max_kl is not None:
        correct = False  # the threshold that was judged, not one beside it
    how: dict[str, Any] = {"correct": correct, "again": again, "judged": fidelity, "partial": Partial(plan)}
    record = provenance(loaded.device, made_of(*text or ()))
    every, passes, before = [], 0, had

    def save(now: Plan) -> None:
        """With the command that made it, unless nothing is new."""
        update(plan, read, now if now == before else replace(now, made=(*before.made, record)))

    for windows in workloads:
        if aim.given:
            wanted, had = aim.found(loaded, had, made, windows, batch)
        mapped = map_budgets(loaded, had, made, windows, wanted, save=save, batch=batch, **how)
        had = mapped.plan.with_default(windows.workload) if default else mapped.plan
        save(had)
        every += mapped.entries
        passes += mapped.passes.count
        if not as_json:
            out.print(show.entries_table(mapped.entries))
            said = f"{len(wanted)} thresholds from {windows.workload.tokens:,} tokens of {windows.workload.name}"
            say(f"{plan}: {said} in {mapped.passes.count} passes.")
    if as_json:
        print_json({"plan": str(plan), "passes": passes, "thresholds": [show.entry_json(t) for t in every]})
