"""Text from a skipped model: run, and chat."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import AceError, BudgetError
from . import options as opt
from . import show
from .app import command
from .common import SKIP, warn_of_loss
from .groups import Deciding, Loading
from .options import option, plan_option
from .terminal import err, note, out, print_json, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..ace import ACE
    from ..writing import Message

PLAN = "The plan: a file, or owner/name. Default: made from the checkpoint and kept, on the model's own text."
OptionalPlan = Annotated[Path | None, plan_option(PLAN)]
NewTokens = Annotated[int, option("Tokens to generate.")]
Template = Annotated[bool | None, option("Ask through the chat template. Default: if the model has one.")]
HELP = """/skip 0.4  another budget, at once
/new       forget what was said
/report    what was skipped, layer by layer
/quit      end (Ctrl-D too)"""


@command(
    epilog='Example: ace run Qwen/Qwen3-30B-A3B --plan qwen3.safetensors --skip 0.3 --beside --prompt "Once upon a time"'
)
def run(
    model: opt.Model,
    prompt: Annotated[str, option("What the model continues or answers.")],
    deciding: Deciding,
    loading: Loading,
    plan: OptionalPlan = None,
    skip: opt.Skip = SKIP,
    beside: Annotated[bool, option("Show the unskipped model's text beside it.", "--beside")] = False,
    workload: opt.WorkloadName = None,
    max_new_tokens: NewTokens = 64,
    chat: Template = None,
    quiet: opt.Quiet = False,
    allow_other_weights: opt.AllowOtherWeights = False,
    as_json: opt.AsJson = False,
) -> None:
    """Generate text with a budget, as it comes, and show the realised ratio; or both texts, side by side."""
    from ..writing import as_text, check_prompt, has_template, tokens_of, write, write_pair
    from .show_written import print_pair

    check_prompt(prompt, max_new_tokens)
    warn_of_loss([skip], quiet)
    ace, tokenizer, loaded = _open(model, plan, skip, workload, allow_other_weights, deciding, loading)
    template = has_template(tokenizer) if chat is None else chat
    text = as_text(tokenizer, [{"role": "user", "content": prompt}], template)
    ids = tokens_of(loaded, tokenizer, text, template)
    if beside:
        found = write_pair(loaded, tokenizer, ids, ace, max_new_tokens, skip)
        return print_json({"prompt": prompt, **found.to_json()}) if as_json else print_pair(out, found, prompt)
    with ace(loaded), _streamed(prompt, as_json) as piece:
        written = write(loaded, tokenizer, ids, max_new_tokens, piece)
    report = ace.report()
    if as_json:
        return print_json({"prompt": prompt, **written.to_json(), "requested": skip, **report})
    phases = f"prefill {report['prefill']['realised']:.1%}, decode {report['decode']['realised']:.1%}"
    said = f"requested {skip:.1%}, realised {report['realised']:.1%} ({phases})"
    say(f"{said}; {written.tokens} tokens, {written.speed:.1f} a second", err)


def _open(
    model: str, plan: Path | None, skip: float, workload: str | None, other: bool, deciding: Deciding, loading: Loading
) -> tuple[ACE, Any, PreTrainedModel]:
    """(ACE, tokenizer, model) with the plan that was given, or the one that is kept for this model."""
    from ..ace import ACE
    from ..checkpoint.loading import load_tokenizer
    from ..policies import policy_for
    from .mapped import mapped_plan

    load = cache(loading.load)
    if plan is None:
        policy_of = partial(policy_for, workload=workload, **deciding.given)
        plan, workload = mapped_plan(model, None, policy_of, [skip], load=load, workload=workload)
    ace = ACE.load(plan, skip, workload=workload, allow_other_weights=other, **deciding.given)
    return ace, load_tokenizer(model), load(model)


@contextmanager
def _streamed(prompt: str, as_json: bool) -> Iterator[Any]:
    """Pieces go to stdout as they come, so that they can be piped; the prompt in front is for people alone."""
    if as_json:
        yield lambda piece: None
        return
    err.print(prompt, style="dim", end="" if out.is_terminal else "\n", markup=False, highlight=False)
    yield _piece
    out.print()


def _piece(text: str) -> None:
    out.print(text, end="", markup=False, highlight=False, soft_wrap=True)


# ---- chat ---------------------------------------------------------------------------------------------------------


@command(epilog="Example: ace chat Qwen/Qwen3-30B-A3B --plan qwen3.safetensors --skip 0.3")
def chat(
    model: opt.Model,
    deciding: Deciding,
    loading: Loading,
    plan: OptionalPlan = None,
    skip: opt.Skip = SKIP,
    workload: opt.WorkloadName = None,
    max_new_tokens: NewTokens = 256,
    template: Annotated[
        bool | None, option("Use the chat template. Default: if there is one.", "--chat/--no-chat")
    ] = None,
    allow_other_weights: opt.AllowOtherWeights = False,
) -> None:
    """Talk to a model and change the budget while you do: /skip 0.4."""
    from ..writing import check_prompt, has_template

    check_prompt("-", max_new_tokens)
    ace, tokenizer, loaded = _open(model, plan, skip, workload, allow_other_weights, deciding, loading)
    uses = has_template(tokenizer) if template is None else template
    say(f"{opt.as_typed(model)}, {skip:.0%} of slots skipped. /help lists what else can be said.", err)
    with ace(loaded):
        Talk(ace, loaded, tokenizer, max_new_tokens, uses).listen()


class Talk:
    """What was said so far, and a line at a time."""

    def __init__(self, ace: ACE, model: PreTrainedModel, tokenizer: Any, max_new_tokens: int, template: bool):
        self.ace, self.model, self.tokenizer = ace, model, tokenizer
        self.max_new_tokens, self.template = max_new_tokens, template
        self.said: list[Message] = []

    def listen(self) -> None:
        for line in _lines():
            if line == "/quit":
                return
            try:
                self.command(*line.split()) if line.startswith("/") else self.answer(line)
            except AceError as error:  # a budget that cannot be met ends nothing
                note(error)
            except KeyboardInterrupt:
                err.print("\n(stopped)")

    def command(self, name: str, *values: str) -> None:
        if name == "/skip" and len(values) == 1:
            self.ace.set_skip(_number(values[0]))
            say(f"{self.ace.skip:.0%} of slots skipped from now on", err)
        elif name == "/new":
            self.said = []
        elif name == "/report":
            err.print(show.report_table(self.ace.report()))
        else:
            err.print(HELP, markup=False, highlight=False)

    def answer(self, line: str) -> None:
        from ..writing import as_text, tokens_of, write

        asked = [*self.said, {"role": "user", "content": line}]
        ids = tokens_of(self.model, self.tokenizer, as_text(self.tokenizer, asked, self.template), self.template)
        self.ace.reset()
        written = write(self.model, self.tokenizer, ids, self.max_new_tokens, _piece)
        out.print()
        self.said = [*asked, {"role": "assistant", "content": written.text}]
        figures = f"{written.tokens} tokens, {written.speed:.1f} a second"
        say(f"{figures}; {self.ace.realised:.1%} of slots skipped", err)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BudgetError(
            f"A budget is a fraction of the routed slots, such as 0.4; {text!r} is not a number."
        ) from None


def _lines() -> Iterator[str]:
    """What is typed, or piped, until it ends; empty lines say nothing."""
    shown = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(shown).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line:
            yield line
