"""Who a model is: hashes of its router rows, and a small sample of its experts that is read without reading them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..plan import Routers, Sample
from .memory import ModelSource
from .records import Site
from .shards import Rows
from .source import CheckpointSource
from .structure import is_registered

SMALLEST = 2.0**-14  # what is less has fewer bits in fp16 than in bf16; what is not, is the same number in both
PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SAMPLED = 8  # rows of each matrix of an expert
Source = CheckpointSource | ModelSource
Rowed = tuple[str, dict[str, Tensor]]  # a layer's key, and its router's parameters as bf16 by full name


def routers(layers: Iterable[Rowed]) -> Routers:
    """Over all router rows as bf16: tells weights apart without reading the experts."""
    exact, coarse = hashlib.sha256(), hashlib.sha256()
    for key, parameters in layers:
        for name, rows in sorted(parameters.items()):
            label = f"{key}:{name.rpartition('.')[2]}:".encode()
            for digest, values in ((exact, rows), (coarse, _coarse(rows))):
                digest.update(label)
                digest.update(_bytes(values))
    return Routers(exact.hexdigest(), coarse.hexdigest())


def router_of(site: Site, source: Source) -> dict[str, Tensor]:
    names = [n for n, short in site.parameter_names().items() if short.startswith("router.")]
    return {name: _halved(tensor) for name, tensor in source.read(names).items()}


def experts(sites: Iterable[Site], source: Source) -> dict[str, Sample]:
    """A sample of every layer's experts by key; a layer whose experts are stored in an unknown way is left out."""
    with source.rows() as rows:
        found = {site.key: _sample(site, rows) for site in sites}
    return {key: sample for key, sample in found.items() if sample is not None}


def distance(sites: Iterable[Site], loaded: Source, stored: Source) -> tuple[float, str]:
    """The largest relative distance of sampled rows of two sources' experts, and the matrix it is in."""
    worst = (0.0, "")
    with loaded.rows() as mine, stored.rows() as theirs:
        for site in sites:
            for name in site.stacks():
                for expert in _sampled(site):
                    wanted = _spread(site.experts.get_parameter(name.removeprefix(f"{site.path}.")).shape[1])
                    a, b = mine(name, expert, wanted), theirs(name, expert, wanted)
                    if a is not None and b is not None:
                        a, b = a.double().cpu(), b.double().cpu()
                        worst = max(worst, (float((a - b).norm() / b.norm().clamp(min=1e-30)), f"{name}[{expert}]"))
    return worst


def _sampled(site: Site) -> list[int]:
    return sorted({0, site.num_experts // 2})


def _sample(site: Site, rows: Rows) -> Sample | None:
    """Some rows of each matrix of the first and the middle expert."""
    matrices = {n: p.shape for n, p in site.experts.named_parameters() if p.dim() == 3}
    if not is_registered(site.experts) or not matrices:
        return None
    digest, sizes = hashlib.sha256(), []
    for expert in _sampled(site):
        taken = []
        for name, shape in sorted(matrices.items()):
            found = rows(f"{site.path}.{name}", expert, _spread(shape[1]))
            if found is None or found.dtype not in PLAIN:  # packed or scaled: its numbers are not the weights
                return None
            values = _coarse(_halved(found))  # comparable between precisions
            digest.update(f"{name}:{expert}:".encode() + _bytes(values))
            taken.append(values.double().flatten())
        sizes.append(torch.cat(taken).square().mean().sqrt().item())
    return Sample(tuple(sizes), digest.hexdigest()) if all(0 <= size < math.inf for size in sizes) else None


def _spread(rows: int) -> range:
    return range(0, rows, max(1, rows // SAMPLED))[:SAMPLED]


def _halved(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.bfloat16)


def _coarse(values: Tensor) -> Tensor:
    return torch.where(values.abs() < SMALLEST, 0.0, values)


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()
