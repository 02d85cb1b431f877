"""What each of vLLM's kernels does with a slot that has no expert, and how that is known.

Most leave a slot of id −1 out. Those that sort ids as plain numbers leave one out whose id is the number of experts: it sorts
behind the last of them. A kernel that is not in the table is given neither: some index memory with it. What is in the table
and was only read, not run with poisoned experts on a GPU, is used where it is asked for (`executor: "native"`), or where
nothing else is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

PLAIN = "MoEPrepareAndFinalizeNoDPEPModular"
PASSING = {PLAIN, "MoEPrepareAndFinalizeNaiveDPEPModular"}  # ids reach the kernel as they are
# what sends tokens to other ranks, or sorts them into batches, and leaves −1 out
DROPPING = {
    "DeepEPHTPrepareAndFinalize",
    "DeepEPV2PrepareAndFinalize",
    "DeepEPLLPrepareAndFinalize",
    "BatchedPrepareAndFinalize",
}
BITS = ("3.5.1", "3.6")  # triton_kernels that route by a bit matrix; the newest sends −1 to expert 0 with weight 0
TAKEN_OVER = "a dynamic scale per tensor would be taken over rows that were never written"


def _whole_tensor(experts: Any, kernel: Any) -> str:
    scaled = kernel.a2_scale is not None or kernel.block_shape is not None or kernel.per_act_token_quant
    return "" if scaled else TAKEN_OVER


def _whole_tensor_alone(experts: Any, kernel: Any) -> str:
    """With a map the kernel clears the rows first."""
    return "" if experts.expert_map is not None else _whole_tensor(experts, kernel)


def kernels_release() -> str | None:
    """Of triton_kernels, by vLLM's reckoning."""
    from vllm.utils.import_utils import get_triton_kernels_version

    return get_triton_kernels_version()


def _other_release(experts: Any, kernel: Any) -> str:
    found = kernels_release()
    return "" if found in BITS else f"triton_kernels {found} runs skipped slots as expert 0's"


class Mode(NamedTuple):
    """How a class leaves slots out."""

    evidence: str
    tried: bool = False  # on a GPU, with every expert that no token keeps poisoned
    aware: bool = False  # its sum over slots must be told which rows were never written
    past: bool = False  # without an expert map it is the number of experts that is left out, not −1
    distinct: bool = False  # a token's experts must differ, so nothing can be redirected
    unless: Callable[[Any, Any], str] = lambda experts, kernel: ""  # why not this layer; empty if it may


COUNTS = Mode("sees numbers of tokens, not ids")
PERMUTED = "sorts ids, and its sum stops at the last expert's rows"
BIT_MATRIX = Mode("its bit matrix has no bit for −1, and its sum passes over it", distinct=True, unless=_other_release)
IGNORED = Mode("its alignment drops −1 and its sum passes over it")
RUN = "run on an H200 with poisoned experts"
# by class, and where tokens are quantised, by how
TABLE: dict[str, Mode] = {
    "TritonExperts": Mode("run on an H200, and in Triton's interpreter with poisoned rows", tried=True, aware=True),
    "TritonExperts, blocks": Mode(RUN, tried=True, aware=True),
    "TritonExperts, quantised": Mode("its alignment drops −1", aware=True, unless=_whole_tensor),
    "MarlinExperts": Mode(RUN, tried=True, aware=True),
    "HummingIndexedExperts": Mode(RUN, tried=True),
    "HummingIndexedExperts, quantised": IGNORED,
    "HummingIndexedExperts, blocks": IGNORED,
    "HummingGroupedExperts": Mode(PERMUTED, past=True),
    "OAITritonExperts": BIT_MATRIX._replace(evidence=RUN, tried=True),
    "UnfusedOAITritonExperts": BIT_MATRIX,
    "DeepGemmExperts": Mode("counts, scatters and gathers test for −1"),
    "DeepGemmFP4Experts": Mode("counts, scatters and gathers test for −1"),
    "CutlassExpertsFp8": Mode(PERMUTED, past=True, unless=_whole_tensor_alone),
    "CutlassExpertsW4A8Fp8": Mode(PERMUTED, past=True),
    "FlashInferExperts": Mode("its maps and its sum pass over ids that are no expert's"),
    "BatchedTritonExperts": COUNTS,
    "BatchedDeepGemmExperts": COUNTS,
    "BatchedMarlinExperts": COUNTS,
    "BatchedHummingGroupedExperts": COUNTS,
    "CutlassBatchedExpertsFp8": COUNTS,
}


def kernel_of(experts: Any) -> Any:
    return getattr(getattr(experts.quant_method, "moe_kernel", None), "fused_experts", None)


def prepare_of(experts: Any) -> Any:
    """What stands in front of the kernel: it may send tokens to other ranks."""
    return getattr(getattr(experts.quant_method, "moe_kernel", None), "prepare_finalize", None)


def parts_of(kernel: Any) -> tuple[Any, ...]:
    """The kernel, or those between which it chooses by the size of a step; not one that this GPU never runs."""
    if not hasattr(kernel, "fallback_experts"):
        return (kernel,)
    never = getattr(kernel, "is_sm100", True) is False  # the small steps of TritonOrCutlassExperts
    parts = (kernel.experts,) if never else (kernel.experts, kernel.fallback_experts)
    return tuple(inner for part in parts for inner in parts_of(part))


def mode_of(kernel: Any) -> Mode | None:
    name = type(kernel).__name__
    if getattr(kernel, "quant_dtype", None) is None:
        return TABLE.get(name)
    how = "quantised" if kernel.block_shape is None else "blocks"
    return TABLE.get(f"{name}, {how}", TABLE.get(name))


def dispatch_reason(prepare: Any) -> str:
    """Why −1 must not reach what sends tokens to the kernel; empty if it may."""
    name = type(prepare).__name__
    if name not in PASSING | DROPPING:
        return f"what {name} does with a slot that has no expert is not known"
    if name == "DeepEPLLPrepareAndFinalize" and getattr(prepare, "global_to_physical", None) is not None:
        return "DeepEP low latency with round-robin placement looks ids up in a table"
    return ""


def kernel_reason(experts: Any, kernel: Any, untried: bool) -> str:
    """Why a slot without an expert must not reach this kernel; empty if it may. `untried`: also where it was only read."""
    parts = parts_of(kernel)
    why = next((why for part in parts if (why := _part_reason(experts, part, untried))), "")
    if not why and len({passes(experts, part) for part in parts}) > 1:
        return f"the kernels {type(kernel).__name__} chooses from want different ids"
    return why


def _part_reason(experts: Any, kernel: Any, untried: bool) -> str:
    name, mode = type(kernel).__name__, mode_of(kernel)
    if mode is None:
        return f"what {name} does with a slot that has no expert is not known"
    if getattr(kernel, "_lora_context", None) is not None:
        return "LoRA aligns all routed slots itself"
    if not (mode.tried or untried or mode.distinct):
        return f'{name} leaves skipped slots out by its source ({mode.evidence}), not tried on a GPU; executor "native" uses it'
    return mode.unless(experts, kernel)


def passes(experts: Any, kernel: Any) -> bool:
    """Whether the id of a slot to leave out is the number of experts, not −1."""
    mode = mode_of(kernel)
    return mode is not None and mode.past and experts.expert_map is None


def distinct_reason(kernel: Any) -> str:
    """Why a skipped slot must not point at an expert its token has already; empty if it may."""
    for part in parts_of(kernel):
        mode = mode_of(part)
        if mode is not None and mode.distinct and not _other_release(None, part):
            return f"{type(part).__name__} wants a token's experts to differ"
    return ""


def tried(kernel: Any) -> bool:
    return all(mode is not None and mode.tried for mode in map(mode_of, parts_of(kernel)))
