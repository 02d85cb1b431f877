"""GGUF files as a source: llama.cpp's names and layout, under the names and in the layout the model in memory has.

Experts lie apart by projection: `blk.N.ffn_gate_exps` and `ffn_up_exps` [E, m, d] (or both in `ffn_gate_up_exps`),
`ffn_down_exps` [E, d, m]. What a norm multiplies by is stored as such: where the model's own module computes 1 + w, w is
that less one. Blocks are decoded by the `gguf` package, one expert at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, brief
from . import measure
from .records import Site, Stack
from .shards import Rows

NORMS = ("pre_ffw_norm_2", "ffn_norm_exps", "ffn_norm", "post_attention_norm")  # the first there is feeds the experts
ROUTER = {
    "weight": "ffn_gate_inp.weight", "proj.weight": "ffn_gate_inp.weight", "bias": "ffn_gate_inp.bias",
    "proj.bias": "ffn_gate_inp.bias", "scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale",
    "e_score_correction_bias": "exp_probs_b.bias",
}  # fmt: skip
HALVES = ("ffn_gate_exps", "ffn_up_exps")


class GgufSource:
    """Parameters of MoE layers; attention and embeddings are never asked for."""

    def __init__(self, path: Path, shapes: dict[str, torch.Size]):
        self.path, self.shapes = path, shapes
        self.tensors = {t.name: t for part in parts_of(path) for t in _open(part).tensors}
        self.places: dict[str, tuple[Site, str]] = {}

    def check(self, sites: Sequence[Site]) -> None:
        """Everything the MoE layers need is there and of a type that can be decoded."""
        for site in sites:
            self.places |= {name: (site, short) for name, short in site.parameter_names().items()}
        for name, (site, short) in self.places.items():
            for key in self._keys(site, short):
                self._check(name, key)

    def _check(self, name: str, key: str) -> None:
        if key not in self.tensors:
            raise CheckpointError(
                f"{self.path} has no tensor {key} for {name}. A part is missing, or the architecture is laid out in another way; "
                "build the plan from the original checkpoint."
            )
        tensor = self.tensors[key]
        try:
            _decoded(tensor, tensor.data[:1])
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: {key} is {tensor.tensor_type.name}, which the gguf package does not decode. Build the plan from "
                "the original checkpoint: with the same routers it serves this file too."
            ) from error

    # ---- names ------------------------------------------------------------------------------------------------------

    def _block(self, site: Site) -> str:
        if not site.key.isdigit():
            raise CheckpointError(
                f"{self.path}: {site.path} has no layer number, and GGUF names layers by number alone."
            )
        return f"blk.{int(site.key)}"

    def _keys(self, site: Site, short: str) -> list[str]:
        """Names in the file of what makes a parameter: one, or the gate and the up half of it."""
        role, _, rest = short.partition(".")
        block = self._block(site)
        if role == "norm":
            norm = next((n for n in NORMS if f"{block}.{n}.weight" in self.tensors), NORMS[2])
            return [f"{block}.{norm}.{rest}"]
        if role == "router":
            return [f"{block}.{ROUTER.get(rest, rest)}"]
        leaf, part = (rest.removesuffix("_bias"), "bias") if rest.endswith("_bias") else (rest, "weight")
        if leaf == "gate_up_proj" and f"{block}.ffn_gate_up_exps.{part}" not in self.tensors:
            return [f"{block}.{half}.{part}" for half in HALVES]
        known = {"gate_up_proj": "ffn_gate_up_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
        return [f"{block}.{known.get(leaf, leaf)}.{part}"]

    # ---- numbers ----------------------------------------------------------------------------------------------------

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        site, short = self.places[name]
        made = [_decoded(self.tensors[k], self.tensors[k].data) for k in self._keys(site, short)]
        whole = self._joined(site, made, -1) if short.startswith("experts.") else made[0]
        if short == "norm.weight":
            assert site.norm is not None  # whose own module may add something to its weight
            added = measure.norm_scale(site.norm, {"weight": torch.zeros_like(whole)}, whole.numel())
            whole = whole if added is None else whole - added
        same = whole.numel() == self.shapes[name].numel()
        return self._shaped(name, whole.reshape(self.shapes[name]) if same else whole)

    def stack(self, name: str) -> Stack:
        return Stack(partial(self._expert, name), self.shapes[name])

    def _expert(self, name: str, expert: int, device: torch.device | None = None) -> Tensor:
        """[a, b] in the model's layout."""
        site, short = self.places[name]
        made = [self._matrix(site, key, expert) for key in self._keys(site, short)]
        whole = self._joined(site, made, 0)
        whole = whole.mT if site.experts.is_transposed else whole
        self._shaped(name, whole[None].expand(self.shapes[name][0], -1, -1))
        return whole if device is None else whole.to(device)

    def _matrix(self, site: Site, key: str, expert: int) -> Tensor:
        tensor, scale = self.tensors[key], key.replace(".weight", ".scale")
        values = _decoded(tensor, tensor.data[expert])
        routers = [
            self._keys(s, short)[0] for s, short in self.places.values() if s is site and short.startswith("router.")
        ]
        if scale in self.tensors and scale not in routers:
            values = values * float(self.tensors[scale].data.flatten()[expert])
        return values

    def _joined(self, site: Site, made: list[Tensor], dim: int) -> Tensor:
        """Gate above up, or the two in turns; a fused tensor has the gate first."""
        if site.experts.is_concatenated or not site.experts.has_gate:
            return torch.cat(made, dim)
        halves = made if len(made) == 2 else made[0].chunk(2, dim)
        behind = dim % made[0].dim() + 1
        return torch.stack(tuple(halves), behind).flatten(behind - 1, behind)

    def _shaped(self, name: str, found: Tensor) -> Tensor:
        if found.shape != self.shapes[name]:
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(found.shape)} in the file, {list(self.shapes[name])} by the configuration. "
                "They are of two models; put the config.json of this one beside it."
            )
        return found

    def formats(self, names: Iterable[str]) -> set[str]:
        places = [self.places[name] for name in names]
        return {f"gguf {self.tensors[k].tensor_type.name}" for site, short in places for k in self._keys(site, short)}

    def rows(self) -> AbstractContextManager[Rows]:
        return nullcontext(lambda name, expert, wanted: self._expert(name, expert)[list(wanted)])


def _decoded(tensor: Any, data: Any) -> Tensor:
    import gguf

    return torch.from_numpy(gguf.dequantize(data, tensor.tensor_type).copy()).float()


def parts_of(path: Path) -> list[Path]:
    """All files of a split model, given any of them."""
    found = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if found is None:
        return [path]
    parts = [path.with_name(f"{found[1]}-{n + 1:05}-of-{found[2]}.gguf") for n in range(int(found[2]))]
    missing = [p.name for p in parts if not p.is_file()]
    if missing:
        raise CheckpointError(
            f"{path.parent} misses {', '.join(missing[:3])}. Finish the download, then run the command again."
        )
    return parts


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that is meant: the path itself, or the only one of a folder without safetensors."""
    if path.suffix == ".gguf":
        return path
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return None
    models = sorted(path.glob("*.gguf"))
    first = [p for p in models if not re.search(r"-\d{5}-of-\d{5}\.gguf$", p.name) or "-00001-of-" in p.name]
    if len(first) > 1:
        names = ", ".join(p.name for p in first[:4])
        raise CheckpointError(
            f"{path} holds several GGUF models ({names} …). Name the one you mean: {path / first[0].name}."
        )
    return first[0] if first else None


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError("GGUF files are read with the gguf package: pip install 'ace-moe[gguf]'.") from error
    try:
        return GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read ({brief(error)}). It is damaged; download it again.") from error
