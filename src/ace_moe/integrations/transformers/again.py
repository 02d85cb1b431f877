"""Decoder layers that a backward pass runs again, under gradient checkpointing, decide as they did the first time.

By then another pass may have run (two losses that are added up, an evaluation in between) and thresholds may have moved. A layer
that runs again is given what it was given before, at the same place in memory: that tells its pass. No other tensor can have
been there since, because checkpointing holds on to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...runtime import Layer

AGAIN = "_ace_again"  # on a decoder layer
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
        for block in self._blocks:
            setattr(block, AGAIN, self)
            self._handles.append(block.register_forward_pre_hook(_before, with_kwargs=True, prepend=True))
            self._handles.append(block.register_forward_hook(_after, always_call=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for block in self._blocks:
            vars(block).pop(AGAIN, None)
        self._handles, self._seen = [], {}

    # ---- a block's own pass -------------------------------------------------------------------------------------

    def before(self, block: nn.Module, given: Tensor) -> None:
        """A block of the running pass, which is remembered, or one that runs again."""
        place, layers = (id(block), given.data_ptr()), self._blocks[block]
        if self.one.running:
            self._now = self._now or Known(self.one.facts, self._current(layers[0]))
            self._seen.pop(place, None)
            self._seen[place] = self._now
            if len(self._seen) > PASSES * len(self._blocks):
                del self._seen[next(iter(self._seen))]
        elif (known := self._seen.get(place)) is not None:
            self.one.recall(known.facts)
            for layer in layers:
                layer._buffers["tau"] = known.tau.to(layer.counts.device)

    def _current(self, layer: Layer) -> Tensor:
        """τ as it is; one copy for all passes between two changes."""
        state = layer.state
        if self._tau is None or state.tracks or self._tau[0] != state.changes:
            self._tau = state.changes, layer.tau.clone()
        return self._tau[1]

    def after(self, block: nn.Module) -> None:
        for layer in self._blocks[block]:
            layer._buffers["tau"] = layer.state.on(layer.counts.device).tau


def _before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    again = getattr(block, AGAIN, None)  # a copy of an attached model has the hooks and nothing here
    given = args[0] if args else kwargs.get("hidden_states")
    if again is not None and isinstance(given, Tensor) and not torch.compiler.is_compiling():
        again.before(block, given)


def _after(block: nn.Module, *_: Any) -> None:
    again = getattr(block, AGAIN, None)
    if again is not None and not torch.compiler.is_compiling():
        again.after(block)
