"""Tables: one number per expert, computed from weights alone, with mean 1 in its layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..checkpoint.records import MoELayer
from ..errors import CheckpointError, StructureError
from . import gsp, rcr

EPSILON = 1e-8
TABLES: dict[str, Callable[[MoELayer], Tensor]] = {"gsp": gsp.raw, "rcr": rcr.raw}


def table(name: str, layer: MoELayer) -> Tensor:
    """The named table of one layer: [E], float32, mean 1."""
    values = TABLES[name](layer).float()
    if not values.isfinite().all():  # NaN and infinite experts end up here: every weight of an expert enters its number
        expert = int((~values.isfinite()).nonzero()[0])
        raise CheckpointError(
            f"Layer {layer.key}: {layer.path} has NaN, infinite or overflowing weights (expert {expert}, table {name}). "
            "The checkpoint is damaged or was saved after a diverged training step; download it again."
        )
    return (values / (values.mean() + EPSILON)).cpu()


def tables(layer: MoELayer) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every table that has a meaning for this layer, and for the others the reason why not."""
    found: dict[str, Tensor] = {}
    undefined: dict[str, str] = {}
    for name in TABLES:
        try:
            found[name] = table(name, layer)
        except StructureError as error:
            undefined[name] = str(error)
    return found, undefined
