"""What a policy is: a small frozen dataclass that decides slots. A token policy writes `contribution` alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from .. import rule
from ..errors import PolicyError
from ..rule import GAINS, Gain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..text import Windows

COMMON = ("gain", "min_active", "min_mass")
Mapped = Literal["quantile", "search"]
Tables = dict[str, dict[str, Tensor]]  # by layer key, then by name


class Routing(NamedTuple):
    """What a layer's router said of T tokens: ids, gates [T, k]; what some policies need beside is optional."""

    ids: Tensor
    gates: Tensor
    tables: Mapping[str, Tensor]
    threshold: Tensor
    logits: Tensor | None = None
    hidden: Tensor | None = None
    token_mask: Tensor | None = None
    length: int = 0  # tokens of one sequence in this pass; 0 if unknown: then the pass counts as one sequence
    norms: Callable[[], Tensor] | None = None  # ‖f_e(x)‖ of every slot, [T, k]: runs every slot's expert


class Decision(NamedTuple):
    """ids and gates [T, k] to run, and keep [T, k]: False where nothing runs."""

    ids: Tensor
    gates: Tensor
    keep: Tensor


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """A method that decides slots. Safeguards and gain are common to all; other fields are its own parameters.

    Its one knob is the threshold: 0 returns the router's own slots, larger skips more. The defaults of a subclass are
    the cited method's; what its sources do not say is named in its docstring.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()  # tables
    needs_logits: ClassVar[bool] = False  # what the router module returns first, [T, E]
    needs_norms: ClassVar[bool] = False  # ‖f_e(x)‖ of every slot
    token_local: ClassVar[bool] = False  # whether a token is decided by itself, whatever its batch or sequence
    calibrated: ClassVar[bool] = False  # whether `calibrate` makes some of its tables
    mapping: ClassVar[Mapped] = "search"  # how a budget becomes a threshold
    limits: ClassVar[str] = ""  # why a budget may be missed, for messages

    gain: Gain = "power"
    min_active: int = 1
    min_mass: float = 0.0

    def __post_init__(self) -> None:
        if self.gain not in GAINS:
            raise PolicyError(f"gain must be one of {', '.join(GAINS)}, not {self.gain!r}.")
        if not isinstance(self.min_active, int) or self.min_active < 1:
            raise PolicyError(f"min_active must be a whole number of at least 1, not {self.min_active!r}.")
        if not isinstance(self.min_mass, (int, float)) or not 0 <= self.min_mass <= 1:
            raise PolicyError(f"min_mass is a share of the gate mass: 0 to 1, not {self.min_mass!r}.")

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

    def calibrate(self, model: PreTrainedModel, windows: Windows | None) -> Tables:
        """The tables that need a running model, by layer; names start with the policy's. The model is left as it was."""
        return {}

    def guarded(self, routing: Routing, keep: Tensor) -> Tensor:
        """keep [T, k] and what the safeguards add, for policies that have no contribution: those go by gate share."""
        own = rule.share(routing.gates)
        return keep | rule.protect(own, routing.gates, routing.ids, self.min_active, self.min_mass).isinf()

    def skip(self, routing: Routing, keep: Tensor) -> Decision:
        """The decision that runs the slots in `keep` and no others."""
        return Decision(routing.ids, rule.rescale(routing.gates, keep, self.gain), keep)

    def reroute(self, routing: Routing, ids: Tensor, gates: Tensor, keep: Tensor) -> Decision:
        """The decision that runs other slots than the routed ones: the gain compares their gates with the router's."""
        before, after = routing.gates.float(), torch.where(keep, gates.float(), 0.0)
        scaled = after * _gain_between(before, after, self.gain)
        changed = (~keep | (ids != routing.ids)).any(-1, keepdim=True)
        return Decision(ids, torch.where(changed, scaled.to(routing.gates.dtype), routing.gates), keep)


def _gain_between(before: Tensor, after: Tensor, gain: Gain) -> Tensor:
    """`rule.gain_factor` for gates that were changed as well as left out; [T, 1]."""
    if gain == "none":
        return torch.ones_like(before[..., :1])
    power = 2 if gain == "power" else 1
    every, kept = (g.pow(power).sum(-1, keepdim=True) for g in (before, after))
    factor = torch.where(kept > 0, every / kept, 1.0)
    return factor.sqrt() if gain == "power" else factor


@dataclass(frozen=True, kw_only=True)
class TokenPolicy(Policy):
    """Decides each token by itself: skip the slots whose contribution is under the threshold."""

    mapping: ClassVar[Mapped] = "quantile"
    token_local: ClassVar[bool] = True

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
