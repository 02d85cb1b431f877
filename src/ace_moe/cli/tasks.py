"""Quality of a skipped model: perplexity by protocol, tasks through lm-eval or EvalScope."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError
from . import options as opt
from . import show_results
from .app import command
from .common import SKIP, check_plan, made_of, parse_budgets
from .groups import Deciding, Loading
from .options import option, plan_option
from .outputs import check_output
from .terminal import out, print_json, say

if TYPE_CHECKING:
    from ..lab.tasks.evaluate import Harness

HARNESSES = ("lm-eval", "evalscope")


@command(epilog="Example: ace perplexity Qwen/Qwen3-30B-A3B --text wiki.test.raw --plan plan.safetensors --skip 0.5")
def perplexity(
    model: opt.Model,
    text: Annotated[Path, option("The text, such as wiki.test.raw of WikiText-2.")],
    deciding: Deciding,
    loading: Loading,
    plan: Annotated[Path | None, plan_option("A plan file, or owner/name; without one nothing is skipped.")] = None,
    skip: Annotated[float | None, option("The budget. Default: 0.3 with a plan, else nothing.")] = None,
    protocol: Annotated[str, option("standard, or released: the paper's own code.")] = "standard",
    workload: opt.WorkloadName = None,
    window: opt.Window = 2048,
    tokens: Annotated[int | None, option("Tokens of the text to use. Default: all.")] = None,
    batch: opt.Batch = 1,
    output: Annotated[Path | None, option("A file to keep and continue the run in.", "--out", "-o")] = None,
    allow_other_weights: opt.AllowOtherWeights = False,
    as_json: opt.AsJson = False,
) -> None:
    """WikiText-2 perplexity by protocol, with a 95 % interval and the realised ratio."""
    from ..ace import ACE
    from ..checkpoint.loading import check_window
    from ..checkpoint.model import called
    from ..lab.compare.perplexity import pieces, protocol_named, run, setup_of
    from ..provenance import provenance
    from ..text import check_sizes, read_text

    chosen = protocol_named(protocol)
    skip = (0.0 if plan is None else SKIP) if skip is None else skip
    check_sizes(window, tokens, batch)
    check_output(output, "results", text, plan)
    content = read_text(text)
    check_plan(plan, skip)
    options = {"workload": workload, "allow_other_weights": allow_other_weights, **deciding.given}
    ace = None if plan is None else ACE.load(plan, skip, **options)
    tokenizer, loaded = loading.load_both(model)
    check_window(loaded, window)
    windows = pieces(chosen, content, tokenizer, loaded.get_input_embeddings().num_embeddings, window, tokens)
    facts = {"model": called(model), "setup": setup_of(loaded, ace, skip, batch)}
    facts["provenance"] = provenance(loaded.device, made_of(text, plan))
    with ace(loaded) if ace else nullcontext():
        results = run(loaded, ace, chosen, windows, output, facts, batch)
    if as_json:
        return print_json(results)
    show_results.print_perplexity(out, results, protocol, window)


@command(
    "eval", epilog="Example: ace eval Qwen/Qwen3-30B-A3B --plan plan.safetensors --skip 0,0.5 --tasks arc_easy,piqa"
)
def evaluate_tasks(
    model: opt.Model,
    plan: opt.PlanPath,
    tasks: Annotated[str, option("paper, names such as arc_easy,piqa, or any task of the harness.")],
    deciding: Deciding,
    skip: Annotated[str, option("Budgets; with 0 among them the others are compared with it.")] = f"0,{SKIP}",
    data: Annotated[Path | None, option("Folder with arc_easy.jsonl … Default: the hub's data.")] = None,
    harness: opt.HarnessName = "lm-eval",
    limit: opt.Limit = None,
    run_code: opt.RunCode = False,
    max_new_tokens: Annotated[int | None, option("Cap on generated tokens. Default: the paper's.")] = None,
    chat: Annotated[bool, option("Ask through the model's chat template (lm-eval).")] = False,
    output: Annotated[Path, option("The results; if it is there, it is continued.", "--out", "-o")] = Path("eval.json"),
    workload: opt.WorkloadName = None,
    batch: Annotated[int, option("Questions at a time.")] = 1,
    device: opt.Device = None,
    expand: opt.Expand = False,
    as_json: opt.AsJson = False,
) -> None:
    """Accuracy on tasks, zero-shot and greedy, with intervals and paired differences to the unskipped model."""
    from ..checkpoint.loading import check_device, default_device, share_cores
    from ..lab.compare.subject import identity_of
    from ..lab.tasks import catalogue
    from ..lab.tasks.evaluate import describe, evaluate, facts
    from ..lab.tasks.sandbox import check_allowed

    check_output(output, "results", plan)
    names, skips, device = catalogue.parse_tasks(tasks), parse_budgets(skip), device or default_device()
    check_device(device)
    if device == "cpu":  # harnesses load models themselves
        share_cores()
    known = {name: catalogue.TASKS[name] for name in names if name in catalogue.TASKS}
    check_harness(harness)
    if expand and harness != "lm-eval":
        raise OptionError("EvalScope loads checkpoints itself. With --expand use --harness lm-eval.")
    if chat and harness != "lm-eval":
        raise OptionError("EvalScope asks in its own way. With --chat use --harness lm-eval.")
    for name, task in known.items():
        catalogue.check_source(task, harness, local=data is not None)
        if task.runs_code:
            check_allowed(run_code, name)
    files = {name: catalogue.find_file(task, data) for name, task in known.items()}
    rows = {name: catalogue.read_rows(known[name], path) for name, path in files.items() if path is not None}
    options = deciding.given | ({"workload": workload} if workload else {})
    given: dict[str, Any] = {"plan": str(plan), **options, **({"expand": True} if expand else {})}
    made = _harness(harness, model, device, batch, max_new_tokens, chat, given)
    settled = made.ace.policy.settings
    assert made.ace.attachment is not None
    identity = {
        **identity_of(made.ace.attachment.model()),
        **{"harness": harness, "limit": limit, "policy": settled, "batch": batch, "cap": max_new_tokens, "chat": chat},
        "workload": workload,  # other thresholds for the same budgets
        **({"expand": True} if expand else {}),
    }
    known_facts = {**facts(model, device, made_of(plan)), "settings": describe(settled, harness)}
    results = evaluate(made, names, skips, rows, limit, output, identity, known_facts)
    if as_json:
        return print_json(results)
    out.print(show_results.tasks_table(results))
    say(f"{output}: {len(results['cells'])} results. Next: ace report {opt.as_typed(output)}")


def _harness(
    name: str, model: str, device: str, batch: int, cap: int | None, chat: bool, given: dict[str, Any]
) -> Harness:
    if name == "lm-eval":
        from ..lab.harnesses.lm_eval import AceLM, LmEval

        return LmEval(AceLM(model, batch_size=batch, device=device, **given), chat=chat, cap=cap)
    from ..lab.harnesses.evalscope import AceAPI, EvalScope

    return EvalScope(AceAPI(model, precision="auto", device_map=device, **given), cap, batch)


def check_harness(name: str) -> None:
    if name not in HARNESSES:
        raise OptionError(f"There is no harness {name!r}. Choose one of: {', '.join(HARNESSES)}.")


@command(
    "lm-eval",
    context_settings=opt.FORWARDED,
    epilog="Example: ace lm-eval --model ace --model_args pretrained=MODEL,plan=plan.safetensors,skip=0.5 --tasks arc_easy",
)
def lm_eval(context: typer.Context) -> None:
    """lm-eval's own command line with the model `ace`: pretrained, plan, skip, policy, gain … as model arguments.

    Its own help: ace lm-eval -- --help
    """
    from ..lab.harnesses.lm_eval import main

    main(context.args)
