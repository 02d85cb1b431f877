"""Finds the MoE layers of a model by running it, not by reading names.

A hollow twin of the model (every weight is one shared zero) runs one short text pass. Hooks see which module
produced the experts' input (the norm), which produced their ids (the router), and whether router and experts see
the same tensor. Experts themselves are replaced by a recorder, so models of any size fit.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import AceError, CheckpointError, StructureError, brief


@dataclass(frozen=True)
class Site:
    """One MoE layer as a text pass found it. Modules hold no weights: they are read for their code alone.

    `router_input` tells how the router's input relates to the experts' input: "same" tensor, the "residual" in
    front of the norm that feeds the experts, or "other".
    """

    key: str
    path: str
    experts: nn.Module
    num_experts: int
    top_k: int
    norm_path: str | None
    norm: nn.Module | None
    router_path: str | None
    router: nn.Module | None
    router_input: str

    def parameter_names(self) -> dict[str, str]:
        """Full parameter name → role-prefixed short name, for everything the tables read."""
        names = {f"{self.path}.{n}": f"experts.{n}" for n, _ in self.experts.named_parameters()}
        for path, module, role in ((self.norm_path, self.norm, "norm"), (self.router_path, self.router, "router")):
            if module is not None:
                names |= {f"{path}.{n}": f"{role}.{n}" for n, _ in module.named_parameters()}
        return names

    def stacks(self) -> list[str]:
        """Full names of the experts' matrices [E, a, b]."""
        return [f"{self.path}.{n}" for n, p in self.experts.named_parameters() if p.dim() == 3]

    def describe(self) -> dict[str, Any]:
        """Describe this layer for a fingerprint: experts, k, d, m, router kind."""
        w_out = getattr(self.experts, "down_proj", None)
        shape = tuple(w_out.shape) if isinstance(w_out, Tensor) and is_registered(self.experts) else ()
        hidden, middle = shape[1:] if len(shape) == 3 else (0, 0)
        if shape and self.experts.is_transposed:
            hidden, middle = middle, hidden
        shapes = [] if self.router is None else [tuple(p.shape) for _, p in sorted(self.router.named_parameters())]
        return {
            "experts": self.num_experts,
            "top_k": self.top_k,
            "hidden": hidden,
            "intermediate": middle,
            "router": f"{self.router_input}:{','.join('x'.join(map(str, shape)) for shape in shapes)}",
        }


def is_registered(module: nn.Module) -> bool:
    """True if transformers' experts registry serves this module (its decorator leaves these marks)."""
    return all(hasattr(module, mark) for mark in ("has_gate", "is_transposed", "num_experts", "config"))


def takes_routing(module: nn.Module) -> bool:
    """True if the module is called as experts(hidden [T, d], ids [T, k], gates [T, k])."""
    if not isinstance(getattr(module, "num_experts", None), int):
        return False
    names = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:4]
    return len(names) == 3 and names[0] == "hidden_states" and names[1] in ("top_k_index", "router_indices")


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every (path, experts module) of a model, in order."""
    for path, module in model.named_modules():
        if is_registered(module) or takes_routing(module):
            yield path, module


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class the checkpoint names; without one, the causal language model of its type."""
    homes = [transformers]
    with suppress(ImportError):
        homes.append(import_module(type(config).__module__.replace(".configuration_", ".modeling_")))
    for name in config.architectures or ():
        for home in homes:
            if hasattr(home, name):
                return getattr(home, name)
    try:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise StructureError(
            f"transformers {transformers.__version__} has no class for {config.architectures or config.model_type!r}. "
            "Install a release that knows this architecture; code from the checkpoint itself is not run."
        ) from None


def hollow_twin(config: PretrainedConfig, cls: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """A model of this configuration whose tensors have shapes and code that runs, but take no memory.

    Real zeros of stride 0, not meta tensors: some attention code branches on values, which meta tensors refuse.
    """
    try:
        with torch.device("meta"):
            model = (cls or model_class(config))(config).eval()
    except AceError:
        raise
    except Exception as error:  # any modelling code may run here
        raise CheckpointError(
            f"{config._name_or_path}/config.json describes a model that cannot be built ({type(error).__name__}: "
            f"{brief(error)}). It was edited or is damaged; download it again."
        ) from error
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_hollow(parameter), requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else _hollow(buffer)
    return model


def _hollow(tensor: Tensor) -> Tensor:
    """Make a tensor of this shape that takes no memory. Floating ones all have one type: heads kept in another would not fit."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.zeros((), dtype=dtype).expand(tensor.shape)


@dataclass
class _Trace:
    """Storages seen during the pass. Views share a storage, so a reshape does not hide where a tensor came from."""

    produced: dict[int, list[str]] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)
    calls: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)  # a freed storage could be reused under the same number

    def storage(self, tensor: Tensor) -> int:
        """Number a tensor's storage, and keep it."""
        self.alive.append(tensor)
        return tensor.untyped_storage()._cdata

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if tensors:
            self.entered.setdefault(path, self.storage(tensors[0]))

    def leave(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor):
                self.produced.setdefault(self.storage(tensor), []).append(path)

    def record(self, path: str, hidden: Tensor, ids: Tensor, gates: Tensor, *rest: Any) -> Tensor:
        """Stand in for the experts."""
        self.calls.setdefault(path, (hidden, ids))
        return torch.empty_like(hidden)


def find_sites(twin: PreTrainedModel) -> tuple[list[Site], list[str]]:
    """All MoE layers a text pass reaches, in order, and the paths of experts it never reaches.

    A layer goes by its decoder layer's number, or by its whole path where two experts modules would share a number.
    """
    experts = dict(experts_modules(twin))
    if not experts:
        raise StructureError(
            f"{type(twin).__name__} has no routed experts that transformers calls with (hidden, ids, gates). "
            "ACE skips routed experts of Mixture-of-Experts models; a dense model has nothing to skip."
        )
    trace = _text_pass(twin, experts)
    numbers = [re.search(r"(?:^|\.)(\d+)\.", path) for path in trace.calls]
    keys = [str(int(n.group(1))) if n else path for n, path in zip(numbers, trace.calls, strict=True)]
    sites = [
        _site(twin, key if keys.count(key) == 1 else path, path, experts[path], trace)
        for key, path in zip(keys, trace.calls, strict=True)
    ]
    return sites, [path for path in experts if path not in trace.calls]


def _text_pass(twin: PreTrainedModel, experts: dict[str, nn.Module]) -> _Trace:
    """Run two tokens of text, with a recorder in place of the experts, and note who makes and takes which tensor."""
    trace = _Trace()
    ids = torch.ones(1, 2, dtype=torch.long)
    inputs = {"input_ids": ids}
    if getattr(twin.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for path, module in twin.named_modules():
            stack.enter_context(module.register_forward_pre_hook(partial(trace.enter, path), with_kwargs=True))
            stack.enter_context(module.register_forward_hook(partial(trace.leave, path)))
        for path, module in experts.items():
            module.forward = partial(trace.record, path)
            stack.callback(delattr, module, "forward")
        try:
            twin(**inputs, use_cache=False)
        except Exception as error:  # any modelling code may run here
            raise StructureError(
                f"{type(twin).__name__} could not be traced with a text input ({type(error).__name__}: {brief(error)}). "
                "Please report the model; its structure cannot be read."
            ) from error
    return trace


def _site(model: nn.Module, key: str, path: str, experts: nn.Module, trace: _Trace) -> Site:
    """Build a site from what the pass noted of it."""
    hidden, ids = trace.calls[path]
    source = trace.storage(hidden)
    norm_path = next(iter(trace.produced.get(source, ())), None)
    router_path = _router_path(model, path, experts, trace)
    router_source = None if router_path is None else trace.entered.get(router_path)
    in_front = norm_path is not None and router_source == trace.entered.get(norm_path)
    return Site(
        key=key,
        path=path,
        experts=experts,
        num_experts=int(experts.num_experts),  # type: ignore[arg-type]
        top_k=int(ids.shape[-1]),
        norm_path=norm_path,
        norm=None if norm_path is None else model.get_submodule(norm_path),
        router_path=router_path,
        router=None if router_path is None else model.get_submodule(router_path),
        router_input="same" if router_source == source else "residual" if in_front else "other",
    )


def _router_path(model: nn.Module, path: str, experts: nn.Module, trace: _Trace) -> str | None:
    """Find the module that gave the ids; else the one linear layer from the experts' input to one number per expert."""
    hidden, ids = trace.calls[path]
    makers = trace.produced.get(trace.storage(ids))
    if makers:
        return makers[0]
    block, source = path.rpartition(".")[0], trace.storage(hidden)
    linear = [
        name
        for name, module in model.named_modules()
        if name.startswith(block + ".")
        and isinstance(module, nn.Linear)
        and module.out_features == experts.num_experts
        and trace.entered.get(name) == source
    ]
    return linear[0] if len(linear) == 1 else None
