"""What calibrations share: where a loaded model's MoE layers are, what runs through them, what experts answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ...checkpoint import MoEModel, Site
from ...engines.transformers.modules import run_experts
from ...errors import IntegrationError, TextError
from ...text import Windows, windows_of

CALIBRATED_ON = 8  # windows

ROWS = 1 << 13  # rows an experts module is given at once; bounds memory for any model
Given = tuple[Tensor, Tensor, Tensor]  # hidden, ids, gates
Change = Callable[[Tensor, Tensor, Tensor], Given]


@dataclass(frozen=True)
class Call:
    """What one layer's experts were given: hidden [T, d], ids and gates [T, k]; logits [T, E] where there is a router."""

    hidden: Tensor
    ids: Tensor
    gates: Tensor
    logits: Tensor | None


def needed(windows: Windows | None) -> Windows:
    if windows is None:
        raise TextError("This policy is calibrated on text and got none. Give a text of the kind the model will serve.")
    return windows


def sites(model: PreTrainedModel) -> list[Site]:
    """The model's MoE layers. Nothing may be skipped while a calibration looks at it."""
    if any(hasattr(module, "ace") for module in model.modules()):
        raise IntegrationError("A plan is attached to this model. Detach it before the calibration: `ace.detach()`.")
    return MoEModel.of(model).sites


@contextmanager
def changed(model: PreTrainedModel, changes: Mapping[str, Change]) -> Iterator[None]:
    """Inside, the experts at these paths are given what `change(hidden, ids, gates)` makes of their arguments."""

    def hook(change: Change, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*change(*args[:3]), *args[3:])

    with ExitStack() as stack:
        for path, change in changes.items():
            stack.enter_context(model.get_submodule(path).register_forward_pre_hook(partial(hook, change)))
        yield


def silenced(model: PreTrainedModel, site: Site) -> RemovableHandle:
    """In a `with`: inside, this layer's routed experts answer zero."""
    return model.get_submodule(site.path).register_forward_hook(lambda module, args, output: output * 0)


@torch.no_grad()
def watch(model: PreTrainedModel, ids: Tensor, places: list[Site] | None = None) -> dict[str, Call]:
    """One pass over ids [B, L]: what every layer's experts were given, by layer key."""
    seen: dict[str, Given] = {}
    logits: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for site in places or sites(model):
            experts = model.get_submodule(site.path)
            stack.enter_context(experts.register_forward_pre_hook(partial(_keep_inputs, seen, site.key)))
            if site.router_path is not None:
                router = model.get_submodule(site.router_path)
                stack.enter_context(router.register_forward_hook(partial(_keep_logits, logits, site)))
        model(input_ids=ids.to(model.device), use_cache=False)
    return {key: Call(*given, logits.get(key)) for key, given in seen.items()}


def walk(model: PreTrainedModel, text: Tensor, places: list[Site]) -> Iterator[tuple[Site, nn.Module, Call]]:
    """Each layer's experts and what they were given, window by window."""
    for ids in text.split(1):
        seen = watch(model, ids, places)
        for site in places:
            yield site, model.get_submodule(site.path), seen[site.key]


def _keep_inputs(seen: dict[str, Given], key: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    hidden, ids, gates = args[:3]
    seen[key] = hidden.reshape(-1, hidden.shape[-1]), ids, gates


def _keep_logits(logits: dict[str, Tensor], site: Site, module: nn.Module, args: Any, output: Any) -> None:
    logits[site.key] = router_logits(output, site.num_experts)


def router_logits(output: Any, num_experts: int) -> Tensor:
    """The one of a router's outputs that has a number for every expert, [T, E]; rows past the experts belong to sinks."""
    for found in output if isinstance(output, tuple) else (output,):
        if isinstance(found, Tensor) and found.is_floating_point() and found.shape[-1] >= num_experts:
            return found.reshape(-1, found.shape[-1])[:, :num_experts]
    raise IntegrationError(
        f"This model's router gives no score for each of the {num_experts} experts, which the policy needs. Policies that "
        "read gates alone, such as 'share', work."
    )


def token_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The next-token logits [B, L, V] of a language model."""
    logits = getattr(model(input_ids=ids, use_cache=False), "logits", None)
    if logits is None or logits.shape[-1] <= int(ids.max()):
        raise IntegrationError(
            f"{type(model).__name__} does not predict tokens, and this policy is calibrated by its predictions. Load the model "
            "with its language-model head."
        )
    return logits


def all_gates(model: PreTrainedModel, windows: Windows | None) -> dict[str, Tensor]:
    """The gates of the whole text, [N, k] by layer key."""
    places = sites(model)
    passes = [watch(model, ids, places) for ids in needed(windows).ids.split(1)]
    return {site.key: torch.cat([seen[site.key].gates for seen in passes]).float().cpu() for site in places}


def answers(experts: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    """f_e(x) for every slot: hidden [T, d], ids [T, n] → [T, n, d] in fp32, by the module's own forward with gates of 1."""
    n, rows = ids.shape[-1], max(1, ROWS // ids.shape[-1])
    found = []
    for x, e in zip(hidden.split(rows), ids.split(rows), strict=True):
        given = x.repeat_interleave(n, dim=0), e.reshape(-1, 1), x.new_ones(len(x) * n, 1)
        found.append(run_experts(experts, *given).float().view(len(x), n, -1))
    return torch.cat(found)


def products(experts: nn.Module, hidden: Tensor, num_experts: int) -> Iterator[Tensor]:
    """Inner products of all experts' outputs on each token, in parts: G[t, p, q] = f_p(x_t) · f_q(x_t), [t, E, E]."""
    every = torch.arange(num_experts, device=hidden.device)
    for part in hidden.split(max(1, ROWS // num_experts)):
        found = answers(experts, part, every.expand(len(part), -1))
        yield found @ found.mT


def calibration_part(windows: Windows) -> Windows:
    """The first windows of a text: the cited methods use few samples, and some take a pass for every layer or expert."""
    return windows_of(windows.ids[:CALIBRATED_ON], windows.workload.name)
