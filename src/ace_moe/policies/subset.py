"""Policies that allow a subset of the experts and re-select inside it, and how a pass is cut into groups of tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import PolicyError
from .base import Decision, Policy, Routing
from .scores import reselect


@dataclass(frozen=True, kw_only=True)
class SubsetPolicy(Policy):
    """Slots of experts outside the subset are filled again from inside it, as a router without their rows would do.

    `refill=False` is another method by the same subset: such slots are skipped, the top gate excepted.
    """

    needs_logits: ClassVar[bool] = True
    limits: ClassVar[str] = (
        "it fills the slots of excluded experts with others, so a token runs k experts as long as k are left; "
        "refill=False skips those slots instead"
    )

    refill: bool = True

    @abstractmethod
    def allowed(self, routing: Routing) -> Tensor:
        """[T or 1, E] bool: the experts a token may run."""

    def route(self, routing: Routing) -> Decision:
        allowed = self.allowed(routing)
        if self.refill:
            return self.reroute(routing, *reselect(routing, allowed))
        inside = allowed.expand(len(routing.ids), -1).gather(-1, routing.ids)
        return self.skip(routing, self.guarded(routing, inside))


@dataclass(frozen=True, kw_only=True)
class BatchPolicy(SubsetPolicy):
    """One subset for `group` consecutive tokens; 0 takes the whole pass, as these methods do for a decoding batch."""

    limits: ClassVar[str] = (
        SubsetPolicy.limits + "; a pass of many tokens also needs nearly all experts, and group=16 decides as "
        "a decoding batch of 16 would"
    )

    group: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group(self.group)


def check_group(group: object) -> None:
    if not isinstance(group, int) or group < 0:
        raise PolicyError(f"group is a number of tokens, or 0 for the whole pass; not {group!r}.")


def group_of(tokens: int, group: int, device: torch.device) -> Tensor:
    """The group of each token, [T]."""
    return torch.arange(tokens, device=device) // (group or max(tokens, 1))


def group_sum(values: Tensor, routing: Routing, group: int) -> Tensor:
    """values [T, E] summed over each token's group, padding left out, given back to each token: [T, E]."""
    if routing.token_mask is not None:
        values = values * routing.token_mask.unsqueeze(-1)
    index = group_of(len(values), group, values.device)
    groups = -(-len(values) // (group or max(len(values), 1)))
    return values.new_zeros(groups, values.shape[-1]).index_add(0, index, values)[index]


def marked(ids: Tensor, mark: Tensor, experts: int) -> Tensor:
    """[T, E]: 1 at the experts of the slots in `mark` [T, k]."""
    return torch.zeros(len(ids), experts, device=ids.device).scatter_add(-1, ids, mark.float()).clamp(max=1)
