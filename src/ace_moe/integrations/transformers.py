"""Skipping in transformers models: an experts implementation named `ace`.

    ace = ACE.load("plan.safetensors", skip=0.5)
    with ace(model):
        model.generate(...)
    print(ace.realised)

transformers looks the implementation up at every call, and `generate()` leaves a name it does not know alone, so the
same hook serves prefill and decode. Skipped slots carry the id one past the last expert: they sort behind every group
of the grouped product and are never computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface, fp8_grouped_mm_experts_forward
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from ..checkpoint.structure import is_registered
from ..dispatch import FastPath
from ..dispatch.compact import SENTINELS, applies, compact
from ..errors import IntegrationError
from ..kernels.routing import recognise
from ..policies.calibration import router_logits
from ..skipper import DECODE, PREFILL, Skipper, Step

IMPLEMENTATION = "ace"
CHILD = "ace"  # the skipper's name on an experts module


def _implementation(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        skipper = getattr(self, CHILD, None)
        if skipper is None:
            return stock(self, hidden_states, top_k_index, top_k_weights)
        ids, gates = top_k_index, top_k_weights
        if not _routed(skipper, hidden_states.shape[0]):
            ids, gates = skipper(hidden_states, ids, gates, self.num_experts)
        if skipper.fast is not None:
            return skipper.fast.experts(self, hidden_states, ids, gates)
        if applies(hidden_states):
            return compact(stock, self, hidden_states, ids, gates, int(self.num_experts))  # type: ignore[arg-type]
        return stock(self, hidden_states, ids, gates)

    return forward


def _routed(skipper: Skipper, tokens: int) -> bool:
    """Whether the router's hook has applied the rule already."""
    return skipper.fast is not None and skipper.observer is None and skipper.fast.routes(tokens)


ExpertsInterface.register(IMPLEMENTATION, _implementation(grouped_mm_experts_forward))
FP8ExpertsInterface.register(IMPLEMENTATION, _implementation(fp8_grouped_mm_experts_forward))


class Attachment:
    """Skippers on the experts of one model, and the way back."""

    def __init__(
        self,
        model: PreTrainedModel,
        skippers: dict[str, Skipper],
        step: Step,
        routers: dict[str, str | None] | None = None,
        top_k: dict[str, int] | None = None,
    ):
        """Skippers, their routers and k, by the path of the experts module. On any error the model is left as it was."""
        self.model, self.skippers, self.step = model, skippers, step
        self.routers, self.top_k = routers or {}, top_k or {}
        self._undo: list[Callable[[], object]] = []
        try:
            self._install()
        except BaseException:
            self.remove()
            raise

    def _install(self) -> None:
        registered = []
        for path, skipper in self.skippers.items():
            module = self.model.get_submodule(path)
            if getattr(module, CHILD, None) is not None:
                raise IntegrationError("This model already has a plan attached. Detach it first: `ace.detach()`.")
            self._add_child(module, skipper)
            registered.append(is_registered(module))
            if not registered[-1]:
                self._hook_unregistered(path, module, skipper)
            if skipper.policy.needs_logits:
                self._hook_router(path, skipper)
            if skipper.fast is not None:
                self._take_over_router(path, skipper, skipper.fast)
        if any(registered):
            self._switch_implementation()
        handle = self.model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        self._undo.append(handle.remove)

    def _add_child(self, module: nn.Module, skipper: Skipper) -> None:
        device = next(module.parameters()).device
        module.add_module(CHILD, skipper.to(device))
        skipper.owner = (module,)
        self._undo.append(lambda: delattr(module, CHILD))
        if hasattr(module, SENTINELS):
            before = getattr(module, SENTINELS)
            setattr(module, SENTINELS, True)
            self._undo.append(lambda: setattr(module, SENTINELS, before))

    def _switch_implementation(self) -> None:
        model, configs = self.model, _configs(self.model)
        before = [(config, config._experts_implementation) for config in configs]

        def restore() -> None:
            for config, name in before:
                config._experts_implementation_internal = name

        self._undo.append(restore)
        model.set_experts_implementation(IMPLEMENTATION)
        silent = [
            path
            for path in self.skippers
            if is_registered(module := model.get_submodule(path))
            and module.config._experts_implementation != IMPLEMENTATION
        ]
        if silent:
            raise IntegrationError(
                f"transformers did not take the experts implementation for {silent[0]} "
                f"({type(model.get_submodule(silent[0])).__name__}); skipping would have no effect there."
            )

    def _hook_unregistered(self, path: str, module: nn.Module, skipper: Skipper) -> None:
        """A class outside the registry that is called the same way, if its own loop leaves sentinel slots out."""
        if not leaves_sentinels_out(module):
            raise IntegrationError(
                f"{path} ({type(module).__name__}) is outside transformers' experts registry and its own loop does not "
                "leave skipped slots out, so skipping would save nothing. This family is not supported."
            )

        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0], *skipper(*args[:3], module.num_experts), *args[3:])

        self._undo.append(module.register_forward_pre_hook(hook).remove)

    def _hook_router(self, path: str, skipper: Skipper) -> None:
        router = self.routers.get(path)
        if router is None:
            raise IntegrationError(
                f"Policy {skipper.policy.name!r} needs router logits, and {path} has no router module."
            )

        experts = int(self.model.get_submodule(path).num_experts)

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            skipper.logits = router_logits(output, experts)

        self._undo.append(self.model.get_submodule(router).register_forward_hook(hook).remove)

    def _take_over_router(self, path: str, skipper: Skipper, fast: FastPath) -> None:
        """Where the router is a plain top-k, routing and rule become one kernel for few tokens."""
        if self.routers.get(path) is None:
            return
        router = self.model.get_submodule(str(self.routers[path]))
        fast.top_k = recognise(router, self.top_k[path])
        if fast.top_k is None:
            return
        stock = router.forward

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
            if not _routed(skipper, hidden.shape[0]):
                return stock(hidden_states, *args, **kwargs)
            logits, phase = F.linear(hidden, router.weight), self.step.phase
            tables = {name: getattr(skipper, f"table_{name}") for name in skipper.policy.needs}
            state = (tables, skipper.threshold[phase], self.step.token_mask(hidden.shape[0]), skipper.counts[phase])
            ids, gates = fast.route(logits, *state)
            return logits, gates, ids

        router.forward = forward
        self._undo.append(lambda: delattr(router, "forward"))

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a pass: its phase (prefill = more than one token a row) and its padding mask."""
        inputs = _named(module, args, kwargs)
        ids = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        mask = inputs.get("attention_mask")
        step = self.step
        step.tokens = 0 if ids is None else ids.shape[1]
        step.phase = DECODE if step.tokens == 1 else PREFILL
        usable = isinstance(mask, Tensor) and mask.dim() == 2
        step.attention_mask = mask if usable else None
        step.masked = step.masked and usable

    def remove(self) -> None:
        """Put everything back, last change first."""
        while self._undo:
            self._undo.pop()()


def _configs(model: nn.Module) -> list[Any]:
    """Every distinct configuration object below a model that carries an experts implementation."""
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    for config in list(found.values()):
        for name in getattr(config, "sub_configs", ()):
            sub = getattr(config, name, None)
            if sub is not None:
                found[id(sub)] = sub
    return [c for c in found.values() if hasattr(c, "_experts_implementation_internal")]


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    names = list(inspect.signature(module.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


@torch.no_grad()
def leaves_sentinels_out(module: nn.Module) -> bool:
    """Whether a slot with id `num_experts` changes nothing and is not computed, tried on two tokens."""
    from torch.utils.flop_counter import FlopCounterMode

    parameter = next(module.parameters())
    hidden = int(getattr(module, "hidden_size", getattr(module, "hidden_dim", 0)) or parameter.shape[-1])
    x = torch.linspace(-1, 1, 2 * hidden, device=parameter.device, dtype=parameter.dtype).view(2, hidden)
    one = torch.zeros(2, 1, dtype=torch.long, device=parameter.device)
    both = torch.cat([one, torch.full_like(one, int(module.num_experts))], dim=1)  # type: ignore[arg-type]
    gates = torch.ones(2, 1, device=parameter.device, dtype=parameter.dtype)
    try:
        with FlopCounterMode(display=False) as alone:
            expected = module(x, one, gates)
        with FlopCounterMode(display=False) as padded:
            found = module(x, both, torch.cat([gates, torch.zeros_like(gates)], dim=1))
    except Exception:  # a loop that was not made for sentinels fails in its own way
        return False
    return torch.equal(expected, found) and alone.get_total_flops() == padded.get_total_flops()
