"""Options that many commands have, together as one parameter: what decides slots, and how a model is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from . import options as opt
from .common import AUTO
from .options import option

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Deciding:
    """What the user left out keeps the policy's own default."""

    policy: opt.PolicyName = AUTO
    preset: Annotated[str | None, option("paper: the paper's method, unchanged.")] = None
    gain: opt.GainName = None
    min_active: opt.MinActive = None
    min_mass: opt.MinMass = None

    @property
    def given(self) -> dict[str, Any]:
        """What was typed, and the policy: constructor options of ACE."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Loading:
    """Where a model is loaded, and as what."""

    device: opt.Device = None
    dtype: Annotated[str, option("Precision to load in: float32, bfloat16, float16, or the checkpoint's own.")] = "auto"
    device_map: Annotated[
        str | None, option("Instead of --device: auto spreads a model over GPUs and host memory.")
    ] = None
    expand: opt.Expand = False

    def load(self, model: str) -> PreTrainedModel:
        from ..checkpoint.loading import load_model

        return load_model(model, **asdict(self))

    def load_both(self, model: str) -> tuple[Any, PreTrainedModel]:
        """Tokenizer and model."""
        from ..checkpoint.loading import load_tokenizer

        return load_tokenizer(model), self.load(model)
