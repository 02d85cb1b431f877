"""A tensor as a format describes it: its name unquantised, the tensors on disk that make it, how to decode them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ...errors import CheckpointError, brief

PLAIN = ("BF16", "F16", "F32", "F64")
FLOATS = ("BF16", "F16", "F32")  # what a factor is stored as


@dataclass(frozen=True)
class Header:
    """A tensor as the file's header has it: dtype as safetensors spells it (BF16, F8_E4M3, U8 …)."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Facts:
    """Facts beside the tensors: the quantisation part of the configuration, and the files' own metadata."""

    config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    _by_name: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return str(self.config.get("quant_method", ""))

    def all(self, name: str) -> list[Any]:
        """Every value under this name, at any depth: mixed checkpoints have one for each group of modules."""
        if name not in self._by_name:  # asked for each of a hundred thousand tensors
            self._by_name[name] = _values(self.config, name)
        return self._by_name[name]


def _values(part: Any, name: str) -> list[Any]:
    """Collect every value under a name, at any depth."""
    if isinstance(part, Mapping):
        own = [part[name]] if part.get(name) is not None else []
        return own + [value for inner in part.values() for value in _values(inner, name)]
    return [value for inner in part for value in _values(inner, name)] if isinstance(part, list) else []


def config_of(config: PretrainedConfig) -> dict[str, Any]:
    """The quantisation part of a configuration, or nothing."""
    for part in (config, config.get_text_config()):
        quantisation = getattr(part, "quantization_config", None)
        if quantisation:
            return quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    return {}


def facts_of(folder: Path, config: PretrainedConfig, metadata: Mapping[str, str]) -> Facts:
    """Read what a checkpoint's files say of its quantisation: config.json, or hf_quant_config.json beside it (ModelOpt)."""
    path, quantisation = folder / "hf_quant_config.json", config_of(config)
    if quantisation or not path.is_file():
        return Facts(quantisation, metadata)
    try:
        quantisation = json.loads(path.read_text(encoding="utf-8"))["quantization"]
        return Facts({"quant_method": "modelopt", **quantisation}, metadata)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({brief(error)}). It is damaged; download it again.") from error


Headers = Mapping[str, Header]
Get = Callable[[str], Any]  # key → something to index: only what is asked for is read
Find = Callable[[str, Headers, Facts], "Stored | None"]  # is this key the main tensor of the format?


@dataclass(frozen=True)
class Stored:
    """A tensor of the model as it lies on disk. `keys`, the main tensor first, are what `decode` takes, in that order.

    `experts` is E where the tensor is a stack [E, a, b]; keys in `shared` then have no part for each expert. `problem` says
    why the tensor cannot be read, where it cannot.
    """

    name: str
    format: str
    keys: tuple[str, ...]
    decode: Callable[..., Tensor] = lambda tensor: tensor
    experts: int | None = None
    shared: frozenset[str] = frozenset()
    problem: str = ""

    def read(self, get: Get, device: torch.device | str | None = None) -> Tensor:
        """The whole tensor: as it is where it is plain, else in fp32."""
        if self.experts is None or self.format == "plain":
            return self.decode(*(get(key)[...].to(device) for key in self.keys))
        return torch.stack([self.expert(get, number, device) for number in range(self.experts)])

    def expert(self, get: Get, number: int, device: torch.device | str | None = None) -> Tensor:
        """One expert's matrix [a, b] of a stack."""
        parts = (get(key)[...] if key in self.shared else get(key)[number] for key in self.keys)
        return self.decode(
            *(part.to(device) for part in parts)
        )  # bytes travel packed and are decoded where they are needed


def unreadable(name: str, key: str, header: Header, reason: str) -> Stored:
    """A tensor that cannot be read, and why."""
    return Stored(name, "unknown", (key,), problem=f"{key} is {header} {reason}")


def beside(key: str, headers: Headers, *suffixes: str) -> str | None:
    """Find the first companion there is, of a linear layer's weight ("x.gate_proj." + suffix) or of a fused parameter
    ("x.gate_up_proj_" + suffix)."""
    stem = key.removesuffix("weight") if key.endswith(".weight") else f"{key}_"
    return next((stem + s for s in suffixes if stem + s in headers), None)


def up(values: Tensor, block: int, dim: int, size: int) -> Tensor:
    """Repeat each value `block` times along `dim`, cut to the weight's size: the last block may be ragged."""
    return values.repeat_interleave(block, dim).narrow(dim, 0, size)


def named_groups(g_idx: Tensor, k: int, count: int, key: str) -> Tensor:
    """Check the group of each column [k], as a file with act-order names them."""
    if g_idx.shape != (k,) or int(g_idx.min()) < 0 or int(g_idx.max()) >= count:
        raise CheckpointError(
            f"{key}: its g_idx names groups that are not there. The file is damaged; download it again."
        )
    return g_idx.long()


def e8m0(scale: Tensor) -> Tensor:
    """Decode exponents, 2^(byte − 127); byte 255 is NaN."""
    codes = scale.view(torch.uint8).float()
    return torch.where(codes == 255, torch.nan, torch.exp2(codes - 127))


def number(scale: Tensor) -> Tensor:
    """Turn a factor into fp32, whatever it is stored as; bytes are exponents."""
    return e8m0(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.float()


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1(packed: Tensor) -> Tensor:
    """Decode FP4 bytes [..., k/2] → [..., k]: the low nibble comes first."""
    codes = packed.view(torch.uint8)
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=codes.device)
    return table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [..., w] → integers [..., w · ⌊32/bits⌋], the lowest bits first; none lies across words."""
    shifts = torch.arange(32 // bits, dtype=torch.int32, device=words.device) * bits
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)
