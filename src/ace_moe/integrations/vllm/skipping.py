"""The skipping of one engine in one process: plan, thresholds on the device, phases, and its layers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...ace import Skip
from ...errors import IntegrationError, PlanError
from ...plan import structure_difference
from . import KEY
from .layer import Layer
from .phases import Phases, decode_length, listen
from .settings import Settings, check_content, logger


class Configured(dict[str, Any]):
    """additional_config after it was read: it carries the skipping, and budgets are out of vLLM's compile hash."""

    skipping: Skipping

    def __reduce__(self) -> tuple[Any, ...]:
        """vLLM pickles configurations into its compile cache: there it is a plain dictionary."""
        return dict, (dict(self),)

    def __deepcopy__(self, memo: Any) -> Configured:
        return self


def find(vllm_config: Any) -> Skipping | None:
    """The skipping of an engine whose layers have been built; None for an engine without ACE."""
    additional = getattr(vllm_config, "additional_config", None)
    return additional.skipping if isinstance(additional, Configured) else None


def configure(vllm_config: Any) -> Skipping | None:
    """The skipping this configuration asks for, built at its first layer; None if it does not ask."""
    additional = getattr(vllm_config, "additional_config", None)
    if isinstance(additional, Configured):
        return additional.skipping
    if not isinstance(additional, dict) or KEY not in additional:
        return None
    skipping = Skipping(vllm_config, Settings.from_dict(additional[KEY]))
    # what shapes the compiled graph is that our operators are in it, not which budget they use
    vllm_config.additional_config = Configured({**additional, KEY: True})
    vllm_config.additional_config.skipping = skipping
    listen(find)
    return skipping


class Skipping:
    """Layers register themselves as vLLM builds them; `set_skip` and `report` serve the control side."""

    def __init__(self, vllm_config: Any, settings: Settings):
        refuse_unsupported(vllm_config)
        self.settings, self.model = settings, vllm_config.model_config.model
        with _plain_torch():
            self.ace = settings.open(self.model)
            if _first_rank():
                check_content(self.ace.plan, self.model, settings.allow_other_weights)
        self.decoder_layers = int(vllm_config.model_config.hf_text_config.num_hidden_layers)
        self.whole = vllm_config.parallel_config.pipeline_parallel_size == 1
        self.device = torch.device(vllm_config.device_config.device)
        self.phases = Phases(vllm_config.scheduler_config.max_num_batched_tokens, self.device)
        self.thresholds = self.ace.thresholds.to(self.device)
        self.skip: Skip | None = settings.skip
        self.layers: dict[str, Layer] = {}
        logger.info("ACE: policy %s, %s", json.dumps(self.ace.policy.settings), self.describe())

    def describe(self) -> str:
        prefill, decode = self.ace.thresholds.tolist()
        return f"budget {self.skip!r}: τ = {prefill:.6f} in prefill, {decode:.6f} in decode"

    # ---- layers -------------------------------------------------------------------------------------------------

    def add(self, index: int, name: str, found: Mapping[str, int]) -> Layer | None:
        """The layer with this decoder number; None for a draft model's layer, which is left as it is."""
        key = str(index)
        structure = self.ace.plan.fingerprint["structure"]
        if key in self.layers or index >= self.decoder_layers:  # the model itself is built before its drafts
            logger.warning("ACE: %s is of a draft model, of which the plan knows nothing: left unskipped.", name)
            return None
        if key not in structure:
            raise PlanError(
                f"The plan has no layer {key} ({name}); it is of another model ({self.ace.plan.model or 'unnamed'}) or this "
                "layer is built in a way `ace tables` does not cover. Build one with `ace tables`."
            )
        wanted = {n: v for n, v in structure[key].items() if n in found and v}
        difference = structure_difference({key: wanted}, {key: found})
        if difference:
            raise PlanError(
                f"The plan is of another model ({self.ace.plan.model or 'unnamed'}): {difference}. Build one with `ace tables`."
            )
        layer = Layer(key, self.ace.policy, self.ace.plan.tables.get(key, {}), self.thresholds, self.phases)
        self.layers[key] = layer
        return layer

    def ready(self, runner: Any) -> None:
        """After the model is loaded and before it serves: every layer is there and knows how it runs."""
        self._check_covered()
        self.phases.decode_length = decode_length(runner)
        for layer in self.layers.values():
            layer.choose_executor()

    def _check_covered(self) -> None:
        missing = sorted(set(self.ace.plan.fingerprint["structure"]) - set(self.layers))
        if self.whole and missing:
            raise IntegrationError(
                f"vLLM runs layer {missing[0]} (and {len(missing) - 1} more) outside its common MoE layer, where ACE cannot "
                "skip. This model is not supported in vLLM; serve it without `ace`."
            )

    # ---- control ------------------------------------------------------------------------------------------------

    def set_skip(self, skip: Skip) -> None:
        """Another budget, at once: τ is copied into the tensor the kernels read."""
        self.ace.set_skip(skip)
        self.thresholds.copy_(self.ace.thresholds)
        self.skip = skip
        logger.info("ACE: %s", self.describe())

    def set_threshold(self, threshold: float | Tensor) -> None:
        """τ itself, for both phases or as [prefill, decode]."""
        self.ace.set_threshold(threshold)
        self.thresholds.copy_(self.ace.thresholds)
        self.skip = None

    def reset(self) -> None:
        for layer in self.layers.values():
            layer.counts.zero_()

    def report(self) -> dict[str, Any]:
        """Plain values for an RPC. Reading the counters is the only host sync, and it is the caller's."""
        counts = torch.stack([layer.counts for layer in self.layers.values()]).tolist() if self.layers else []
        return {
            "skip": dict(self.skip) if isinstance(self.skip, Mapping) else self.skip,
            "thresholds": self.ace.thresholds.tolist(),
            "counts": dict(zip(self.layers, counts, strict=True)),
            "executors": {key: layer.executor for key, layer in self.layers.items()},
            "split": any(layer.split for layer in self.layers.values()),
        }


def refuse_unsupported(vllm_config: Any) -> None:
    """Options of vLLM under which skipping would be wrong or silent."""
    parallel = vllm_config.parallel_config
    reasons = (
        (vllm_config.lora_config is not None, "LoRA aligns all routed slots itself", "--enable-lora"),
        (getattr(parallel, "enable_dbo", False), "dual batch overlap splits a step in two", "--enable-dbo"),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "prefill context parallelism gathers tokens before they are routed",
            "--prefill-context-parallel-size",
        ),
        (
            getattr(vllm_config.model_config, "enable_return_routed_experts", False),
            "returning routed experts stores ids in unsigned bytes, where a skipped slot has none",
            "--enable-return-routed-experts",
        ),
    )
    for wrong, why, flag in reasons:
        if wrong:
            raise IntegrationError(f"ACE does not work with {flag}: {why}. Serve without {flag}, or without `ace`.")


@contextmanager
def _plain_torch() -> Iterator[None]:
    """vLLM builds layers under the model's own default type and device; reading a checkpoint must not inherit them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def _first_rank() -> bool:
    distributed = torch.distributed
    return not distributed.is_available() or not distributed.is_initialized() or distributed.get_rank() == 0
