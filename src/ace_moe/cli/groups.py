"""Options that many commands have, together as one parameter: what decides slots, and how a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from . import options as opt
from .common import AUTO, app
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


def command(name: str | None = None, **about: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `app.command`, for functions that take groups; Python calls them as they are written."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        app.command(name, **about)(_flat(function))
        return function

    return register


def _flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an option for each field of its groups, behind its own."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    own = [p.replace(annotation=hints[n]) for n, p in inspect.signature(function).parameters.items() if n not in groups]

    @wraps(function)
    def flat(**given: Any) -> Any:
        made = {n: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for n, kind in groups.items()}  # type: ignore[operator]
        return function(**given, **made)

    parameters = [*own, *(p for kind in groups.values() for p in _parameters(kind))]
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints, kind = get_type_hints(group, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(group)]
