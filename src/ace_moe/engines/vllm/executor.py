"""Running only the kept slots in vLLM's kernels: what a slot without an expert means differs by back end (backends.py).

kernels   our kernels in place of vLLM's, where the layer is one they know
native    −1, or the number of experts, goes to the kernel, which leaves the slot out; sums skip its row, which was never
          written
compact   kept (token, slot) pairs become a problem with one slot per token (CPU kernels; needs a host value)
redirect  the slot points at the token's own top expert with gate 0: no expert is read for it, but its products are
          still computed; right with any kernel that lets a token have an expert twice
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...decider import Decider
from ...decider.executors import Chosen, Executor, Offer, choose, kept_alone
from ...errors import IntegrationError
from .backends import (
    BITS,
    PLAIN,
    dispatch_reason,
    distinct_reason,
    kernel_of,
    kernel_reason,
    kernels_release,
    mode_of,
    parts_of,
    passes,
    prepare_of,
    tried,
)
from .settings import EVERY, Settings, logger

Run = Callable[..., Tensor]  # RoutedExperts.forward_modular of the layer


class Native:
    """The kernel leaves the slots out. `past`: the number of experts, where it is that and not −1 which it leaves out."""

    def __init__(self, tried: bool, past: int | None = None):
        self.name, self.past = "native" if tried else "native (not tried)", past

    def __call__(self, run: Run, x: Tensor, gates: Tensor, ids: Tensor, **shared: Any) -> Tensor:
        if self.past is not None:  # here, behind expert load balancing, which knows −1 alone
            ids = torch.where(ids < 0, self.past, ids)
        return run(x=x, topk_weights=gates, topk_ids=ids, **shared)


class Redirect:
    """Skipped slots point at their token's top expert; the gate there is 0 already. Padding, all −1, goes to expert 0."""

    name = "redirect"

    def __call__(self, run: Run, x: Tensor, gates: Tensor, ids: Tensor, **shared: Any) -> Tensor:
        top = ids.gather(-1, gates.argmax(-1, keepdim=True)).clamp(min=0)
        return run(x=x, topk_weights=gates, topk_ids=torch.where(ids < 0, top, ids), **shared)


class Compact:
    """Only kept slots of experts on this rank reach the kernel, as tokens with one slot each. CPU only: a host value."""

    name = "compact"

    def __init__(self, experts: Any):
        self.experts = experts

    def __call__(self, run: Run, x: Tensor, gates: Tensor, ids: Tensor, **shared: Any) -> Tensor:
        experts_here = self.experts.expert_map
        if experts_here is not None:
            ids = torch.where(ids >= 0, experts_here[ids.clamp(min=0).long()].to(ids.dtype), ids)
        keep = ids >= 0
        if bool(keep.all()):
            return run(x=x, topk_weights=gates, topk_ids=ids)
        return kept_alone(lambda x, ids, gates: run(x=x, topk_weights=gates, topk_ids=ids), x, ids, gates, keep)


class UpTo:
    """Our kernels for steps of up to a number of tokens, another way beyond."""

    def __init__(self, ours: Executor, tokens: int, other: Executor):
        self.ours, self.tokens, self.other = ours, tokens, other
        self.name = f"{other.name}, kernels to {tokens} tokens"

    def __call__(self, run: Run, x: Tensor, gates: Tensor, ids: Tensor, **shared: Any) -> Tensor:
        way = self.ours if x.shape[0] <= self.tokens else self.other
        return way(run, x, gates, ids, **shared)


class Experts:
    """The experts of one layer; how they run is chosen when vLLM has built its kernel: after loading, or at the first pass."""

    def __init__(self, runner: Any, decider: Decider, settings: Settings):
        self.runner, self.experts, self.decider, self.settings = runner, runner.routed_experts, decider, settings
        self.kernel: Any = None  # the one that was chosen for

    def __call__(self, run: Run, x: Tensor, gates: Tensor, ids: Tensor, **shared: Any) -> Tensor:
        """x [T, d], gates and ids [T, k] with −1 at skipped slots → [T, d]."""
        self.choose()
        return self.decider.chosen.executor(run, x, gates, ids, **shared)  # type: ignore[union-attr]

    def choose(self) -> None:
        """By the kernel vLLM has built; again where it has built another, as it does when weights are reloaded."""
        kernel, settings = kernel_of(self.experts), self.settings
        if self.decider.chosen is not None and kernel is self.kernel:
            return
        refuse_monolithic(self.experts)
        refuse_gathered(self.runner)
        offers = theirs_of(self.experts, kernel, untried=settings.executor == "native")
        theirs = choose(offers, settings.executor, self.experts.layer_name)
        chosen, self.kernel = self._with_ours(kernel, theirs), kernel
        self.decider.run_by(chosen)
        if isinstance(theirs.executor, Native):
            make_sums_aware(kernel)
            if settings.routing == "fused":
                pack_routing(kernel)
        if isinstance(theirs.executor, Redirect) and chosen.executor.name != "kernels":
            warn_redirect(type(kernel).__name__, theirs.refused["native"])

    def _with_ours(self, kernel: Any, theirs: Chosen) -> Chosen:
        """Our kernels in front of vLLM's, where they can run and are wanted."""
        settings = self.settings
        tokens, auto = settings.kernel_tokens, settings.kernels == "auto"
        if not tokens or (auto and settings.executor != "auto"):
            why = "switched off" if not tokens else f"{settings.executor} was asked for"
            return Chosen(theirs.executor, {"kernels": why, **theirs.refused})
        from .kernels import Kernels

        found = Kernels.of(self.experts, kernel, measured=auto)
        if isinstance(found, str):
            if auto:
                return Chosen(theirs.executor, {"kernels": found, **theirs.refused})
            raise IntegrationError(
                f'Our kernels cannot run {self.experts.layer_name}: {found}. Leave out `kernels`, or set it to "auto".'
            )
        tokens = found.fastest if auto else tokens
        if tokens == EVERY:
            return Chosen(found)
        return Chosen(UpTo(found, tokens, theirs.executor), theirs.refused)


# ---- which way --------------------------------------------------------------------------------------------------


def refuse_monolithic(experts: Any) -> None:
    """Refuse a kernel that routes by itself: it never shows its gates."""
    if experts.quant_method.is_monolithic:
        kernel = getattr(experts.quant_method, "experts_cls", None) or type(kernel_of(experts))
        raise IntegrationError(
            f"{experts.layer_name}: vLLM chose a kernel that routes by itself ({kernel.__name__}), so nothing can be skipped. "
            "Choose another with `--moe-backend triton` (or deep_gemm, marlin)."
        )


def refuse_gathered(runner: Any) -> None:
    """Refuse a kernel that gathers tokens first; known only when it is built."""
    if runner.do_naive_dispatch_combine:
        raise IntegrationError(
            f"ACE cannot skip in {runner.layer_name}: this kernel gathers the tokens of all ranks before they are routed. Choose "
            "another with `--moe-backend triton`, or serve without data parallelism."
        )


def theirs_of(experts: Any, kernel: Any, untried: bool) -> dict[str, Offer]:
    """The ways to use the kernel that vLLM has built, best first. `untried`: also what was only read in its source."""
    prepare = prepare_of(experts)
    on_cpu = experts.moe_config.device is not None and torch.device(experts.moe_config.device).type == "cpu"
    why = "CPU kernels index memory with −1" if on_cpu else dispatch_reason(prepare)
    why = why or kernel_reason(experts, kernel, untried)
    apart = "ranks exchange tokens in front of the kernel" if type(prepare).__name__ != PLAIN else ""
    past = any(passes(experts, part) for part in parts_of(kernel))
    return {
        "native": why or Native(tried(kernel), experts.moe_config.num_experts if past else None),
        "compact": apart or ("" if on_cpu else "it needs a value on the host") or Compact(experts),
        "redirect": distinct_reason(kernel) or Redirect(),
    }


def make_sums_aware(kernel: Any) -> None:
    """Have the sum over slots told which rows are of skipped slots: those are never written, also without EP."""
    for part in parts_of(kernel):
        if mode_of(part).aware:  # type: ignore[union-attr]
            part.moe_sum = aware_sum


def aware_sum(input: Tensor, output: Tensor, topk_ids: Tensor | None = None, expert_map: Tensor | None = None) -> None:
    from vllm import _custom_ops

    _custom_ops.moe_sum(input, output, topk_ids, expert_map)


def pack_routing(kernel: Any) -> None:
    """Pack ids into a bit matrix in one launch: vLLM's own way takes six, which show in a decode step."""
    for part in parts_of(kernel):
        if mode_of(part).distinct and kernels_release() == BITS[0]:  # type: ignore[union-attr]
            part._make_routing_data = routing_data


def routing_data(topk_ids: Tensor, topk_weights: Tensor, num_local_experts: int) -> Any:
    """Return what vLLM's `make_routing_data` does for the same arguments."""
    from triton_kernels.routing import routing_from_bitmatrix
    from triton_kernels.tensor import Bitmatrix

    from ...kernels.bits import WORD, packed

    ids, gates, bits = packed(topk_ids, topk_weights, num_local_experts)
    (tokens, words), k = bits.shape, ids.shape[1]
    matrix = Bitmatrix(bits, shape=[tokens, words * WORD], shape_max=[tokens, None], scratchpad=None)
    return routing_from_bitmatrix(matrix, gates, ids, num_local_experts, k)


@cache
def warn_redirect(name: str, why: str) -> None:
    """Say once what redirecting costs."""
    logger.warning(
        "ACE: %s: %s. Skipped slots are redirected to the token's top expert with gate 0: experts that no token keeps are "
        "not read, which is what counts in small-batch decode, but the products are still computed, so prefill gets no "
        "faster. `--moe-backend triton` avoids this where it applies.",
        name,
        why,
    )
