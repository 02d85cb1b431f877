"""What passes between a layer and its policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch import Tensor

if TYPE_CHECKING:  # a slot is decided without them, and transformers takes seconds to import
    from transformers import PreTrainedModel

    from .. import checkpoint, text

Model: TypeAlias = "PreTrainedModel"
Site: TypeAlias = "checkpoint.Site"
Windows: TypeAlias = "text.Windows"
Tables = dict[str, dict[str, Tensor]]  # by layer key, then by name


class Routing(NamedTuple):
    """What a layer's router said of T tokens: ids, gates [T, k]; what some policies need beside is optional."""

    ids: Tensor
    gates: Tensor
    tables: Mapping[str, Tensor]
    threshold: Tensor  # [] or [T, 1]; one number for methods that decide by the batch
    logits: Tensor | None = None
    hidden: Tensor | None = None
    token_mask: Tensor | None = None
    length: int = 0  # tokens of one sequence in this pass; 0 if unknown: then the pass counts as one sequence
    norms: Callable[[], Tensor] | None = None  # ‖f_e(x)‖ of every slot, [T, k]: runs every slot's expert
    factor: Tensor | None = None  # [], what the layer's contributions are multiplied by; ∞ guards the layer
    constant: Tensor | None = None  # [], what kept gates are multiplied by where the gain is a constant


class Decision(NamedTuple):
    """ids and gates [T, k] to run, and keep [T, k]: False where nothing runs."""

    ids: Tensor
    gates: Tensor
    keep: Tensor
