"""Running only the kept slots in vLLM's kernels: what id −1 means differs by back end, so each has its own way.

    native    −1 goes to the kernel, which leaves the slot out; sums skip its row, which was never written
    compact   kept (token, slot) pairs become a problem with one slot per token (CPU kernels; needs a host value)
    redirect  the slot points at the token's own top expert with gate 0: no expert is read for it, but its products are
              still computed; right with any kernel
    ours      our kernels in place of vLLM's, where the layer is one they know

A kernel that is not on the list never sees −1: some of them index memory with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...dispatch.compact import kept_alone
from ...errors import IntegrationError
from .layer import Layer
from .settings import EVERY, Settings, logger

Run = Callable[..., Tensor]  # RoutedExperts.forward_modular of the layer
PLAIN = "MoEPrepareAndFinalizeNoDPEPModular"
PASSING = {PLAIN, "MoEPrepareAndFinalizeNaiveDPEPModular"}  # ids reach the kernel as they are
DEEPEP = {"DeepEPHTPrepareAndFinalize", "DeepEPV2PrepareAndFinalize", "DeepEPLLPrepareAndFinalize"}
ALIGNED = {"TritonExperts", "MarlinExperts"}  # moe_align_block_size drops −1; their sum must know of it
DROPPING = {"DeepGemmExperts", "BatchedTritonExperts", "BatchedDeepGemmExperts"}
WITH_MAP = {"CutlassExpertsFp8"}  # only under expert parallelism, where an expert map translates −1


class Executor:
    """The way one layer's experts run; chosen when vLLM has built its kernel: after loading, or at the first pass."""

    def __init__(self, runner: Any, layer: Layer, settings: Settings):
        self.runner, self.experts, self.layer, self.settings = runner, runner.routed_experts, layer, settings
        self.mode, self.kernel_tokens = "", 0
        self.ours: Any = None
        layer.choose_executor = self.choose

    def __call__(self, run: Run, x: Tensor, gates: Tensor, ids: Tensor, **shared: Any) -> Tensor:
        """x [T, d], gates and ids [T, k] with −1 at skipped slots → [T, d]."""
        if not self.mode:
            self.choose()
        if x.shape[0] <= self.kernel_tokens:
            return self.ours(x, gates, ids)
        if self.mode == "native":
            return run(x=x, topk_weights=gates, topk_ids=ids, **shared)
        if self.mode == "compact":
            return compact(run, x, gates, ids, self.experts.expert_map)
        return run(x=x, topk_weights=gates, topk_ids=redirected(gates, ids), **shared)

    def choose(self) -> None:
        """By the kernel vLLM has built; once."""
        if self.mode:
            return
        refuse_monolithic(self.experts)
        refuse_gathered(self.runner)
        kernel = kernel_of(self.experts)
        self.mode, why = mode_of(self.experts, kernel)
        if self.settings.executor == "redirect":
            self.mode, why = "redirect", "the configuration asks for it"
        if self.mode == "native":
            make_sums_aware(kernel)
        if self.mode == "redirect":
            warn_redirect(type(kernel).__name__, why)
        self._take_ours(kernel)
        self.layer.executor = self._name()

    def _name(self) -> str:
        if self.kernel_tokens == EVERY:
            return "ours"
        return f"{self.mode}, ours to {self.kernel_tokens} tokens" if self.kernel_tokens else self.mode

    def _take_ours(self, kernel: Any) -> None:
        wanted = self.settings.kernel_tokens
        if not wanted:
            return
        from .kernels import Kernels

        auto = self.settings.kernels == "auto"
        found = Kernels.of(self.experts, kernel, measured=auto)
        if isinstance(found, Kernels):
            self.ours, self.kernel_tokens = found, wanted
        elif not auto:
            raise IntegrationError(
                f'Our kernels cannot run {self.experts.layer_name}: {found}. Leave out `kernels`, or set it to "auto".'
            )


# ---- which way --------------------------------------------------------------------------------------------------


def refuse_monolithic(experts: Any) -> None:
    """A kernel that routes by itself never shows its gates."""
    if experts.quant_method.is_monolithic:
        kernel = getattr(experts.quant_method, "experts_cls", None) or type(kernel_of(experts))
        raise IntegrationError(
            f"{experts.layer_name}: vLLM chose a kernel that routes by itself ({kernel.__name__}), so nothing can be skipped. "
            "Choose another with `--moe-backend triton` (or deep_gemm, marlin)."
        )


def refuse_gathered(runner: Any) -> None:
    """Known only when the kernel is built: kernels of the common kind dispatch tokens after they are routed."""
    if runner.do_naive_dispatch_combine:
        raise IntegrationError(
            f"ACE cannot skip in {runner.layer_name}: this kernel gathers the tokens of all ranks before they are routed. Choose "
            "another with `--moe-backend triton`, or serve without data parallelism."
        )


def kernel_of(experts: Any) -> Any:
    return getattr(getattr(experts.quant_method, "moe_kernel", None), "fused_experts", None)


def mode_of(experts: Any, kernel: Any) -> tuple[str, str]:
    """(native | compact | redirect, why not native)."""
    prepare = getattr(experts.quant_method.moe_kernel, "prepare_finalize", None) if kernel is not None else None
    if experts.moe_config.device is not None and torch.device(experts.moe_config.device).type == "cpu":
        if type(prepare).__name__ == PLAIN:
            return "compact", "CPU kernels index memory with −1"
        return "redirect", "ranks exchange tokens in front of this CPU kernel, which indexes memory with −1"
    for check in (_dispatch_reason(prepare), _kernel_reason(experts, kernel)):
        if check:
            return "redirect", check
    return "native", ""


def _dispatch_reason(prepare: Any) -> str:
    name = type(prepare).__name__
    if name in PASSING:
        return ""
    if name not in DEEPEP:
        return f"what {name} does with a slot that has no expert is not known"
    if name == "DeepEPLLPrepareAndFinalize" and getattr(prepare, "global_to_physical", None) is not None:
        return "DeepEP low latency with round-robin placement looks ids up in a table"
    return ""


def _kernel_reason(experts: Any, kernel: Any) -> str:
    """Why −1 must not reach this kernel; empty if it may."""
    name = type(kernel).__name__
    if name == "TritonOrDeepGemmExperts":
        parts = (kernel.experts, kernel.fallback_experts)
        return next((why for part in parts if (why := _kernel_reason(experts, part))), "")
    if name in DROPPING or (name in WITH_MAP and experts.expert_map is not None):
        return ""
    if name not in ALIGNED:
        return f"what {name} does with a slot that has no expert is not known"
    if getattr(kernel, "_lora_context", None) is not None:
        return "LoRA aligns all routed slots itself"
    if name == "TritonExperts" and _scales_whole_tensor(kernel):
        return "a dynamic scale per tensor would be taken over rows that were never written"
    return ""


def _scales_whole_tensor(kernel: Any) -> bool:
    return (
        kernel.quant_dtype is not None
        and kernel.a2_scale is None
        and kernel.block_shape is None
        and not kernel.per_act_token_quant
    )


def make_sums_aware(kernel: Any) -> None:
    """Rows of skipped slots are never written: the sum over slots has to be told which they are, also without EP."""
    parts: tuple[Any, ...] = (kernel, getattr(kernel, "experts", None), getattr(kernel, "fallback_experts", None))
    for part in parts:
        if type(part).__name__ in ALIGNED:
            part.moe_sum = aware_sum


def aware_sum(input: Tensor, output: Tensor, topk_ids: Tensor | None = None, expert_map: Tensor | None = None) -> None:
    from vllm import _custom_ops

    _custom_ops.moe_sum(input, output, topk_ids, expert_map)


_warned: set[str] = set()


def warn_redirect(name: str, why: str) -> None:
    if name not in _warned:
        _warned.add(name)
        logger.warning(
            "ACE: %s: %s. Skipped slots are redirected to the token's top expert with gate 0: experts that no token keeps are "
            "not read, which is what counts in small-batch decode, but the products are still computed, so prefill gets no "
            "faster. `--moe-backend triton` avoids this where it applies.",
            name,
            why,
        )


# ---- the ways ---------------------------------------------------------------------------------------------------


def redirected(gates: Tensor, ids: Tensor) -> Tensor:
    """ids with the token's top expert in place of −1; the gate there is 0 already."""
    top = ids.gather(-1, gates.argmax(-1, keepdim=True))
    return torch.where(ids < 0, top, ids)


def compact(run: Run, x: Tensor, gates: Tensor, ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Only kept slots of experts on this rank reach the kernel, as tokens with one slot each. CPU only: a host value."""
    if expert_map is not None:
        ids = torch.where(ids >= 0, expert_map[ids.clamp(min=0).long()].to(ids.dtype), ids)
    keep = ids >= 0
    if bool(keep.all()):
        return run(x=x, topk_weights=gates, topk_ids=ids)
    return kept_alone(lambda x, ids, gates: run(x=x, topk_weights=gates, topk_ids=ids), x, ids, gates, keep)
