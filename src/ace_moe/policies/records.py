"""What passes between a layer and its policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from torch import Tensor

if TYPE_CHECKING:  # a slot is decided without it
    from .. import checkpoint

Site: TypeAlias = "checkpoint.Site"
Tables = dict[str, dict[str, Tensor]]  # by layer key, then by name


class Extras(Protocol):
    """What a policy gathers in one layer for itself, beside gates and tables; see `Policy.extras`."""

    def remove(self) -> None:
        """Take its hooks out of the model."""
        ...


class Routing(NamedTuple):
    """What a layer's router said of T tokens: ids, gates [T, k]; what some policies need beside is optional."""

    ids: Tensor
    gates: Tensor
    tables: Mapping[str, Tensor]
    threshold: Tensor  # [] or [T, 1]
    hidden: Tensor | None = None
    token_mask: Tensor | None = None  # [T], False at padding
    factor: Tensor | None = None  # [], what the layer's contributions are multiplied by; ∞ guards the layer
    constant: Tensor | None = None  # [], what kept gates are multiplied by where the gain is a constant
    extras: Extras | None = None  # what the policy gathered in this layer for itself


class Decision(NamedTuple):
    """ids and gates [T, k] to run, and keep [T, k]: False where nothing runs."""

    ids: Tensor
    gates: Tensor
    keep: Tensor
