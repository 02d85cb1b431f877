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
from torch import nn
from transformers import PreTrainedModel

from ..errors import IntegrationError, brief
from .static import Attended, StepCache, View, check

Options = dict[str, Any]
SHARED = "shared_kv_states"  # a dictionary some layers write for others; none reads it in what `check` lets through
NUMBERS = ("layer_idx", "key")  # what tells a layer from its neighbours and decides nothing


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Find the list of decoder layers."""
    decoder = model.get_decoder() or model
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise IntegrationError(
            f"{type(model).__name__} has no plain list of layers; decode it with `generate` instead."
        )
    return lists[0]


def build_of(layer: nn.Module) -> tuple[Any, ...]:
    """Describe the code a layer runs: its modules' types, shapes and settings, but for its number."""
    modules = []
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}
        settings = {k: v for k, v in plain.items() if k not in NUMBERS}
        shapes = [(n, p.shape, p.dtype) for n, p in module.named_parameters(recurse=False)]
        modules.append((name, type(module), tuple(sorted(settings.items(), key=str)), tuple(shapes)))
    return tuple(modules)


def _call(layer: nn.Module, args: tuple[Any, ...], options: Options) -> Any:
    if SHARED in options:
        options = {**options, SHARED: {}}
    return type(layer).forward(layer, *args, **options)


def _compiled(number: int, options: Options) -> Callable[..., Any]:
    """Compile a call with code of its own: guards on modules are dropped, so two builds may not share a code object."""
    code = _call.__code__.replace(co_name=f"layer_build_{number}")
    function = FunctionType(code, _call.__globals__, code.co_name)
    drop = torch.compiler.skip_guard_on_all_nn_modules_unsafe
    return torch.compile(function, fullgraph=True, options={**options, "guard_filter_fn": drop})


@contextmanager
def compiled_layers(
    model: PreTrainedModel, cache: StepCache | None = None, compiled: bool = True, **options: Any
) -> Iterator[None]:
    """Compile each layer's forward for a while, if that is asked, and with a `cache` let it remember in its own part of that."""
    check(model)
    layers, calls = decoder_layers(model), dict[tuple[Any, ...], Callable[..., Any]]()
    around = _around(model, layers) if compiled else []
    try:
        for number, layer in enumerate(layers):
            view = None if cache is None else cache.layers[number]
            call = _call
            if compiled:
                build = build_of(layer), None if view is None else view.build()
                call = calls.setdefault(build, _compiled(number, options))
            layer.forward = _forward(layer, call, cache, view)
        for module in around:
            module.forward = torch.compile(module.forward, fullgraph=True, options=options)
        yield
    finally:
        for module in (*layers, *around):
            vars(module).pop("forward", None)


@contextmanager
def recording(model: PreTrainedModel) -> Iterator[None]:
    """Raise an error of ours for what a compiler or a CUDA graph has against a model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
        raise IntegrationError(
            f"{type(model).__name__} could not be recorded as one graph ({brief(error)}); run it with `generate`, or with "
            "Decoder(…, captured=False)."
        ) from error


def _around(model: PreTrainedModel, layers: nn.ModuleList) -> list[nn.Module]:
    """List the small modules beside the layers: the last norm, the rotary angles."""
    parent = next(m for m in model.modules() if any(child is layers for child in m.children()))
    return [m for m in parent.children() if not list(m.children()) and not isinstance(m, nn.Embedding)]


def _forward(layer: nn.Module, call: Callable[..., Any], cache: StepCache | None, view: View) -> Callable[..., Any]:
    def forward(*args: Any, **options: Any) -> Any:
        options = {name: None if name == SHARED else value for name, value in options.items()}
        if cache is not None:
            args, options = _own(layer, args, options, cache, view)
        return call(layer, args, options)

    return forward


def _own(
    layer: nn.Module, args: tuple[Any, ...], options: Options, cache: StepCache, view: View
) -> tuple[tuple[Any, ...], Options]:
    """Put the layer's own view in place of the cache, and its own mask in place of the longest, under whatever name."""
    windowed = isinstance(view, Attended) and view.room < cache.length
    if windowed and not any(x is cache.mask for x in (*args, *options.values())):
        raise IntegrationError(
            f"{type(layer).__name__} attends to a window by a mask of its own; decode this model with `generate` instead."
        )

    def own(argument: Any) -> Any:
        if argument is cache:
            return view
        return cache.masks[view.room] if isinstance(view, Attended) and argument is cache.mask else argument

    return tuple(map(own, args)), {name: own(value) for name, value in options.items()}
