"""The decider of one MoE layer: routing in; ids, gates and counts out. The same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .. import rule
from ..errors import IntegrationError, PlanError
from ..plan import missing_table
from ..policies import Decision, Policy, Routing, TokenPolicy
from ..policies.records import Extras
from .executors import Chosen
from .rows import PHASES, Same, Tokens, row_of
from .state import State

if TYPE_CHECKING:
    from ..kernels.routing import TopK

Observer = Callable[[Routing, Tensor | None, Decision], None]  # protected contributions, if the policy has such
Trace = Callable[[Tensor, Tensor], None]  # ids and gates as the router gave them


def refuse_pickling(self: Any, protocol: Any) -> Any:
    raise IntegrationError(
        "A model with a plan attached cannot be pickled (torch.save of the whole model). Detach it first, or save its "
        "state_dict or with save_pretrained: those do not hold the plan."
    )


class Decider(nn.Module):
    """Decide the slots of one layer by a policy, and count them. Made whole for one attachment; changed by its methods.

    Tables, τ and counters are buffers that are written in place: another budget recompiles nothing. `tokens` says what each
    token is. A skipped slot gets the id `skipped`, by default one past the last expert. `kernels`: the policy's rule runs as a
    kernel if it has one, through a torch operator for a compiler to see (`opaque`) or launched directly. `votes`: experts that
    a step reads are counted, and slots restored where the state says so.
    """

    tau: Tensor  # [R], shared by all layers on a device
    free: Tensor  # [R] int8, shared: token classes whose slots are restored
    counts: Tensor  # [R, 3]: routed, kept by the rule, restored
    reads: Tensor  # [2, 2]: experts read and asked for, in steps of generated tokens and in those with prompts
    factor: Tensor  # [3]: the rule's own factor, the layer's, and the gain where it is a number

    def __init__(
        self,
        key: str,
        policy: Policy,
        tables: Mapping[str, Tensor],
        state: State,
        *,
        experts: int,
        top_k: int = 1,
        skipped: int | None = None,
        tokens: Tokens | None = None,
        device: torch.device | str = "cpu",
        guarded: bool = False,
        kernels: bool = False,
        opaque: bool = True,
        votes: bool = False,
        trace: Trace | None = None,
        extras: Extras | None = None,
    ):
        super().__init__()
        self.training = False
        self.key, self.policy, self.state = key, policy, state
        self.experts, self.top_k, self.votes = experts, top_k, votes
        self.skipped = experts if skipped is None else skipped
        self.tokens: Tokens = Same(row_of("prefill")) if tokens is None else tokens
        self.trace, self.extras = trace, extras
        self.observers: list[Observer] = []
        self.chosen: Chosen | None = None
        self.place: Literal["experts", "router"] = "experts"
        self.after: Callable[[], None] | None = None
        self.table_names = policy.tables  # read here: a compiler does not see through every property
        self.weighed = policy.factor is not None
        with torch.inference_mode(False):
            self._make_buffers(tables, guarded, torch.device(device))
        self.kernel = _Kernel.of(policy, opaque) if kernels else None

    def _make_buffers(self, tables: Mapping[str, Tensor], guarded: bool, device: torch.device) -> None:
        policy, form = self.policy, self.policy.kernel_rule()
        for name in policy.tables:
            if name not in tables:
                raise PlanError(missing_table(policy.key, name))
            table = tables[name].detach().to(device, torch.float32, copy=True).contiguous()
            self._keep(f"table_{name}", policy.ready(name, table) if name in policy.needs else table)
        own = tables[form.factor] if form is not None and form.factor else 1.0
        common = torch.inf if guarded else tables[policy.factor] if policy.factor else 1.0
        named = policy.gain in rule.GAINS
        gain = 1.0 if named else tables[policy.gain] if policy.gain in tables else float(policy.gain)
        self._keep("factor", torch.tensor([float(own), float(common), float(gain)], dtype=torch.float32, device=device))
        self._keep("counts", torch.zeros(len(self.state.tau), 3, dtype=torch.int64, device=device))
        self._keep("reads", torch.zeros(2, 2, dtype=torch.int64, device=device))
        shared = self.state.on(device)
        self._keep("tau", shared.tau)
        self._keep("free", shared.free)

    def _keep(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)

    # ---- changed while attached ---------------------------------------------------------------------------------

    def run_by(self, chosen: Chosen) -> None:
        """Run the slots that are left by this executor."""
        self.chosen = chosen

    def decide_at_router(self) -> None:
        """Decide where the router is, in one kernel with its top-k, and leave the experts' ids alone."""
        self.place = "router"

    def weigh(self, factor: float) -> None:
        """Multiply this layer's contributions by another factor from now on; ∞ keeps every slot."""
        self.weighed = True
        self.factor[1] = factor

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Show the observer every decision, which is taken in torch then; returns what ends it."""
        self.observers.append(observer)
        return lambda: self.observers.remove(observer)

    # ---- deciding -----------------------------------------------------------------------------------------------

    def decide(self, ids: Tensor, gates: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ids, gates [T, k] as the router gave them → what runs: `skipped` and 0 at skipped slots. No host sync.

        `hidden` [T, d], the experts' input, is for policies and observers that look at it.
        """
        rows = self.tokens.rows(ids.shape[0], ids.device)
        if self.trace is not None:
            self.trace(ids, gates)
        if self.kernel is not None and not self.observers:
            arguments = (ids, gates, rows, self.tau, self.factor, self._kernel_tables(), self._counter(), self.skipped)
            ids, gates = self.kernel.rule(*arguments, self.kernel.settings, self._voting(), self.experts)
        else:
            decision = self._in_torch(ids, gates, rows, hidden)
            ids, gates = torch.where(decision.keep, decision.ids, self.skipped), decision.gates
        if self.after is not None:
            self.after()
        return ids, gates

    def route(
        self, logits: Tensor, kind: TopK, dtype: torch.dtype, ids_dtype: torch.dtype = torch.int64
    ) -> tuple[Tensor, Tensor]:
        """The same from a plain router's logits [T, E], in one launch."""
        assert self.kernel is not None
        rows = self.tokens.rows(logits.shape[0], logits.device)
        arguments = (logits, rows, self.tau, self.factor, self._kernel_tables(), self._counter(), self.skipped)
        ids, gates = self.kernel.route(*arguments, self.kernel.settings, *kind, dtype, ids_dtype, self._voting())
        if self.after is not None:
            self.after()
        return ids, gates

    def _voting(self) -> list[Tensor]:
        if not self.votes or not self.tokens.generating:
            return []
        return [self.free, self.reads if self.tokens.counting else torch.zeros_like(self.reads)]

    def _kernel_tables(self) -> list[Tensor]:
        assert self.kernel is not None
        return [getattr(self, name) for name in self.kernel.tables]

    def _counter(self) -> Tensor:
        return self.counts if self.tokens.counting else torch.zeros_like(self.counts)

    def _in_torch(self, ids: Tensor, gates: Tensor, rows: Tensor, hidden: Tensor | None) -> Decision:
        """Decide by the policy's own `route`. Padding has τ = 0: its slots stay the router's own."""
        routing = Routing(
            ids,
            gates,
            self._tables(),
            self.tau[rows.long()].unsqueeze(-1),
            hidden,
            rows > 0,
            factor=self.factor[1] if self.weighed else None,
            constant=None if self.policy.gain in rule.GAINS else self.factor[2],
            extras=self.extras,
        )
        protected = self.protected(routing) if self.observers and isinstance(self.policy, TokenPolicy) else None
        decision = self.policy.route(routing)
        for observer in self.observers:
            observer(routing, protected, decision)
        kept = decision.keep
        if self.votes and self.tokens.generating:
            decision = self._restored(routing, decision, rows)
        self._count(kept, decision.keep, rows)
        return decision

    def _restored(self, routing: Routing, decision: Decision, rows: Tensor) -> Decision:
        """Give slots back whose expert the step reads anyway, and count the experts read."""
        ids, real = routing.ids, (rows > 0).unsqueeze(-1) & (routing.ids >= 0)
        read = rule.union(ids, decision.keep & real, self.experts)
        if self.tokens.counting:
            asked, prompt = rule.union(ids, real, self.experts), ((rows > 0) & (rows % len(PHASES) == 1)).any()
            seen = torch.stack([read.sum(), asked.sum()])
            self.reads.index_add_(0, prompt.long().view(1), seen.view(1, 2))
        keep = rule.restore(decision.keep, ids, read, self.free[rows.long()] > 0)
        return self.policy.skip(routing, keep)

    def _count(self, keep: Tensor, runs: Tensor, rows: Tensor) -> None:
        """Count routed, kept and restored slots of real tokens by class, without a host sync."""
        if not self.tokens.counting:
            return
        kept = keep.sum(-1)
        back = runs.sum(-1) - kept if runs is not keep else torch.zeros_like(kept)
        seen = torch.stack([torch.full_like(kept, keep.shape[-1]), kept, back], -1)
        self.counts.index_add_(0, rows.long(), seen * (rows > 0).unsqueeze(-1))

    def _tables(self) -> dict[str, Tensor]:
        return {name: getattr(self, f"table_{name}") for name in self.table_names}

    def protected(self, routing: Routing) -> Tensor:
        """Protected contributions [T, k] that this layer's policy gives slots, also slots another policy decides."""
        assert isinstance(self.policy, TokenPolicy)
        factor = self.factor[1] if self.weighed else None
        return self.policy.protected(routing._replace(tables=self._tables(), factor=factor, extras=self.extras))

    # ---- as a module --------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decider:
        """`.to(…)` of the model moves a decider; it never changes its precision."""
        device = fn(torch.empty(0, device=self.counts.device)).device
        if device != self.counts.device and device.type != "meta":
            with torch.inference_mode(False):
                shared = self.state.on(device)._asdict()
                for name, buffer in self._buffers.items():
                    self._buffers[name] = shared[name] if name in shared else buffer.to(device)  # type: ignore[union-attr]
        return self

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of an attached model is a model without a plan."""

    __reduce_ex__ = refuse_pickling


class _Kernel:
    """A policy's rule as the kernels run it: what they are told, the buffers they read, and how they are called."""

    def __init__(self, settings: str, tables: tuple[str, ...], rule: Callable[..., Any], route: Callable[..., Any]):
        self.settings, self.tables, self.rule, self.route = settings, tables, rule, route

    @classmethod
    def of(cls, policy: Policy, opaque: bool) -> _Kernel | None:
        """None for a policy that is not written down as a form."""
        form = policy.kernel_rule()
        if form is None:
            return None
        from ..kernels import decide

        gain = policy.gain if policy.gain in rule.GAINS else rule.CONSTANT
        weighed = policy.factor is not None or form.factor is not None
        settings = str(decide.Rule(form, gain, policy.min_active, policy.min_mass, weighed))
        tables = tuple(f"table_{name}" for name in form.tables)
        if opaque:
            return cls(settings, tables, decide.rule, decide.route)
        return cls(settings, tables, decide.launch_rule, decide.launch_route)
