"""A plan in parts, a file for each layer: what makes long work resumable, and divisible over processes and machines.

A part holds its layer's tables and router rows, its share of the fingerprint, and which checkpoint it is of. Parts of all
layers in one folder, wherever they were made, are the plan; parts of two checkpoints are not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..checkpoint import MoEModel, Site
from ..checkpoint import identity as of
from ..checkpoint.hub import StreamedSource
from ..checkpoint.model import check_sizes
from ..checkpoint.source import CheckpointSource
from ..errors import PlanError
from ..files import UNFINISHED, replace_whole
from ..plan import Fingerprint, Plan, Sample
from . import tables
from .build import whole_tables


@dataclass(frozen=True)
class Part:
    key: str
    checkpoint: str
    tables: dict[str, Tensor]
    undefined: dict[str, str]
    router: dict[str, Tensor]
    sample: Sample | None


def checkpoint_name(moe: MoEModel) -> str:
    """Which checkpoint parts are of: its structure, every tensor's name, dtype and shape, and its router rows, or the commit
    where it is streamed: reading rows would fetch every shard."""
    source = moe.source
    headers = {k: str(header) for k, header in source.headers.items()} if isinstance(source, CheckpointSource) else {}
    content = source.repository.commit if isinstance(source, StreamedSource) else moe.content()
    facts = json.dumps([moe.structure(), sorted(headers.items()), content], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


class Parts:
    """The folder of parts beside a plan that is being made."""

    def __init__(self, output: Path):
        self.folder = output.with_name(f"{output.name}.layers")

    def path(self, key: str) -> Path:
        return self.folder / f"{re.sub(r'[^0-9A-Za-z._-]', '_', key)}.safetensors"

    def make(self, moe: MoEModel, sites: Sequence[Site], device: str, done: Callable[[str], object]) -> None:
        """These layers, one after another; `done` hears of each."""
        name = checkpoint_name(moe)
        for site in sites:
            found, undefined = tables(moe.layer(site).to(device))
            sample = of.experts([site], moe.source).get(site.key)
            self.save(Part(site.key, name, found, undefined, of.router_of(site, moe.source), sample))
            done(site.key)

    def save(self, part: Part) -> None:
        self.folder.mkdir(exist_ok=True)
        sample = None if part.sample is None else vars(part.sample)
        facts = {"key": part.key, "checkpoint": part.checkpoint, "undefined": part.undefined, "sample": sample}
        tensors = {f"table:{n}": t for n, t in part.tables.items()} | {f"router:{n}": t for n, t in part.router.items()}
        data = save({n: t.contiguous() for n, t in tensors.items()}, {"ace": json.dumps(facts)})
        replace_whole(self.path(part.key), data)

    def load(self, key: str) -> Part | None:
        """None where there is none; a damaged one is made again."""
        try:
            with safe_open(self.path(key), "pt") as file:
                facts: dict[str, Any] = json.loads((file.metadata() or {})["ace"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            sample = facts["sample"] and Sample(tuple(facts["sample"]["rms"]), facts["sample"]["sample"])
            made, router = (
                {n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)}
                for kind in ("table:", "router:")
            )
            return Part(facts["key"], facts["checkpoint"], made, facts["undefined"], router, sample)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError):
            return None

    def missing(self, moe: MoEModel) -> list[Site]:
        """Layers that are still to be made; a part of another checkpoint is an error."""
        name, found = checkpoint_name(moe), {site.key: self.load(site.key) for site in moe.sites}
        foreign = [key for key, part in found.items() if part is not None and part.checkpoint != name]
        if foreign:
            raise PlanError(
                f"{self.path(foreign[0])} is a layer of another checkpoint, or of another commit of it. Remove {self.folder} to "
                "begin again, or give the checkpoint it was made of."
            )
        return [site for site in moe.sites if found[site.key] is None]

    def plan(self, moe: MoEModel) -> Plan:
        """The plan of all parts."""
        parts = [part for site in moe.sites if (part := self.load(site.key)) is not None]
        samples = {part.key: part.sample for part in parts if part.sample is not None}
        routers = of.routers((part.key, part.router) for part in parts)
        fingerprint = Fingerprint(moe.structure(), routers, samples)
        check_sizes(fingerprint)
        undefined = {name: why for part in reversed(parts) for name, why in part.undefined.items()}
        return Plan(whole_tables({p.key: p.tables for p in parts}, undefined), fingerprint, moe.name, undefined)

    def remove(self) -> None:
        """With what a writer that was killed left unfinished."""
        for pattern in ("*.safetensors", f"*{UNFINISHED}"):
            for path in self.folder.glob(pattern):
                path.unlink()
        self.folder.rmdir()
