"""Refusal of a benchmark that does not fit, before it fills the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from ...checkpoint import resolve
from ...checkpoint.source import locate
from ...errors import DeviceError

GIB = 1 << 30
READ = 4 * GIB  # what the read rate of a GPU is measured on
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
USED = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))


def checkpoint_bytes(model: str | Path) -> int:
    """Bytes of a checkpoint's weights, by the size of its files."""
    return sum(file.stat().st_size for file in set(locate(resolve(model)).values()))


def run_bytes(config: PretrainedConfig, size: tuple[int, int]) -> int:
    """About what one path of one size holds on to beside the weights: keys and values, and what lies between layers."""
    text: Any = config.get_text_config(decoder=True)
    tokens, batch = size
    cache = sum(_key_numbers(text.per_layer_config[number]) for number in range(text.num_hidden_layers))
    slots = next((v for n in ("num_experts_per_tok", "top_k_experts") if (v := getattr(text, n, None))), 8)
    middle = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", text.hidden_size)
    between = slots * (3 * middle + 2 * text.hidden_size) + 16 * text.hidden_size
    return tokens * batch * (cache + between) * 2 + batch * text.vocab_size * 4


def _key_numbers(layer: Any) -> int:
    """Numbers one token leaves in a layer's cache, as if it had full attention."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return 2 * heads * (getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def check_fits(
    weights: int, config: PretrainedConfig, sizes: Sequence[tuple[int, int]], paths: int, device: str
) -> None:
    """Refuse what the device has no room for: the weights, and every path of the largest size at a time."""
    beside = paths * max((run_bytes(config, size) for size in sizes), default=0)
    gpu = torch.device(device).type == "cuda"
    need, free = weights + max(beside, READ if gpu else 0), free_bytes(device)
    if need > free:
        raise DeviceError(
            f"This needs about {need / GIB:.1f} GiB on {device} ({weights / GIB:.1f} of weights), and {free / GIB:.1f} are free. "
            "Take fewer --layers of the shape, smaller sizes (--prefill, --decode) or a larger device."
        )


def free_bytes(device: str) -> int:
    """Memory nobody holds: of the GPU, or of this machine within the limit this process may have."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_machine(), _group())


def _machine() -> int:
    """Linux says what is available without swapping; elsewhere all there is."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        import os

        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group() -> int:
    """Bytes the control group leaves, where there is one with a limit; files it has read can be let go of."""
    for limit, used in zip(LIMITS, USED, strict=True):
        try:
            most = limit.read_text().strip()
            if most != "max":
                return int(most) - int(used.read_text()) + _files(used.parent)
        except (OSError, ValueError):
            continue
    return 1 << 62


def _files(group: Path) -> int:
    lines = (group / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "total_inactive_file"))
