"""What a policy is: a small frozen dataclass that decides slots. A token policy writes a form, or `contribution`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from .. import rule
from ..errors import PolicyError
from ..rule import GAINS, Form, Gain
from .records import Decision, Extras, Routing, Site, Tables

__all__ = ["Decision", "Extras", "Policy", "Routing", "Site", "Tables", "TokenPolicy"]

COMMON = ("gain", "min_active", "min_mass", "factor")
PACKAGE = __package__.partition(".")[0]
GAIN_TABLE = "gain_"  # what a table begins with that has one gain for each layer
MOST_GAIN = 4.0
Mapped = Literal["quantile", "search"]


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """A method that decides slots. Safeguards and gain are common to all; other fields are its own parameters.

    Its one knob is the threshold: 0 returns the router's own slots, larger skips more. The defaults of a subclass are
    the cited method's; what its sources do not say is named in its docstring.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()  # tables
    mapping: ClassVar[Mapped] = "search"  # how a budget becomes a threshold
    stepwise: ClassVar[bool] = False  # whether its ratios come in steps of 1/k
    limits: ClassVar[str] = ""  # why a budget may be missed, for messages

    gain: Gain = "power"
    min_active: int = 1
    min_mass: float = 0.0
    factor: str | None = None  # a table with one number a layer that contributions are multiplied by

    def __post_init__(self) -> None:
        object.__setattr__(self, "gain", _named(self.gain))
        if not isinstance(self.min_active, int) or self.min_active < 1:
            raise PolicyError(f"min_active must be a whole number of at least 1, not {self.min_active!r}.")
        if not isinstance(self.min_mass, (int, float)) or not 0 <= self.min_mass <= 1:
            raise PolicyError(f"min_mass is a share of the gate mass: 0 to 1, not {self.min_mass!r}.")
        if self.factor is not None and not (isinstance(self.factor, str) and isinstance(self, TokenPolicy)):
            raise PolicyError(
                f"factor names a table that weighs the layers of a token policy, not {self.factor!r} here."
            )
        for name in (f.name for f in fields(self) if f.type in (bool, "bool")):
            if not isinstance(getattr(self, name), bool):  # "False", as Python spells it, would count as true
                raise PolicyError(f"{name} is true or false, not {getattr(self, name)!r}.")

    @property
    def params(self) -> dict[str, Any]:
        """The policy's own parameters, without gain and safeguards."""
        return {k: v for k, v in asdict(self).items() if k not in COMMON}

    @property
    def key(self) -> str:
        """The name in plans and results: of a class outside this package `module:Class`, so that none is taken for ours."""
        cls = type(self)
        ours = cls.__module__.partition(".")[0] == PACKAGE
        return cls.name if ours else f"{cls.__module__}:{cls.__qualname__}"

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides whether a threshold fits this policy."""
        return {"policy": self.key, "params": self.params} | {k: getattr(self, k) for k in COMMON}

    @property
    def tables(self) -> tuple[str, ...]:
        """All tables a layer must have: the method's own, the factor's and the gain's."""
        further = (self.factor, self.gain if self.gain.startswith(GAIN_TABLE) else None)
        return (*self.needs, *(name for name in further if name is not None))

    @property
    def by_token(self) -> bool:
        """Whether it decides each token from its gates and tables alone: what every engine can run."""
        return isinstance(self, TokenPolicy) and type(self).extras is Policy.extras

    def ready(self, name: str, table: Tensor) -> Tensor:
        """A table as the method uses it; made once for each layer."""
        return table

    def kernel_rule(self) -> Form | None:
        """How the kernels can decide in this policy's place; None where they cannot."""
        return None

    @abstractmethod
    def route(self, routing: Routing) -> Decision: ...

    def extras(self, model: nn.Module, site: Site) -> Extras | None:
        """What the policy gathers in one layer of this model for itself, given back to it as `routing.extras`; None for most.

        A method that looks at router logits, expert outputs or sequences puts its own hooks into the model here, so that
        nothing which runs and serves has to know of them. It is called when a plan is attached; detaching calls `remove`.
        """
        return None

    def skip(self, routing: Routing, keep: Tensor) -> Decision:
        """The decision that runs the slots in `keep` and no others."""
        return Decision(routing.ids, rule.rescale(routing.gates, keep, self.gain, routing.constant), keep)


def _named(gain: object) -> Gain:
    """A gain as plans write it: a number is its shortest text."""
    if isinstance(gain, str) and (gain in GAINS or gain.startswith(GAIN_TABLE)):
        return gain
    try:
        value = float(gain)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = -1.0
    if isinstance(gain, bool) or not 0 < value <= MOST_GAIN:
        raise PolicyError(
            f"gain must be one of {', '.join(GAINS)}, a number above 0 and up to {MOST_GAIN:g}, or a table {GAIN_TABLE}… of the "
            f"plan; not {gain!r}."
        )
    return f"{value:g}"


@dataclass(frozen=True, kw_only=True)
class TokenPolicy(Policy):
    """Decides each token by itself: skip the slots whose contribution is under the threshold."""

    mapping: ClassVar[Mapped] = "quantile"

    @property
    def form(self) -> Form | None:
        """The contribution written down; a policy has this or a `contribution` of its own, never both."""
        return None

    def contribution(self, routing: Routing) -> Tensor:
        """[T, k] in [0, 1]; higher = keep."""
        if self.form is None:
            raise NotImplementedError(f"{type(self).__name__} must have a `form` or a `contribution`.")
        tables = {name: self.ready(name, routing.tables[name]) for name in self.needs}
        return rule.contribution(self.form, routing.gates, routing.ids, tables)

    def protected(self, routing: Routing) -> Tensor:
        """Contributions with +∞ at the slots the safeguards keep."""
        c = self.contribution(routing)
        c = rule.protect(c, routing.gates, routing.ids, self.min_active, self.min_mass)
        return c if routing.factor is None else rule.weigh(c, routing.factor)

    def route(self, routing: Routing) -> Decision:
        return self.settle(routing, self.protected(routing))

    def settle(self, routing: Routing, protected: Tensor) -> Decision:
        return self.skip(routing, rule.kept(protected, routing.threshold))

    def kernel_rule(self) -> Form | None:
        """The form, if nothing of the rule around it was changed: a subclass that overrides a step is really called."""
        steps = ("contribution", "protected", "settle", "skip", "route")
        plain = all(getattr(type(self), step) is getattr(TokenPolicy, step) for step in steps)
        return self.form if plain and self.by_token else None
