"""Tables computed from weights alone: one number per expert with mean 1 in its layer, or one per pair of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..checkpoint.records import MoELayer
from ..errors import CheckpointError, StructureError
from . import aimer, gsp, rcr

EPSILON = 1e-8
PAPER = ("gsp", "rcr")  # what the paper's rule reads


@dataclass(frozen=True)
class Table:
    """The recipe of a table: `part` [C, …] of a chunk of experts, so that all tables share one reading of it, then `whole`
    from the parts of a layer."""

    part: Callable[[MoELayer, slice], Tensor]
    whole: Callable[[Tensor], Tensor] = lambda parts: parts


TABLES = {
    "gsp": Table(gsp.part),
    "rcr": Table(rcr.part),
    "rcr_uncentred": Table(partial(rcr.part, centre=False)),
    "aimer": Table(aimer.part),
}


def tables_of(layer: MoELayer, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Compute the named tables that have a meaning for this layer; for the others, say why they have none.

    float32: [E] with mean 1, or [E, E] as it is.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    undefined: dict[str, str] = {}
    for chunk in layer.chunks():
        for name in [n for n in names if n not in undefined]:
            try:
                parts[name].append(TABLES[name].part(layer, chunk))
            except StructureError as error:
                undefined[name] = str(error)
    defined = [name for name in names if name not in undefined]
    return {
        name: _scaled(name, layer, TABLES[name].whole(torch.cat(parts[name])).float()) for name in defined
    }, undefined


def _scaled(name: str, layer: MoELayer, values: Tensor) -> Tensor:
    """Divide a table by its mean, unless it is one of pairs; refuse values that are not finite."""
    if not values.isfinite().all():  # NaN and infinite experts end up here: every weight of an expert enters its number
        expert = int((~values.isfinite()).nonzero()[0, 0])
        raise CheckpointError(
            f"Layer {layer.key}: {layer.path} has NaN, infinite or overflowing weights (expert {expert}, table {name}). "
            "The checkpoint is damaged or was saved after a diverged training step; download it again."
        )
    return (values if values.dim() > 1 else values / (values.mean() + EPSILON)).cpu()
