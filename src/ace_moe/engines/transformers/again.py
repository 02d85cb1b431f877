"""Decoder layers that a backward pass runs again, under gradient checkpointing, decide as they did the first time.

By then another pass may have run (two losses that are added up, an evaluation in between) and thresholds may have moved. A layer
that runs again is given what it was given before, at the same place in memory: that tells its pass. No other tensor can have
been there since, because checkpointing holds on to it. From transformers 5.23 on a layer's own hooks stay outside of what runs
again, so its first module is watched too, which is given the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...decider import Decider as Layer

AGAIN = "_ace_again"  # on a decoder layer and what is watched in it
PASSES = 16  # that are remembered: those whose backward pass is to come


class Running(Protocol):
    """A stack's pass, as far as this file needs to know it."""

    @property
    def running(self) -> bool: ...

    @property
    def facts(self) -> tuple[Any, ...]: ...

    def recall(self, facts: tuple[Any, ...]) -> None: ...


class Known(NamedTuple):
    """What a layer needs to know of a pass."""

    facts: tuple[Any, ...]
    tau: Tensor


class Again:
    """The decoder layers of one stack, watched from its first training pass on."""

    def __init__(self, one: Running):
        self.one = one
        self._blocks = WeakKeyDictionary[nn.Module, list[Layer]]()
        self._inside = WeakKeyDictionary[nn.Module, ref[nn.Module]]()  # a watched module's block
        self._first = WeakKeyDictionary[nn.Module, ref[nn.Module]]()  # a block's first module
        self._handles: list[RemovableHandle] = []
        self._seen: dict[tuple[int, int], Known] = {}  # by block and place in memory, oldest first
        self._now: Known | None = None
        self._tau: tuple[int, Tensor] | None = None  # as it was at a change of the state

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of an attached model is a model without a plan."""

    def add(self, block: nn.Module, layer: Layer) -> None:
        self._blocks.setdefault(block, []).append(layer)

    def begin(self, module: nn.Module) -> None:
        """Before each pass: without training there is nothing to remember, and no hook."""
        self._now = None
        if self._handles or not (module.training and torch.is_grad_enabled()):
            return
        for block, layers in self._blocks.items():
            for part in (block, *block.children()):
                self._watch(part, block).append(part.register_forward_pre_hook(_before, with_kwargs=True, prepend=True))
            for owner in filter(None, (layer.owner() for layer in layers)):
                self._watch(owner, block).append(owner.register_forward_hook(_after, always_call=True))

    def _watch(self, part: nn.Module, block: nn.Module) -> list[RemovableHandle]:
        self._inside[part] = ref(block)
        setattr(part, AGAIN, self)
        return self._handles

    def _block(self, part: nn.Module) -> nn.Module:
        block = self._inside[part]()
        assert block is not None  # it runs
        return block

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for part in self._inside:
            vars(part).pop(AGAIN, None)
        self._handles, self._seen = [], {}

    # ---- a block's own pass -------------------------------------------------------------------------------------

    def before(self, part: nn.Module, given: Tensor) -> None:
        """A block of the running pass, which is remembered, or one that runs again."""
        block = self._block(part)
        place, first = (id(block), given.data_ptr()), self._first.get(block)
        if self.one.running:
            return self._remember(part, block, place)
        known = self._seen.get(place) if part is block or (first is not None and first() is part) else None
        if known is not None:
            self.one.recall(known.facts)
            for layer in self._blocks[block]:
                layer._buffers["tau"] = known.tau.to(layer.counts.device)

    def _remember(self, part: nn.Module, block: nn.Module, place: tuple[int, int]) -> None:
        if part is not block:
            self._first.setdefault(block, ref(part))
            return
        self._now = self._now or Known(self.one.facts, self._current(self._blocks[block][0]))
        self._seen.pop(place, None)
        self._seen[place] = self._now
        if len(self._seen) > PASSES * len(self._blocks):
            del self._seen[next(iter(self._seen))]

    def _current(self, layer: Layer) -> Tensor:
        """τ as it is; one copy for all passes between two changes."""
        state = layer.state
        if self._tau is None or state.tracks or self._tau[0] != state.changes:
            self._tau = state.changes, layer.tau.clone()
        return self._tau[1]

    def after(self, part: nn.Module) -> None:
        """Behind a block's experts: τ is what it is."""
        for layer in self._blocks[self._block(part)]:
            layer._buffers["tau"] = layer.state.on(layer.counts.device).tau


def _before(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    again = getattr(part, AGAIN, None)  # a copy of an attached model has the hooks and nothing here
    given = args[0] if args else kwargs.get("hidden_states")
    if again is not None and isinstance(given, Tensor) and not torch.compiler.is_compiling():
        again.before(part, given)


def _after(part: nn.Module, *_: Any) -> None:
    again = getattr(part, AGAIN, None)
    if again is not None and not torch.compiler.is_compiling():
        again.after(part)
