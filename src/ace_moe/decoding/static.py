"""What decode steps remember, in memory that stays where it is: a CUDA graph finds it again.

Attention layers keep the keys and values of the last tokens they can see, a token's place being its position modulo their
number: all tokens, or those of a window. Linear attention and convolution layers keep a state, which a step overwrites.
A prompt is run on transformers' own cache and copied in.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ..errors import IntegrationError, OptionError


class Attended:
    """One layer's keys and values [B, H, R, D] behind the part of a cache's face it needs; the next token goes to `place`."""

    def __init__(self, keys: Tensor, values: Tensor, room: int, place: Tensor):
        self.keys, self.values = (x.new_zeros(*x.shape[:2], room, x.shape[3]) for x in (keys, values))
        self.place = place

    @property
    def room(self) -> int:
        return self.keys.shape[2]

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.place, keys)
        self.values.index_copy_(2, self.place, values)
        return self.keys, self.values

    def fill(self, layer: Any, tokens: int) -> None:
        """Copy from a prompt's cache, which may have let go of what lies before the window."""
        held = layer.keys.shape[2]
        places = torch.arange(tokens - held, tokens, device=self.keys.device) % self.room
        self.keys.index_copy_(2, places, layer.keys)
        self.values.index_copy_(2, places, layer.values)

    def build(self) -> tuple[Any, ...]:
        return self.keys.shape, self.values.shape


class Recurrent(Cache):
    """One layer's states, as transformers updates them in place. A layer asks for itself by number: all are it."""

    def __init__(self, layer: Any, layers: int):
        self.state = copy.copy(layer)
        self.state.conv_states = _clones(layer.conv_states)
        self.state.recurrent_states = _clones(layer.recurrent_states)
        super().__init__(layers=[self.state] * layers)

    def fill(self, layer: Any, tokens: int) -> None:
        for name in ("conv_states", "recurrent_states"):
            for number, state in getattr(layer, name).items():
                if state is not None:
                    getattr(self.state, name)[number].copy_(state)

    def build(self) -> tuple[Any, ...]:
        states = (*self.state.conv_states.values(), *self.state.recurrent_states.values())
        return tuple(None if x is None else x.shape for x in states)


def _clones(states: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
    """Copy states: transformers marks its own tensors as static, and a compiler would then make code for each of them."""
    return {number: None if x is None else x.clone() for number, x in states.items()}


View = Attended | Recurrent | None


class StepCache:
    """The memory of all layers for `length` tokens, made from what a first prompt left in `prompt`."""

    def __init__(self, prompt: DynamicCache, length: int, device: torch.device):
        self.length = length
        self.written = torch.zeros(1, dtype=torch.long, device=device)  # tokens that are in it
        self.places: dict[int, Tensor] = {}  # by the number of places: where the next token goes, [1]
        self.masks: dict[int, Tensor] = {}  # likewise: what a step sees of them, [B, 1, 1, R]
        self.layers: list[View] = [self._view(layer, len(prompt.layers)) for layer in prompt.layers]
        self.prompt: DynamicCache | None = None
        self.filled = 0

    def _view(self, layer: Any, layers: int) -> View:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            room = min(self.length, getattr(layer, "sliding_window", self.length))
            place = self.places.setdefault(room, torch.zeros_like(self.written))
            return Attended(layer.keys, layer.values, room, place)
        if type(layer) is LinearAttentionLayer:
            used = any(x is not None for x in (*layer.conv_states.values(), *layer.recurrent_states.values()))
            return Recurrent(layer, layers) if used else None
        if type(layer).__name__ == "DummyLayer":  # from transformers 5.23 on: what has nothing to remember
            return None
        raise IntegrationError(
            f"A decode step in one graph has no memory for {type(layer).__name__}; decode this model with `generate`."
        )

    @property
    def forgets(self) -> bool:
        """True if a step overwrites what cannot be computed back: a state, or the oldest token of a window."""
        return any(isinstance(v, Recurrent) or (v is not None and v.room < self.length) for v in self.layers)

    def fill(self, prompt: DynamicCache, tokens: int) -> None:
        """Take over the prompt's memory, and hold on to it where a rewind will need it again."""
        self.prompt, self.filled = prompt if self.forgets else None, tokens
        for view, layer in zip(self.layers, prompt.layers, strict=True):
            if view is not None:
                view.fill(layer, tokens)
        self.written.fill_(tokens)

    def rewind(self, length: int) -> None:
        """Forget what came after the first `length` tokens."""
        if self.prompt is not None:
            if length != self.filled:
                raise OptionError(
                    f"This model's layers keep a state or a window, which can be rewound to the prompt's {self.filled} tokens "
                    f"alone, not to {length}. Run another prompt."
                )
            return self.fill(self.prompt, length)
        self.written.fill_(length)

    def begin(self, batch: int, dtype: torch.dtype = torch.bool) -> None:
        """Say where a step's token goes, and what it sees: masks are true, or of another type 0, where a token is seen."""
        for room in {self.length, *self.places}:
            mask = torch.arange(room, device=self.written.device) <= self.written
            if dtype != torch.bool:
                mask = torch.zeros(room, device=mask.device, dtype=dtype).masked_fill(~mask, -torch.inf)
            self.masks[room] = mask.expand(batch, 1, 1, -1)
        for room, place in self.places.items():
            place.copy_(self.written % room)

    @property
    def mask(self) -> Tensor:
        """The mask of all tokens, which a model is given. Layers that see fewer get their own in its place."""
        return self.masks[self.length]

    # ---- what a model may ask of a cache before its layers ---------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self.written[0]

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return True


def check(model: PreTrainedModel) -> None:
    """Refuse what is known not to work before a prompt is run."""
    config: Any = model.config.get_text_config(decoder=True)
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if chunked or getattr(config, "num_kv_shared_layers", False):
        what = "attend in chunks" if chunked else "share their keys with other layers"
        raise IntegrationError(f"Layers of {type(model).__name__} {what}; decode it with `generate` instead.")
    places = sorted({str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(places) > 1:
        raise IntegrationError(
            f"This model is spread over several places ({', '.join(places)}), and a step is one graph of one GPU; decode it with "
            "`generate` instead, or load it without a `device_map`."
        )
