"""One MoE layer's share of a running policy: tables, threshold and counters, on the layer's device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .budget import Histogram
from .dispatch import FastPath
from .errors import PlanError
from .plan import missing_table
from .policies import Decision, Policy, Routing, TokenPolicy
from .policies.calibration import answers

PREFILL, DECODE = 0, 1


@dataclass
class Step:
    """What the model is doing now, shared by its layers: the phase and, if given, which tokens are not padding."""

    phase: int = PREFILL
    tokens: int = 0
    attention_mask: Tensor | None = None
    masked: bool = True  # False once a pass came without a 2-D mask: then every token was counted

    def token_mask(self, tokens: int) -> Tensor | None:
        """[T] bool from the last columns of a 2-D attention mask [B, S]."""
        mask = self.attention_mask
        if mask is None or mask.shape[0] * self.tokens != tokens:
            return None
        return mask[:, -self.tokens :].reshape(-1) != 0

    def length(self, tokens: int) -> int:
        """Tokens of one sequence where `tokens` are whole sequences of this pass, else 0."""
        return self.tokens if self.tokens and tokens % self.tokens == 0 else 0


class Skipper(nn.Module):
    """Decides the slots of one layer and counts them. τ and tables are buffers: changing a budget recompiles nothing."""

    threshold: Tensor
    counts: Tensor

    def __init__(self, key: str, policy: Policy, tables: dict[str, Tensor], step: Step):
        super().__init__()
        self.key, self.policy, self.step = key, policy, step
        self.observer: Histogram | None = None
        self.fast: FastPath | None = None  # kernels for the rule and the experts, where they can run
        self.owner: tuple[nn.Module, ...] = ()  # the experts module, in a tuple so that it is not taken for a child
        self.logits: Tensor | None = None  # the router's, set by a hook where the policy needs them
        self.register_buffer("threshold", torch.zeros(2, dtype=torch.float32), persistent=False)
        self.register_buffer("counts", torch.zeros(2, 2, dtype=torch.int64), persistent=False)
        self.table_names = policy.needs
        for name in policy.needs:
            if name not in tables:
                raise PlanError(missing_table(policy.name, name, policy.calibrated))
            self.register_buffer(f"table_{name}", tables[name].float().clone(), persistent=False)

    def forward(self, hidden: Tensor, ids: Tensor, gates: Tensor, sentinel: int) -> tuple[Tensor, Tensor]:
        """hidden [T, d], ids, gates [T, k] → ids, gates for the dispatch, `sentinel` in place of skipped experts."""
        phase, token_mask = self.step.phase, self.step.token_mask(ids.shape[0])
        tables = {name: getattr(self, f"table_{name}") for name in self.table_names}
        norms = partial(self._norms, hidden, ids) if self.policy.needs_norms else None
        length = 0 if self.policy.token_local else self.step.length(ids.shape[0])
        routing = Routing(
            ids, gates, tables, self.threshold[phase], self.logits, hidden, token_mask, length=length, norms=norms
        )
        if self.fast is not None and self.observer is None:
            return self.fast.rule(routing, self.counts[phase], sentinel)
        decision = self._decide(routing)
        self.count(decision.keep, phase, token_mask)
        return torch.where(decision.keep, decision.ids, sentinel), decision.gates

    def _decide(self, routing: Routing) -> Decision:
        if self.observer is None or not isinstance(self.policy, TokenPolicy):
            return self.policy.route(routing)
        protected = self.policy.protected(routing)
        self.observer.add(protected, routing.token_mask)
        return self.policy.settle(routing, protected)

    def _norms(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """‖f_e(x)‖ of every slot, [T, k], by the experts themselves."""
        return answers(self.owner[0], hidden, ids).norm(dim=-1)

    def count(self, keep: Tensor, phase: int, token_mask: Tensor | None) -> None:
        """Routed and kept slots of real tokens, without a host sync."""
        real = torch.ones_like(keep) if token_mask is None else token_mask.unsqueeze(-1).expand_as(keep)
        self.counts[phase] += torch.stack([real.sum(), (keep & real).sum()])
