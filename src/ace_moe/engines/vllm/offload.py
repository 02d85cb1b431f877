"""`ace serve MODEL --cpu-offload-gb N`: what goes to host memory are the experts, and what would gain nothing is refused.

vLLM fills the memory it is given layer by layer, attention first, which every token reads; of the experts a token reads few,
and skipped ones not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from ...errors import OptionError

SIZE, NAMES, BACKEND, KERNELS = "--cpu-offload-gb", "--cpu-offload-params", "--offload-backend", "--moe-backend"
PREFETCH = "--offload-group-size"
# the products' weights in vLLM's layers, plain or FP8, packed by compressed-tensors, by GPTQ or AWQ; scales stay on the GPU
WEIGHTS = ("w13_weight", "w2_weight", "w13_weight_packed", "w2_weight_packed", "w13_qweight", "w2_qweight")
FOUR_BIT = ("mxfp4", "gptq", "awq", "auto-round", "auto_round")
WHOLE_LAYERS = (
    "copies every expert of a layer to the GPU before each step, needed or not, so skipping saves nothing. Use "
    f"{SIZE} N alone: the kernels then read the experts a token needs"
)


def offload_flags(flags: list[str], config: Any) -> tuple[list[str], str | None]:
    """vLLM's flags with what experts in host memory need, and what was added, in words; as given without --cpu-offload-gb."""
    given = _values(flags)
    if given.get(BACKEND) == "prefetch" or _number(given.get(PREFETCH)) > 0:
        name = f"{BACKEND} prefetch" if given.get(BACKEND) == "prefetch" else PREFETCH
        raise OptionError(f"{name} {WHOLE_LAYERS}.")
    size = _number(given.get(SIZE))
    if size <= 0:
        return flags, None
    if os.environ.get("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA") == "1":
        raise OptionError(f"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1 {WHOLE_LAYERS}, with that variable unset.")
    added = [] if BACKEND in given else [BACKEND, "uva"]
    added += [] if NAMES in given else [NAMES, *WEIGHTS]
    added += [] if KERNELS in given else _kernels(config)
    return [*added, *flags], (
        f"experts go to host memory, up to {size:g} GiB on each GPU, the first layers' before the last's"
        + (f" ({' '.join(added)})" if added else "")
    )


def _kernels(config: Any) -> list[str]:
    """Kernels that read host memory: those with plain loads. gpt-oss' own would leave its weights on the GPU in silence."""
    found = getattr(config, "quantization_config", None) or {}
    method = str((found if isinstance(found, Mapping) else vars(found)).get("quant_method", ""))
    if method in FOUR_BIT:
        return [KERNELS, "marlin"]
    return [KERNELS, "triton"] if method in ("", "fp8") else []


def _values(flags: list[str]) -> dict[str, str]:
    """Each flag's first value, under vLLM's spelling with dashes."""
    found: dict[str, str] = {}
    for flag, after in zip_longest(flags, flags[1:], fillvalue=""):
        name, equals, value = flag.partition("=")
        if name.startswith("--"):
            found[name.replace("_", "-")] = value if equals else after
    return found


def _number(value: str | None) -> float:
    try:
        return float(value or 0)
    except ValueError:
        return 0.0  # vLLM says what is wrong with it
