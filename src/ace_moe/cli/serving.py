"""vLLM's OpenAI server with skipping configured: serve."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import IntegrationError, OptionError
from . import options as opt
from .app import command
from .common import SKIP, warn_of_loss
from .groups import Deciding
from .options import option
from .outputs import check_output
from .terminal import note

PLAN = "The plan: a file, or owner/name. Default: made from the checkpoint and kept."
TEXT = "Text to map the budget on, where the plan has none for it. Default: the model's own."
TRACE = "Keep what the routers say of served tokens in this file. It can betray what was said: guard it."
RESTORE = "Run skipped slots whose expert is read anyway. Default: yes, in decode."
DRY_RUN = "Check everything, print vLLM's command and stop; needs no vLLM."


@command(
    context_settings=opt.FORWARDED,
    epilog="Example: ace serve Qwen/Qwen3-30B-A3B --plan plan.safetensors --skip 0.3 --port 8000 --tensor-parallel-size 2",
)
def serve(
    context: typer.Context,
    model: opt.Model,
    deciding: Deciding,
    plan: Annotated[Path | None, option(PLAN, callback=opt.here)] = None,
    skip: opt.Skip = SKIP,
    skip_prefill: Annotated[float | None, option("Another budget for prompts.")] = None,
    skip_decode: Annotated[float | None, option("Another budget for generated tokens.")] = None,
    skip_verify: Annotated[float | None, option("Another budget for drafts that are verified.")] = None,
    text: Annotated[Path | None, option(TEXT)] = None,
    workload: opt.WorkloadName = None,
    restore: Annotated[bool | None, option(RESTORE)] = None,
    track: Annotated[bool, option("Thresholds move by themselves to keep the budget.")] = False,
    skip_max: Annotated[float | None, option("How far the budget may rise under load.")] = None,
    target_tpot: Annotated[float | None, option("Milliseconds a token may take before it rises.")] = None,
    trace: Annotated[Path | None, option(TRACE)] = None,
    trace_tokens: Annotated[int | None, option("How many tokens to trace; then it ends.", min=1)] = None,
    kernels: Annotated[str, option("Our kernels: auto, on, off or a largest number of tokens.")] = "auto",
    allow_other_weights: opt.AllowOtherWeights = False,
    quiet: opt.Quiet = False,
    dry_run: Annotated[bool, option(DRY_RUN)] = False,
) -> None:
    """Serve a model with vLLM. MODEL comes first; flags that are not listed here go to vLLM as they are."""
    from ..budget import Budget
    from ..engines.vllm.settings import Settings, file_hash

    if not dry_run and not _installed():
        raise IntegrationError("vLLM is not installed. Install it with `pip install ace-moe[vllm]`.")
    phases = {"prefill": skip_prefill, "decode": skip_decode, "verify": skip_verify}
    named = {phase: own for phase, own in phases.items() if own is not None}
    budget = Budget.parse({"prefill": skip, "decode": skip, **named})
    given = {
        "skip": budget.to_json(), **deciding.given, "workload": workload,
        "kernels": parse_kernels(kernels), "allow_other_weights": allow_other_weights or None,
        "restore": restore, "track": track or None, "skip_max": skip_max, "target_tpot": target_tpot,
        "trace": trace and traced(trace, plan, text), "trace_tokens": trace_tokens,
    }  # fmt: skip
    config = {k: v for k, v in given.items() if v is not None}
    refuse_flags(context.args)
    if trace is None and trace_tokens is not None:
        raise OptionError("--trace-tokens says how long a trace becomes: give --trace FILE with it.")
    warn_of_loss(budget if restore is False else (), quiet)
    path, mapped_on = _mapped(model, plan, Settings.from_dict(config), text)
    config |= {"plan": str(path)} | ({"workload": mapped_on} if mapped_on else {})
    config |= {} if dry_run else {"plan_sha256": file_hash(path)}  # a command that is kept takes the plan as it is then
    check(model, Settings.from_dict(config))
    command = server_command(model, config, place_experts(model, context.args))
    if dry_run:
        return print(shlex.join(command))
    os.execv(command[0], command)


def _mapped(model: str, plan: Path | None, settings: Any, text: Path | None) -> tuple[Path, str | None]:
    """The plan file with thresholds for what may be asked of the server, and the text whose thresholds to take."""
    from ..checkpoint.loading import load_model
    from .mapped import mapped_plan

    budgets = [value for budget in settings.budgets for value in budget.values]
    if settings.track and text is None:
        budgets = []  # thresholds that move find the budget themselves
    other, workload = settings.allow_other_weights, settings.workload
    how = {"load": load_model, "text": text, "workload": workload, "allow_other_weights": other}
    return mapped_plan(model, plan, settings.chosen, budgets, **how)


def traced(trace: Path, *inputs: Path | None) -> str:
    """Where a trace goes, whatever folder the server's processes run in."""
    check_output(trace, "trace", *inputs)
    return str(trace.expanduser().absolute())


def parse_kernels(value: str) -> bool | int | str:
    names: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}
    if value in names:
        return names[value]
    if value.isascii() and value.isdigit():
        return int(value)
    raise OptionError(f"--kernels is auto, on, off or the largest number of tokens, not {value!r}.")


def refuse_flags(flags: list[str]) -> None:
    """What the server would refuse minutes later, said at once."""
    from ..engines.vllm.settings import REFUSED

    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")  # vLLM takes both spellings
        if name in REFUSED:
            raise OptionError(f"ACE does not work with {name}: {REFUSED[name]}. Serve without one of the two.")


def place_experts(model: str, flags: list[str]) -> list[str]:
    """Where a part of the model is to be in host memory: its experts."""
    from ..checkpoint.model import load_config, resolve
    from ..engines.vllm.offload import offload_flags

    flags, said = offload_flags(flags, load_config(resolve(model)))
    if said:
        note(said)
    return flags


def check(model: str, settings: Any) -> None:
    """Everything that can be known before vLLM starts: plan, budget, policy, and that the plan is this model's."""
    from ..engines.vllm.settings import check_content

    plan, policy = settings.open(model)
    settings.check_budgets(plan, policy)
    check_content(plan, model, settings.allow_other_weights)
    warn_of_head(model)


def warn_of_head(model: str) -> None:
    """A head that no file has would be left as it is made, and every token would be as likely as any other."""
    from ..checkpoint import MoEModel

    missing = MoEModel.open(model).missing_head
    if missing is not None:
        note(
            f"{model} has no tensor for {missing}, and config.json does not tie it to the embeddings: a server would answer "
            "with the same probability everywhere. Set tie_word_embeddings, or download the checkpoint again."
        )


def server_command(model: str, config: dict[str, Any], flags: list[str]) -> list[str]:
    """vLLM's own server with our configuration, control routes and workers' RPCs."""
    from ..engines.vllm import KEY, MIDDLEWARE, WORKER

    flags, additional = take_additional(flags)
    ours = ["--additional-config", json.dumps({**additional, KEY: config}), "--middleware", MIDDLEWARE]
    if not any(flag.split("=")[0].replace("_", "-") == "--worker-extension-cls" for flag in flags):
        ours += ["--worker-extension-cls", WORKER]
    return [*server(model), *ours, *flags]


def server(model: str) -> list[str]:
    """`vllm serve` asks for a distribution named vllm, which CPU builds under another name do not have."""
    from importlib import metadata

    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        if _installed():
            return [sys.executable, "-m", "ace_moe.engines.vllm", "serve", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


def _installed() -> bool:
    from importlib.util import find_spec

    return find_spec("vllm") is not None


def take_additional(flags: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The user's own --additional-config out of the flags, so that ours joins it instead of replacing it."""
    rest: list[str] = []
    found: Any = {}
    values = iter(flags)
    for flag in values:
        name, _, value = flag.partition("=")
        if name.replace("_", "-") != "--additional-config":  # vLLM takes both spellings
            rest.append(flag)
            continue
        try:
            found = json.loads(value or next(values, ""))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise OptionError("--additional-config takes a JSON object.")
    return rest, found
