"""What each token of a pass is: part of a prompt, generated, drafted, or padding.

Hooks on the stack (the module that owns the decoder layers) see every pass, also one of `model.model(…)`. A token is
placed by its index in the cache against the end of the prompt, which `generate` tells; a model called by hand tells less,
and there an empty cache means a prompt and one token on a filled one a generated token. Nothing waits for the device.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...decider import Deciders
from ...decider.decider import refuse_pickling
from ...decider.rows import PADDING, PHASES, Same, row_of
from ...errors import IntegrationError

PREFILL, DECODE, VERIFY = (row_of(phase) for phase in ("prefill", "decode", "verify"))
PASS = "_ace_pass"  # on a stack
CALL = nn.Module._call_impl.__code__
PROMPTS = "ace_prompt_lengths"  # where a paged cache carries the prompt lengths of its requests


class PassContext(NamedTuple):
    """What a caller knows of the passes it makes: where its prompt ends, each sequence's first real token, or all of it."""

    prompt: Tensor | None = None  # []
    start: Tensor | None = None  # [B]
    row: int | None = None  # of every token
    budgets: Tensor | None = None  # [B], the number of each sequence's budget
    drafts: bool = False  # the model drafts for another one: what it reads was written, and is nothing it has to verify


NOTHING = PassContext()


class Pass:
    """One stack's running pass, which is one thread's: another thread that begins a pass meanwhile is refused."""

    counting = generating = True  # experts a prompt reads are counted where they were asked for

    def __init__(self, deciders: Deciders, cached: bool):
        self.deciders, self.cached = deciders, cached  # whether the stack takes a cache: an encoder does not
        self._contexts: dict[int, PassContext] = {}  # by thread: two may generate at a time
        self._latest = NOTHING  # what a compiled call reads, which does not know its thread
        self._rows: Tensor | None = None  # [T] of the running pass
        self._row: int | None = PREFILL  # the one row of all its tokens, where it is known
        self._length = 0  # tokens of each sequence
        self._kept = 0  # those of them that the last layers may get alone, because their logits are asked for
        self._same = {row: Same(row) for row in (PREFILL, DECODE, VERIFY)}
        # the thread of the running pass, by the key "thread"; of an interrupted one until the next begins
        self._running: dict[str, int] = {}

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of an attached model is a model without a plan."""

    __reduce_ex__ = refuse_pickling

    @property
    def context(self) -> PassContext:
        """What the caller in this thread knows."""
        return self._contexts.get(threading.get_ident(), NOTHING)

    def set_context(self, context: PassContext) -> None:
        self._contexts[threading.get_ident()] = self._latest = context
        if context is NOTHING:
            del self._contexts[threading.get_ident()]

    # ---- what layers ask ----------------------------------------------------------------------------------------

    def rows(self, tokens: int, device: torch.device) -> Tensor:
        """[T] int8."""
        rows = self._rows
        if rows is not None and rows.shape[0] == tokens and (rows.device == device or self._row is None):
            return rows if rows.device == device else rows.to(device)
        if rows is not None and self._kept and tokens * self._length == len(rows) * self._kept:
            return rows.view(-1, self._length)[:, -self._kept :].reshape(-1).to(device)
        if self._row is None:
            raise IntegrationError(
                f"A layer got {tokens} tokens in a pass of {0 if rows is None else rows.shape[0]} that mixes prompts, generated "
                "tokens or padding: what each of them is cannot be told. Please report the model."
            )
        return self._same[self._row].rows(tokens, device)

    # ---- hooks on the stack; a copy of an attached model has them, and no pass -----------------------------------

    @staticmethod
    def begin(stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a pass that a plan cannot follow, or say what its tokens are. `end` runs in either case.

        A model that learns is refused; one in evaluation mode runs whether torch records gradients or not.
        """
        running: Pass | None = getattr(stack, PASS, None)
        if running is None:
            return
        if getattr(stack, "_is_replica", False):
            raise IntegrationError(
                "A plan cannot work in replicas of nn.DataParallel, which share its counters. Use one process for each GPU."
            )
        names = list(inspect.signature(stack.forward).parameters) if args else []
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = (*stack.parameters(), *inputs.values()) if stack.training and torch.is_grad_enabled() else ()
        if any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
            raise IntegrationError(
                "A plan skips experts where a model runs, not where it learns: this pass of a model in training mode records "
                "gradients. Detach the plan to train (`ace.detach()`); to evaluate, call `model.eval()` or use `torch.no_grad()`."
            )
        if not torch.compiler.is_compiling():
            running._claim(stack)
        running._classify(inputs)

    @staticmethod
    def end(stack: nn.Module, *_: Any) -> None:
        """Forget a pass, also one that failed, and let thresholds move; one that was refused leaves the other thread's alone."""
        running: Pass | None = getattr(stack, PASS, None)
        if running is None:
            return
        owner = None if torch.compiler.is_compiling() else running._running.get("thread")
        if owner is not None and owner != threading.get_ident():
            return
        running._rows, running._row, running._length, running._kept = None, PREFILL, 0, 0
        running.deciders.after_step()
        if owner is not None:
            running._running.pop("thread", None)

    # ---- what tokens are ----------------------------------------------------------------------------------------

    def _claim(self, stack: nn.Module) -> None:
        """Make the pass this thread's. Ctrl-C runs no hook behind a pass, so who comes next looks whether it is over."""
        me = threading.get_ident()
        owner = self._running.setdefault("thread", me)  # in one step: two threads cannot both find nobody
        if owner != me and is_inside(stack, owner):
            raise IntegrationError(
                "Another thread is in a pass of this model, and an attached plan follows one pass at a time. Run passes one "
                "after the other (with a lock of your own), or give each thread a copy of the model and a plan on it."
            )
        self._running["thread"] = me

    def _classify(self, inputs: dict[str, Any]) -> None:
        """Say what each token is: as the caller says, by the lengths of packed sequences, or by its place in the cache."""
        self._rows, self._row = None, None
        sequences = next((x for n in ("input_ids", "inputs_embeds") if (x := inputs.get(n)) is not None), None)
        if sequences is None:
            self._row, self._length, self.deciders.padding_known = PREFILL, 0, False
            return
        self._length = sequences.shape[1]
        asked = inputs.get("logits_to_keep")
        self._kept = asked if isinstance(asked, int) and asked < self._length else 0
        context = self._latest if torch.compiler.is_compiling() else self.context
        if context.row is not None:
            self._classify_all(context.row, sequences)
        elif inputs.get("cu_seq_lens_q") is not None:
            self._length = 0
            prompts = getattr(inputs.get("cache"), PROMPTS, None)
            self._rows = packed(inputs["cu_seq_lens_q"], inputs.get("position_ids"), sequences, prompts)
        else:
            self._classify_by_place(inputs, sequences, context)
        if context.budgets is not None:
            self._divide(context.budgets, sequences)

    def _classify_by_place(self, inputs: dict[str, Any], sequences: Tensor, context: PassContext) -> None:
        """Say what tokens are by their places in the cache; of a pass made by hand, by whether the cache holds anything."""
        cache = inputs.get("past_key_values") if self.cached else None
        mask = inputs.get("attention_mask")
        mask = mask[:, -self._length :] if isinstance(mask, Tensor) and mask.dim() == 2 else None
        batch, device = sequences.shape[0], sequences.device
        if context.prompt is None or not self.cached:
            row = DECODE if cache is not None and self._length == 1 and _filled(cache) else PREFILL
            if mask is None:
                self.deciders.padding_known = False
                return self._classify_all(row, sequences)
            rows = torch.full_like(mask, row, dtype=torch.int8)
        else:
            place = torch.arange(self._length, device=device) + _cached(cache)
            verifies = cache is not None and not context.drafts
            rows = placed(place, context.prompt.to(device), verifies).expand(batch, -1)
            if mask is None and context.start is not None and batch % len(context.start) == 0:
                start = context.start.to(device).repeat_interleave(batch // len(context.start))
                rows = torch.where(place < start.unsqueeze(-1), PADDING, rows)
        if mask is not None and mask.shape == rows.shape:
            rows = torch.where(mask != 0, rows, PADDING)
        self._rows = rows.to(torch.int8).reshape(-1)

    def _classify_all(self, row: int, sequences: Tensor) -> None:
        """Put all tokens into one row: in a tensor that is there already, at one address, unless a compiler looks on."""
        self._row, tokens = row, sequences.shape[0] * sequences.shape[1]
        if torch.compiler.is_compiling():
            self._rows = torch.full((tokens,), row, dtype=torch.int8, device=sequences.device)
        else:
            self._rows = self._same[row].rows(tokens, sequences.device)

    def _divide(self, budgets: Tensor, sequences: Tensor) -> None:
        """Move each sequence's tokens into the rows of its own budget; beams of a sequence share it."""
        batch, rows = sequences.shape[0], self._rows
        if rows is None or batch % len(budgets) or not self._length:
            raise IntegrationError(
                f"Budgets were given for {len(budgets)} sequences; this pass has {batch}, or packs them into one row."
            )
        shift = budgets.to(rows.device).repeat_interleave(batch // len(budgets) * self._length) * len(PHASES)
        self._rows, self._row = torch.where(rows > PADDING, rows + shift, PADDING).to(torch.int8), None


@contextmanager
def with_context(passes: Sequence[Pass], **facts: Any) -> Iterator[None]:
    """Run passes of these stacks with facts known of them; see `PassContext`."""
    before = [one.context for one in passes]
    try:
        for one in passes:
            one.set_context(one.context._replace(**facts))
        yield
    finally:
        for one, context in zip(passes, before, strict=True):
            one.set_context(context)


def is_inside(module: nn.Module, thread: int) -> bool:
    """Look whether a thread is inside a call of this module."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is CALL and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


# ---- caches and places ----------------------------------------------------------------------------------------------


def _filled(cache: Any) -> bool:
    """Look whether a cache holds anything; a static one once it was written to, since its length is on the device."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None) or ()
    static = [layer for layer in layers if isinstance(getattr(layer, "cumulative_length", None), Tensor)]
    if static:
        return any(getattr(layer, "is_initialized", False) for layer in static)
    length = _cached(cache)
    return isinstance(length, Tensor) or length > 0


def _cached(cache: Any) -> int | Tensor:
    """Tokens in the cache: a number, or a tensor on the device where it is static."""
    if cache is None:
        return 0
    cache = getattr(cache, "self_attention_cache", cache)
    for layer in getattr(cache, "layers", None) or ():
        length = getattr(layer, "cumulative_length", None)
        if isinstance(length, Tensor) and layer.is_initialized and not getattr(layer, "is_sliding", False):
            return length
    return cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0


def placed(place: Tensor, prompt: Tensor, verifies: bool) -> Tensor:
    """Rows of tokens at these places [q] in the cache: prompt, else decode, and verify behind a pass's first token."""
    generated = torch.full_like(place, DECODE)
    if verifies and len(place) > 1:
        generated[1:] = VERIFY
    return torch.where(place < prompt, PREFILL, generated)


def packed(ends: Tensor, positions: Tensor | None, sequences: Tensor, prompts: Tensor | None) -> Tensor:
    """Rows of sequences laid one behind the other, [T]: `ends` [n + 1] are their cumulative lengths, `prompts` [≥ n] theirs.

    Without prompt lengths a sequence of one token whose position is not 0 is a generated token.
    """
    tokens = sequences.shape[0] * sequences.shape[1]
    place = torch.arange(tokens, device=sequences.device)
    ends = ends.to(sequences.device)
    sequence = torch.searchsorted(ends[1:].contiguous(), place, right=True).clamp(max=len(ends) - 2)
    position = place - ends[sequence] if positions is None else positions.reshape(-1)[:tokens]
    alone = (ends[1:] - ends[:-1])[sequence] == 1
    prefill = position < prompts[sequence] if prompts is not None else ~alone | (position == 0)
    rows = torch.where(prefill, PREFILL, DECODE)
    return torch.where(place < ends[-1], rows, PADDING).to(torch.int8)
