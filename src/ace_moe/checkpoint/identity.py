"""The identity of a model: hashes of its router rows, and a sample of a few rows of its experts."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..plan import Routers, Sample
from .memory import ModelSource
from .shards import Rows
from .source import CheckpointSource
from .structure import Site, is_registered

SMALLEST = 2.0**-14  # what is less has fewer bits in fp16 than in bf16; what is not, is the same number in both
PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SAMPLED = 8  # rows of each matrix of an expert
Source = CheckpointSource | ModelSource


def routers(sites: Iterable[Site], source: Source) -> Routers:
    """Hash all router rows as bf16, which tells weights apart without reading the experts."""
    exact, coarse = hashlib.sha256(), hashlib.sha256()
    for site in sites:
        names = [n for n, short in site.parameter_names().items() if short.startswith("router.")]
        for name, rows in sorted(source.read(names).items()):
            label = f"{site.key}:{name.rpartition('.')[2]}:".encode()
            exact.update(label + _bytes(_bf16(rows)))
            coarse.update(label + _bytes(_bf16(rows, coarse=True)))
    return Routers(exact.hexdigest(), coarse.hexdigest())


def experts(sites: Iterable[Site], source: Source) -> dict[str, Sample]:
    """Sample every layer's experts; a layer whose experts are stored in an unknown way is left out."""
    with source.rows() as rows:
        samples = {site.key: _sample(site, rows) for site in sites if is_registered(site.experts)}
    return {key: sample for key, sample in samples.items() if sample is not None}


def distance(sites: Iterable[Site], loaded: Source, stored: Source) -> tuple[float, str]:
    """Find the largest relative distance of sampled rows of two sources' experts, and the matrix it is in."""
    worst = (0.0, "")
    with loaded.rows() as mine, stored.rows() as theirs:
        for expert, name, wanted in (place for site in sites for place in _places(site)):
            a, b = mine(name, expert, wanted), theirs(name, expert, wanted)
            if a is not None and b is not None:
                a, b = a.double().cpu(), b.double().cpu()
                worst = max(worst, (float((a - b).norm() / b.norm().clamp(min=1e-30)), f"{name}[{expert}]"))
    return worst


def _places(site: Site) -> Iterator[tuple[int, str, range]]:
    """Choose what is sampled: some rows of each matrix of the first and the middle expert."""
    matrices = sorted((n, p.shape[1]) for n, p in site.experts.named_parameters() if p.dim() == 3)
    for expert in sorted({0, site.num_experts // 2}):
        for name, rows in matrices:
            yield expert, f"{site.path}.{name}", range(0, rows, max(1, rows // SAMPLED))[:SAMPLED]


def _sample(site: Site, rows: Rows) -> Sample | None:
    """Sample one layer; None where its numbers are not the weights or not finite."""
    digest, taken = hashlib.sha256(), defaultdict[int, list[Tensor]](list)
    for expert, name, wanted in _places(site):
        values = rows(name, expert, wanted)
        if values is None or values.dtype not in PLAIN:  # packed or scaled: its numbers are not the weights
            return None
        values = _bf16(values, coarse=True)  # comparable between precisions
        digest.update(f"{name.rpartition('.')[2]}:{expert}:".encode() + _bytes(values))
        taken[expert].append(values.double().flatten())
    sizes = [torch.cat(parts).square().mean().sqrt().item() for parts in taken.values()]
    return Sample(tuple(sizes), digest.hexdigest()) if sizes and all(0 <= size < math.inf for size in sizes) else None


def _bf16(values: Tensor, coarse: bool = False) -> Tensor:
    """Round to bf16 on the CPU; coarse: what fp16 holds less precisely is 0."""
    values = values.detach().to("cpu", torch.bfloat16)
    return torch.where(values.abs() < SMALLEST, 0.0, values) if coarse else values


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()
