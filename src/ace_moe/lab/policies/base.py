"""What the lab's methods share: what they gather beside gates and tables, and decisions that no contribution makes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from ... import rule
from ...engines.transformers.modules import stack_of
from ...errors import IntegrationError
from ...policies import Decision, Policy, Routing
from ...policies.records import Site
from .calls import answers, router_logits


class Context:
    """What one layer's router says and its experts answer, for the policy that decides there.

    `logits`: keep what the router says of every expert; `sequences`: keep how long the sequences of a pass are.
    """

    def __init__(self, model: nn.Module, site: Site, *, logits: bool = False, sequences: bool = False):
        self.experts = site.num_experts
        self.logits: Tensor | None = None  # [T, E]
        self.length = 0  # tokens of a sequence; 0 where a pass lays sequences one behind the other
        self._module = ref(model.get_submodule(site.path))
        self._known: tuple[Tensor, Tensor] | None = None  # ids, and the norms of their outputs
        self._hooks = [self._hook_router(model, site)] if logits else []
        self._hooks += [self._hook_stack(model, site)] if sequences else []

    def _hook_router(self, model: nn.Module, site: Site) -> Any:
        if site.router_path is None:
            raise IntegrationError(
                f"This policy needs router logits, and {site.path} has no router module. Policies that read gates alone, such "
                "as 'share', work."
            )

        def hook(
            module: nn.Module, args: Any, output: Any
        ) -> None:  # a function: copies of the model do not copy the context
            self.logits = router_logits(output, site.num_experts)

        return model.get_submodule(site.router_path).register_forward_hook(hook)

    def _hook_stack(self, model: nn.Module, site: Site) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
            tokens = next((x for x in given if isinstance(x, Tensor)), None)
            packed = tokens is None or kwargs.get("cu_seq_lens_q") is not None
            self.length = 0 if packed else int(cast(Tensor, tokens).shape[1])

        return stack_of(model, site.path)[1].register_forward_pre_hook(hook, with_kwargs=True)

    def length_of(self, tokens: int) -> int:
        """Tokens of one sequence where so many tokens are whole sequences; else they count as one."""
        return self.length if self.length and tokens % self.length == 0 else max(tokens, 1)

    def norms(self, routing: Routing) -> Tensor:
        """‖f_e(x)‖ of every slot, [T, k], by the experts themselves; once for the policies that look at one routing."""
        if self._known is None or self._known[0] is not routing.ids:
            module = self._module()
            assert module is not None and routing.hidden is not None
            self._known = routing.ids, answers(module, routing.hidden, routing.ids).norm(dim=-1)
        return self._known[1]

    def remove(self) -> None:
        """Take the hooks out of the model."""
        for hook in self._hooks:
            hook.remove()


def context(routing: Routing) -> Context:
    """What the policy gathered in this layer."""
    assert routing.extras is not None
    return cast(Context, routing.extras)


def logits_of(routing: Routing) -> Tensor:
    """The router's logits [T, E]."""
    logits = context(routing).logits
    assert logits is not None
    return logits


# ---- decisions without contributions ------------------------------------------------------------------------------------


def guarded(policy: Policy, routing: Routing, keep: Tensor) -> Tensor:
    """keep [T, k] and what the safeguards add, by gate share."""
    own = rule.share(routing.gates)
    return keep | rule.protect(own, routing.gates, routing.ids, policy.min_active, policy.min_mass).isinf()


def reroute(policy: Policy, routing: Routing, ids: Tensor, gates: Tensor, keep: Tensor) -> Decision:
    """The decision that runs other slots than the routed ones: the gain compares their gates with the router's."""
    before, after = routing.gates.float(), torch.where(keep, gates.float(), 0.0)
    scaled = after * rule.gain_factor(before, after, policy.gain, routing.constant)
    changed = (~keep | (ids != routing.ids)).any(-1, keepdim=True)
    return Decision(ids, torch.where(changed, scaled.to(routing.gates.dtype), routing.gates), keep)


@dataclass(frozen=True, kw_only=True)
class PassPolicy(Policy):
    """Decides all tokens of a pass together by one threshold: the largest of theirs, as padding has 0."""

    def route(self, routing: Routing) -> Decision:
        each = routing.threshold.flatten()
        return self.together(routing._replace(threshold=torch.cat([each.new_zeros(1), each]).max()))

    @abstractmethod
    def together(self, routing: Routing) -> Decision:
        """The decision at `routing.threshold`, one number."""
