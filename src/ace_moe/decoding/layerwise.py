"""A model's decoder layers compiled one by one: layers of one build share one compilation.

Compiling a 48-layer model whole takes minutes, layer by layer seconds, and the kernels are the same but for one fusion at
each border. A layer's number must not reach the compiled code, or every layer would be compiled anew, so each layer gets
its own view of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

from ..errors import IntegrationError

Options = dict[str, Any]
NUMBERS = ("layer_idx", "key")  # what tells a layer from its neighbours and decides nothing


class LayerCache:
    """One layer's keys and values [B, H, S, D] and where the next token goes, behind the part of a cache's face it needs."""

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor):
        self.keys, self.values, self.position = keys, values, position

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.position, keys)
        self.values.index_copy_(2, self.position, values)
        return self.keys, self.values


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of layers with attention, one after the other."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and hasattr(m[0], "self_attn")]
    if len(lists) != 1 or not all(hasattr(layer, "self_attn") for layer in lists[0]):
        raise IntegrationError(
            f"{type(model).__name__} has layers without plain attention; decode it with "
            '`generate(cache_implementation="static")` instead.'
        )
    return lists[0]


def build_of(layer: nn.Module) -> tuple[Any, ...]:
    """What code a layer runs: its modules' types, shapes and settings, but for its number."""
    modules = []
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}
        settings = {k: v for k, v in plain.items() if k not in NUMBERS}
        shapes = [(n, p.shape, p.dtype) for n, p in module.named_parameters(recurse=False)]
        modules.append((name, type(module), tuple(sorted(settings.items(), key=str)), tuple(shapes)))
    return tuple(modules)


def _call(layer: nn.Module, hidden: Tensor, options: Options) -> Any:
    return type(layer).forward(layer, hidden, **options)


def _compiled(number: int, options: Options) -> Callable[..., Any]:
    """A compiled call with code of its own: guards on modules are dropped, so two builds may not share a code object."""
    code = _call.__code__.replace(co_name=f"layer_build_{number}")
    function = FunctionType(code, _call.__globals__, code.co_name)
    drop = torch.compiler.skip_guard_on_all_nn_modules_unsafe
    return torch.compile(function, fullgraph=True, options={**options, "guard_filter_fn": drop})


@contextmanager
def compiled_layers(model: PreTrainedModel, cache: StaticCache | None = None, **options: Any) -> Iterator[None]:
    """Within, each layer's forward is compiled, and with a `cache` (filled by a prompt) writes where its length says."""
    layers, calls = decoder_layers(model), dict[tuple[Any, ...], Callable[..., Any]]()
    around = _around(model, layers)
    try:
        for number, layer in enumerate(layers):
            call = calls.setdefault(build_of(layer), _compiled(number, options))
            layer.forward = _forward(layer, call, _view(cache, number))
        for module in around:
            module.forward = torch.compile(module.forward, fullgraph=True, options=options)
        yield
    finally:
        for module in (*layers, *around):
            vars(module).pop("forward", None)


def _around(model: PreTrainedModel, layers: nn.ModuleList) -> list[nn.Module]:
    """The small modules beside the layers: the last norm, the rotary angles."""
    parent = next(m for m in model.modules() if any(child is layers for child in m.children()))
    return [m for m in parent.children() if not list(m.children()) and not isinstance(m, nn.Embedding)]


def _forward(layer: nn.Module, call: Callable[..., Any], view: LayerCache | None) -> Callable[..., Any]:
    def forward(hidden: Tensor, **options: Any) -> Any:
        if view is not None:
            options["past_key_values"] = view
        return call(layer, hidden, options)

    return forward


def _view(cache: StaticCache | None, number: int) -> LayerCache | None:
    if cache is None:
        return None
    layer, length = cache.layers[number], cache.layers[0].cumulative_length
    if layer.is_sliding:
        raise IntegrationError(
            'This model attends to a window; decode it with `generate(cache_implementation="static")` instead.'
        )
    return LayerCache(layer.keys, layer.values, length.view(1))
