"""What a policy is: a small frozen dataclass that decides slots. A token policy writes `contribution` alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from .. import rule
from ..errors import BudgetError
from ..rule import GAINS, Gain

COMMON = ("gain", "min_active", "min_mass")


class Routing(NamedTuple):
    """What a layer's router said of T tokens: ids, gates [T, k]; what some policies need beside is optional."""

    ids: Tensor
    gates: Tensor
    tables: Mapping[str, Tensor]
    threshold: Tensor
    logits: Tensor | None = None
    hidden: Tensor | None = None
    token_mask: Tensor | None = None


class Decision(NamedTuple):
    """ids and gates [T, k] to run, and keep [T, k]: False where nothing runs."""

    ids: Tensor
    gates: Tensor
    keep: Tensor


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """A method that decides slots. Safeguards and gain are common to all; other fields are its own parameters."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()  # tables
    needs_logits: ClassVar[bool] = False  # what the router module returns first, [T, E]

    gain: Gain = "power"
    min_active: int = 1
    min_mass: float = 0.0

    def __post_init__(self) -> None:
        if self.gain not in GAINS:
            raise BudgetError(f"gain must be one of {', '.join(GAINS)}, not {self.gain!r}.")
        if not isinstance(self.min_active, int) or self.min_active < 1:
            raise BudgetError(f"min_active must be a whole number of at least 1, not {self.min_active!r}.")
        if not isinstance(self.min_mass, (int, float)) or not 0 <= self.min_mass <= 1:
            raise BudgetError(f"min_mass is a share of the gate mass: 0 to 1, not {self.min_mass!r}.")

    @property
    def params(self) -> dict[str, Any]:
        """The policy's own parameters, without gain and safeguards."""
        return {k: v for k, v in asdict(self).items() if k not in COMMON}

    @property
    def own_settings(self) -> dict[str, Any]:
        """All fields: what makes this policy again."""
        return asdict(self)

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides whether a threshold fits this policy."""
        return {"policy": self.name, "params": self.params} | {k: getattr(self, k) for k in COMMON}

    @abstractmethod
    def route(self, routing: Routing) -> Decision: ...


@dataclass(frozen=True, kw_only=True)
class TokenPolicy(Policy):
    """Decides each token by itself: skip the slots whose contribution is under the threshold."""

    @abstractmethod
    def contribution(self, routing: Routing) -> Tensor:
        """[T, k] in [0, 1]; higher = keep."""

    def protected(self, routing: Routing) -> Tensor:
        """Contributions with +∞ at the slots the safeguards keep."""
        c = self.contribution(routing)
        return rule.protect(c, routing.gates, routing.ids, self.min_active, self.min_mass)

    def route(self, routing: Routing) -> Decision:
        return self.settle(routing, self.protected(routing))

    def settle(self, routing: Routing, protected: Tensor) -> Decision:
        keep, gates = rule.decide(protected, routing.gates, routing.threshold, self.gain)
        return Decision(routing.ids, gates, keep)


def parameters_of(cls: type[Policy]) -> list[str]:
    return [f.name for f in fields(cls)]
