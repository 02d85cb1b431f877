"""Tables computed from weights alone: one number per expert with mean 1 in its layer, one per pair of experts, or a vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..checkpoint.records import MoELayer
from ..errors import CheckpointError, StructureError
from . import aimer, gsp, mean, rcr, signature

EPSILON = 1e-8
BUILT = ("gsp", "rcr")  # what every plan has; others are built on request
TABLES: dict[str, Callable[[MoELayer], Tensor]] = {
    "gsp": gsp.raw,
    "rcr": rcr.raw,
    "rcr_uncentred": rcr.uncentred,
    "aimer": aimer.raw,
    "sere_weights": signature.raw,
    "mean_output": mean.raw,
}
SHAPES = {"mean_output": ("experts", "hidden")}  # of tables that are not one number for each expert or pair


def table(name: str, layer: MoELayer) -> Tensor:
    """The named table of one layer, float32: [E] with mean 1, [E, E] or [E, d] as it is."""
    values = TABLES[name](layer).float()
    if not values.isfinite().all():  # NaN and infinite experts end up here: every weight of an expert enters its number
        expert = int((~values.isfinite()).nonzero()[0, 0])
        raise CheckpointError(
            f"Layer {layer.key}: {layer.path} has NaN, infinite or overflowing weights (expert {expert}, table {name}). "
            "The checkpoint is damaged or was saved after a diverged training step; download it again."
        )
    return (values if values.dim() > 1 else values / (values.mean() + EPSILON)).cpu()


def tables(layer: MoELayer, names: Sequence[str] = BUILT) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The named tables that have a meaning for this layer, and for the others the reason why not."""
    found: dict[str, Tensor] = {}
    undefined: dict[str, str] = {}
    for name in names:
        try:
            found[name] = table(name, layer)
        except StructureError as error:
            undefined[name] = str(error)
    return found, undefined
