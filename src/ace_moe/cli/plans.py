"""From a checkpoint to a plan to text: tables, budget, run, inspect, demo."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BudgetError
from . import show, show_texts
from .common import (
    AllowOtherWeights,
    AsJson,
    Device,
    Expand,
    GainName,
    MinActive,
    MinMass,
    Model,
    PlanPath,
    PolicyName,
    Preset,
    WorkloadName,
    app,
    err,
    note,
    out,
    parse_budgets,
    print_json,
    settings,
)
from .outputs import check_output

if TYPE_CHECKING:
    from ..plan import Plan
    from ..tables.work import Job


@app.command(epilog="Example: ace tables Qwen/Qwen3-30B-A3B -o qwen3.safetensors")
def tables(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan goes.")] = Path("plan.safetensors"),
    device: Annotated[
        str, typer.Option(help="Where the products are computed; several for workers: cuda:0,cuda:1.")
    ] = "cpu",
    stream: Annotated[
        bool, typer.Option("--stream", help="Keep nothing of a hub repository: a shard at a time.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Processes that share the layers.", min=1)] = 1,
    layers: Annotated[
        str | None, typer.Option(help="Only MoE layers first:past-the-last, for several machines.")
    ] = None,
    push: Annotated[str | None, typer.Option(help="Publish the plan on the hub: owner/name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the tables from the checkpoint alone and write a plan. No data, no GPU needed."""
    from .. import sharing
    from ..checkpoint import MoEModel
    from ..loading import check_device
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
    out.print(show.plan_table(plan))
    for reason in plan.undefined.values():
        note(reason)
    show.print_line(
        out,
        f"{output}: {len(plan.tables)} layers in {seconds:.1f} s. Next: ace budget {model} --plan {output} --text FILE",
    )
    if pushed:
        show.print_line(out, f"pushed: {pushed}")


def _in_parts(job: Job, as_json: bool) -> Plan | None:
    """The plan, saved; None where layers are left to others, whose files then come into the same folder."""
    from ..tables.parts import Parts
    from ..tables.work import build_in_parts

    plan, missing = build_in_parts(job, say=note)
    if plan is not None:
        plan.save(job.output)
        return plan
    folder, keys = Parts(job.output).folder, [site.key for site in missing]
    if as_json:
        print_json({"parts": str(folder), "missing": keys})
    else:
        left = f"{len(keys)} layers are missing ({keys[0]} … {keys[-1]})"
        show.print_line(out, f"{folder}: {left}. Put the other machines' files there and run the command again.")
    return None


@app.command(epilog="Example: ace budget Qwen/Qwen3-30B-A3B --plan qwen3.safetensors --text sample.txt")
def budget(
    model: Model,
    plan: PlanPath,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Unlabelled text of the kind the model will serve: .txt, or .jsonl with `text`; several are mapped one by one "
            "and together, as `mixed`. Default: the model writes its own."
        ),
    ] = None,
    budgets: Annotated[str, typer.Option(help="Fractions to skip: 0.5, 0.1,0.3 or from:to:step.")] = "0.1:0.6:0.1",
    max_kl: Annotated[
        float | None,
        typer.Option(help="Instead of budgets: the most that can be skipped with at most this KL (nats a token)."),
    ] = None,
    reads: Annotated[
        float | None,
        typer.Option(help="Instead of budgets: what must be skipped to read this part of the experts in decode."),
    ] = None,
    sequences: Annotated[int, typer.Option(help="Sequences of a decode step, for --reads.")] = 16,
    policy: PolicyName = "ace",
    preset: Preset = None,
    gain: GainName = None,
    min_active: MinActive = None,
    min_mass: MinMass = None,
    window: Annotated[int, typer.Option(help="Tokens in a window.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use.")] = 65536,
    batch: Annotated[int, typer.Option(help="Windows at a time.")] = 1,
    correct: Annotated[
        bool | None,
        typer.Option(
            help="Correct τ on the skipped model until the realised ratio fits. Default: all but the paper's."
        ),
    ] = None,
    fidelity: Annotated[bool, typer.Option(help="Also measure how far each threshold moves predictions (KL).")] = True,
    again: Annotated[bool, typer.Option(help="Map budgets again that the plan has for this text already.")] = False,
    default: Annotated[
        bool,
        typer.Option("--default", help="Use this text (of several: mixed) where none is named. Default: the first."),
    ] = False,
    allow_other_weights: AllowOtherWeights = False,
    device: Device = None,
    expand: Expand = False,
    as_json: AsJson = False,
) -> None:
    """Map budgets to thresholds with one pass over a text, correct them, and write them into the plan.

    What the policy needs beside, further tables or a calibration on the text's first windows, goes into the plan too.
    """
    from ..checkpoint import MoEModel
    from ..loading import load_model
    from ..plan import Plan, update
    from ..planning import least_reading, map_budgets, most_within, texts_for
    from ..planning.partial import Partial
    from ..policies import choose
    from ..provenance import file_hash, provenance
    from ..runtime.settings import check_budget, check_tables
    from ..tables import TABLES
    from ..text import check_sizes, read_text

    read, made = Plan.load(plan), choose(**settings(policy, preset, gain, min_active, min_mass))
    check_tables(read, made, set(TABLES), calibrates=True)
    wanted = [check_budget(b, read.top_k, made.min_active) for b in parse_budgets(budgets)]
    show.check_writable(plan)
    check_sizes(window, tokens, batch)
    if max_kl is not None and not 0 < max_kl < math.inf:
        raise BudgetError(f"--max-kl is a number of nats above 0, such as 0.05; not {max_kl:g}.")
    if reads is not None and (not 0 < reads < 1 or sequences < 1 or max_kl is not None):
        raise BudgetError(
            "--reads is a part of the experts between 0 and 1, for one or more --sequences, without --max-kl."
        )
    for path in text or ():
        read_text(path)  # a text that cannot serve is reported before gigabytes are loaded
    loaded = load_model(model, device, expand=expand)
    workloads = texts_for(loaded, model, text or (), window, tokens)
    had = read.check_model(MoEModel.of(loaded).fingerprint(), allow_other_weights)
    how: dict[str, Any] = {"batch": batch, "correct": correct, "again": again, "judged": fidelity}
    how |= {"partial": Partial(plan)}
    record = provenance(loaded.device, {path.name: file_hash(path) for path in text or ()})
    every, passes, before = [], 0, had

    def save(now: Plan) -> None:
        """With the command that made it, unless nothing is new."""
        update(plan, read, now if now == before else replace(now, made=(*before.made, record)))

    for windows in workloads:
        if max_kl is not None:
            most, had = most_within(loaded, had, made, windows, max_kl, batch)
            note(f"{most:.0%} can be skipped within a KL of {max_kl:g} on {windows.workload.name}")
            wanted, how["correct"] = [most] if most else [], False  # the threshold that was judged, not one beside it
        if reads is not None:
            least, had = least_reading(loaded, had, made, windows, reads, sequences)
            note(f"{least:.0%} skipped reads at most {reads:.0%} of the experts of {sequences} sequences")
            wanted = [least] if least else []
        mapped = map_budgets(loaded, had, made, windows, wanted, save=save, **how)
        had = mapped.plan.with_default(windows.workload) if default else mapped.plan
        save(had)
        every += mapped.entries
        passes += mapped.passes.count
        if not as_json:
            out.print(show.entries_table(mapped.entries))
            said = f"{len(wanted)} thresholds from {windows.workload.tokens:,} tokens of {windows.workload.name}"
            show.print_line(out, f"{plan}: {said} in {mapped.passes.count} passes.")
    if as_json:
        print_json({"plan": str(plan), "passes": passes, "thresholds": [show.entry_json(t) for t in every]})


@app.command(
    epilog='Example: ace run Qwen/Qwen3-30B-A3B --plan qwen3.safetensors --skip 0.5 --prompt "Once upon a time"'
)
def run(
    model: Model,
    plan: PlanPath,
    prompt: Annotated[str, typer.Option(help="What the model continues.")],
    skip: Annotated[float, typer.Option(help="Fraction of routed slots to skip.")] = 0.5,
    policy: PolicyName = "ace",
    preset: Preset = None,
    gain: GainName = None,
    min_active: MinActive = None,
    min_mass: MinMass = None,
    workload: WorkloadName = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    allow_other_weights: AllowOtherWeights = False,
    device: Device = None,
    expand: Expand = False,
    as_json: AsJson = False,
) -> None:
    """Generate text with a budget and show the realised ratio."""
    from ..ace import ACE
    from ..loading import check_prompt, generate, load_model, load_tokenizer

    check_prompt(prompt, max_new_tokens)
    options = settings(policy, preset, gain, min_active, min_mass)
    ace = ACE.load(plan, skip, workload=workload, allow_other_weights=allow_other_weights, **options)
    tokenizer, loaded = load_tokenizer(model), load_model(model, device, expand=expand)
    with ace(loaded):
        text = generate(loaded, tokenizer, prompt, max_new_tokens)
    report = ace.report()
    if as_json:
        return print_json({"text": text, "requested": skip, **report})
    out.print(text, highlight=False, markup=False)
    err.print(
        f"requested {skip:.1%}, realised {report['realised']:.1%} "
        f"(prefill {report['prefill']['realised']:.1%}, decode {report['decode']['realised']:.1%})"
    )


@app.command(epilog="Examples: ace inspect Qwen/Qwen3-30B-A3B, ace inspect plan.safetensors, ace inspect COPY ORIGINAL")
def inspect(
    target: Annotated[str, typer.Argument(help="A model or a plan file.", metavar="MODEL|PLAN")],
    other: Annotated[str | None, typer.Argument(help="Another, such as its original.", metavar="OTHER")] = None,
    as_json: AsJson = False,
) -> None:
    """What is in this model or this plan, what ACE can do with it, and how far it is from another."""
    from ..checkpoint import MoEModel
    from ..plan import Plan

    if other is not None:
        from ..tables.copies import compared, plan_of

        pair = compared(plan_of(target), plan_of(other))
        return print_json(pair) if as_json else show.print_pair(out, pair)
    if Path(target).is_file() or target.endswith(".safetensors"):
        return show_plan(Plan.load(target), as_json)
    moe = MoEModel.open(target)
    return print_json(show.model_json(moe)) if as_json else show.print_model(out, moe)


def show_plan(plan: Plan, as_json: bool) -> None:
    """The plan's tables, thresholds and texts."""
    texts = show_texts.texts_json(plan)
    if as_json:
        return print_json(show.plan_json(plan) | {"workloads": texts})
    show.print_plan(out, plan)
    return out.print(show_texts.texts_table(texts)) if texts else None


@app.command(epilog="Example: ace demo")
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the plan, the JSON and the picture.")
    ] = Path("ace-demo"),
    as_json: AsJson = False,
) -> None:
    """The embedded model: tables → plan → thresholds → perplexity at 0–60 % skipped, in about a minute on a laptop."""
    from .. import demo as tour

    show.check_folder(output)
    cells = tour.run(output, say=lambda line: err.print(line))
    picture = tour.draw(cells, output / "demo.png")
    if as_json:
        return print_json([vars(cell) for cell in cells])
    out.print(show.demo_table(cells))
    show.print_line(
        out,
        f"plan and numbers in {output}/"
        + (f", picture in {picture}" if picture else "; pip install 'ace-moe[report]' for a picture"),
    )
