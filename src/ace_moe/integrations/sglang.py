"""Skipping in SGLang (experimental): an AROUND hook behind its top-k, by its own plugin registry.

    ACE_SGLANG='{"plan": "plan.safetensors", "skip": 0.5}' python -m sglang.launch_server --model-path MODEL \
        --moe-runner-backend triton

SGLang's STANDARD routing ends in `_post_process_topk_ids(topk_ids, topk_weights, topk_config, router_logits, layer_id)`.
The rule looks at logical ids before that function (it remaps them for load balancing and appends shared experts) and
puts −1 and the new gates after it: −1 is how SGLang itself marks padded rows, and its kernels leave such slots out.

Written against SGLang 0.5.23's source and tested with a stand-in of the same signature; it has not run on its GPU
runtime. Formats in which the kernel routes by itself never pass here; nothing is skipped then, and `report()` shows it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..errors import IntegrationError, OptionError, brief
from ..kernels import usable
from ..plan import Plan
from ..policies import Policy
from ..runtime import PADDING, Layer, Runtime, merge, row_of
from ..runtime.settings import Skip, thresholds
from .vllm.settings import Settings

TARGET = "sglang.srt.layers.moe.topk._post_process_topk_ids"
VARIABLE = "ACE_SGLANG"
TAKEN = {"plan", "skip", "policy", "preset", "workload"}  # of a server's settings, beside the policy's own
SKIPPED = -1


class Padded:
    """Rows from the ids themselves: the hook does not see phases, and −1 is how SGLang marks padding."""

    counting = generating = True

    def __init__(self) -> None:
        self.ids: Tensor | None = None

    def rows(self, tokens: int, device: torch.device) -> Tensor:
        assert self.ids is not None
        padding = (self.ids < 0).any(-1)
        return torch.where(padding, PADDING, row_of("decode")).to(torch.int8)

    def length(self, tokens: int) -> int:
        return 0


class Skipping:
    """The rule for all layers of a process; a layer is made on the device of the first ids it meets."""

    def __init__(self, plan: Plan, policy: Policy, skip: Skip, workload: str | None = None):
        self.runtime, self.tokens, self.skip = Runtime(plan, policy), Padded(), skip
        self.runtime.set(thresholds(plan, policy, skip, workload))

    def decide(self, layer_id: int | None, ids: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """ids, gates [T, k] → keep [T, k] and the new gates [T, k]. Rows of padding (ids −1) stay as they are."""
        layer, padding = self._layer(str(layer_id), ids), (ids < 0).any(-1, keepdim=True)
        self.tokens.ids = ids
        found, new = layer.decide(ids.clamp(min=0).long(), gates)
        return (found != SKIPPED) | padding, torch.where(padding, gates, new)

    def _layer(self, key: str, ids: Tensor) -> Layer:
        if key in self.runtime.layers:
            return self.runtime.layers[key]
        structure = self.runtime.plan.fingerprint.structure
        if key not in structure:
            raise IntegrationError(f"The plan has no layer {key}; it is of another model. Build one with `ace tables`.")
        if structure[key]["top_k"] != ids.shape[-1]:
            raise IntegrationError(
                f"The plan is of another model: layer {key} has top_k {structure[key]['top_k']} in the plan, {ids.shape[-1]} in "
                "the model. Build one with `ace tables`."
            )
        layer = self.runtime.add(key, SKIPPED, ids.device, kernels=usable(ids.device), opaque=False)
        layer.tokens = self.tokens
        return layer

    def report(self) -> dict[str, Any]:
        """As everywhere; all slots count as decode."""
        return merge([self.runtime.part(skip=self.skip)])


def around(skipping: Skipping) -> Callable[..., Any]:
    """The hook: `original(topk_ids, topk_weights, …)` between our look at the ids and our change of them."""

    def hook(original: Callable[..., Any], topk_ids: Tensor, topk_weights: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer_id = kwargs.get("layer_id", args[2] if len(args) > 2 else None)
        keep, gates = skipping.decide(layer_id, topk_ids, topk_weights)
        result = original(topk_ids, gates, *args, **kwargs)
        ids, *rest = result if isinstance(result, tuple) else (result,)
        width = keep.shape[-1]  # columns behind these are shared experts that were appended
        marked = torch.where(keep, ids[:, :width], SKIPPED)
        ids = torch.cat([marked, ids[:, width:]], dim=-1) if ids.shape[-1] > width else marked
        weights = rest[0] if rest else gates
        return (ids, weights, *rest[1:]) if isinstance(result, tuple) else _in_place(ids, gates, topk_weights)

    return hook


def _in_place(ids: Tensor, gates: Tensor, topk_weights: Tensor) -> Tensor:
    """A function that returns ids alone leaves the caller with its own weights: ours go into them."""
    topk_weights.copy_(gates)
    return ids


def register() -> None:
    """Entry point of `sglang.srt.plugins`. Does nothing unless ACE_SGLANG is set."""
    given = os.environ.get(VARIABLE)
    if not given:
        return
    from sglang.srt.plugins import HookRegistry, HookType

    settings = _settings(given)
    skipping = Skipping(*settings.open(None), settings.skip, settings.workload)
    HookRegistry.register(TARGET, around(skipping), HookType.AROUND)


def _settings(given: str) -> Settings:
    """What a hook behind the top-k can do of what a server may be asked for; the rest is refused, not ignored."""
    try:
        asked = json.loads(given)
    except ValueError as error:
        raise OptionError(f"{VARIABLE} is no JSON object ({brief(error)}).") from None
    settings = Settings.from_dict(asked)
    if settings.plan is None or isinstance(settings.skip, dict):
        raise OptionError("In SGLang give a plan and one budget for both phases: the hook does not see phases.")
    if others := sorted({f.name for f in fields(Settings)} & set(asked) - TAKEN):
        raise OptionError(f"{', '.join(others)}: of vLLM alone. In SGLang give {', '.join(sorted(TAKEN))}.")
    return settings
