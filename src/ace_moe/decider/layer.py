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
from ..policies.base import MEAN
from ..policies.records import Extras
from .executors import Chosen
from .rows import PHASES, Same, Tokens, row_of
from .state import State

if TYPE_CHECKING:
    from ..kernels.routing import TopK

Observer = Callable[[Routing, Tensor | None, Decision], None]  # what a token policy's slots contributed, if it is one


def refuse_pickling(self: Any, protocol: Any) -> Any:
    raise IntegrationError(
        "A model with a plan attached cannot be pickled (torch.save of the whole model). Detach it first, or save its "
        "state_dict or with save_pretrained: those do not hold the plan."
    )


class Layer(nn.Module):
    """Tables, τ, counters and rule of one layer. All are buffers: changing a budget recompiles nothing.

    `mark` is the id of a skipped slot. `tokens` says what each token is. `kernels`: the rule is a kernel where the policy
    has one; `opaque`: through a torch operator, as a compiler that looks on needs it. `votes`: whether experts that a step
    reads are counted, and slots restored where the state says so; that needs the number of experts.
    """

    tau: Tensor
    free: Tensor
    counts: Tensor
    reads: Tensor
    factor: Tensor
    table_mean_output: Tensor
    statistics: Tensor

    def __init__(
        self,
        key: str,
        policy: Policy,
        tables: Mapping[str, Tensor],
        state: State,
        mark: int,
        *,
        device: torch.device | str = "cpu",
        guarded: bool = False,
        kernels: bool = False,
        opaque: bool = True,
        votes: bool = False,
        experts: int = 1,
        width: int = 1,
        hidden: int = 1,
    ):
        super().__init__()
        self.training = False  # of a model that learns it is told when it is attached
        self.key, self.policy, self.state, self.mark = key, policy, state, mark
        self.votes, self.experts, self.width = votes, experts, width  # width: slots of a token
        self.tokens: Tokens = Same(row_of("prefill"))
        self.observers: list[Observer] = []  # while there are any, the layer decides in torch and shows them
        self.chosen: Chosen | None = None  # how the experts run
        self.at: Literal["experts", "router"] = "experts"  # where the rule is applied; fixed when a model is attached
        self.owner: Callable[[], nn.Module | None] = lambda: None  # the experts module, by a weak reference
        self.extras: Extras | None = None  # what the policy gathers for itself
        self.after: Callable[[], None] | None = None  # behind the last layer of a step
        self.trace: Callable[[Tensor, Tensor], None] | None = None  # given ids and gates as the router gave them
        with torch.inference_mode(False):
            self._make_buffers(tables, guarded, torch.device(device))
            if policy.aligned:  # [2, d]: scale and shift of skipped sums; without statistics those stay what they are
                self._keep("statistics", torch.tensor([[1.0], [0.0]], device=device).repeat(1, hidden))
        self.rule = ""  # the rule as the kernels take it
        self.views: tuple[str, ...] = ()  # its tables
        self._rule: Any = None
        self._route: Any = None
        if kernels:
            self._take_kernels(opaque)

    def _make_buffers(self, tables: Mapping[str, Tensor], guarded: bool, device: torch.device) -> None:
        policy = self.policy
        for name in policy.tables:
            if name not in tables:
                raise PlanError(missing_table(policy.key, name))
            # of a vector for each expert half the bytes will do: they are read for every skipped slot
            kind = torch.bfloat16 if name == MEAN and device.type == "cuda" else torch.float32
            table = tables[name].detach().to(device, kind, copy=True).contiguous()
            self._keep(f"table_{name}", policy.ready(name, table) if name in policy.needs else table)
        form = policy.kernel_rule()
        own = tables[form.factor] if form is not None and form.factor else 1.0
        common = torch.inf if guarded else tables[policy.factor] if policy.factor else 1.0
        self.names = policy.tables  # here, because a compiler that looks on does not see through every property
        self.weighed, self.compensates, self.aligned = policy.factor is not None, MEAN in self.names, policy.aligned
        gain = (
            1.0 if policy.gain in rule.GAINS else tables[policy.gain] if policy.gain in tables else float(policy.gain)
        )
        numbers = [float(own), float(common), float(gain)]
        self._keep("factor", torch.tensor(numbers, dtype=torch.float32, device=device))
        self._keep("counts", torch.zeros(len(self.state.tau), 3, dtype=torch.int64, device=device))
        self._keep("reads", torch.zeros(2, 2, dtype=torch.int64, device=device))
        shared = self.state.on(device)
        self._keep("tau", shared.tau)
        self._keep("free", shared.free)

    def _keep(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)

    def _take_kernels(self, opaque: bool) -> None:
        """The rule as a kernel, if the policy can be written down for it."""
        form = self.policy.kernel_rule()
        if form is None:
            return
        from ..kernels import decide

        policy, weighed = self.policy, self.weighed or form.factor is not None
        gain, coded = policy.gain if policy.gain in rule.GAINS else rule.CONSTANT, self.mean is not None
        self.rule = str(decide.Rule(form, gain, policy.min_active, policy.min_mass, weighed, coded))
        self.views = tuple(f"table_{name}" for name in form.tables)
        self._rule = decide.rule if opaque else decide.launch_rule
        self._route = decide.route if opaque else decide.launch_route

    # ---- deciding -----------------------------------------------------------------------------------------------

    @property
    def has_kernel(self) -> bool:
        return self._rule is not None

    @property
    def learning(self) -> bool:
        """Whether a backward pass follows, which kernels do not have."""
        return self.training and torch.is_grad_enabled()

    def decide(self, ids: Tensor, gates: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ids, gates [T, k] as the router gave them → what runs: `mark` and 0 at skipped slots. No host sync."""
        rows = self.tokens.rows(ids.shape[0], ids.device)
        if self.trace is not None:
            self.trace(ids, gates)
        if self._rule is not None and not (self.observers or self.learning):
            given = (ids, gates, rows, self.tau, self.factor, self._views(), self._counter(), self.mark, self.rule)
            found = self._rule(*given, self._voting(), self.experts)
        else:
            decision = self._in_torch(ids, gates, rows, hidden)
            found = torch.where(decision.keep, decision.ids, self.mark), decision.gates
            if self.mean is not None:
                found = rule.coded(*found, ids, gates, decision.keep)
        if self.after is not None:
            self.after()
        return found

    def route(
        self, logits: Tensor, kind: TopK, dtype: torch.dtype, ids_dtype: torch.dtype = torch.int64
    ) -> tuple[Tensor, Tensor]:
        """The same from a plain router's logits [T, E], in one launch."""
        rows = self.tokens.rows(logits.shape[0], logits.device)
        given = (logits, rows, self.tau, self.factor, self._views(), self._counter(), self.mark, self.rule)
        found = self._route(*given, *kind, dtype, ids_dtype, self._voting())
        if self.after is not None:
            self.after()
        return found

    def _voting(self) -> list[Tensor]:
        if not self.votes or not self.tokens.generating:
            return []
        return [self.free, self.reads if self.tokens.counting else torch.zeros_like(self.reads)]

    def _views(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.views]

    def _in_torch(self, ids: Tensor, gates: Tensor, rows: Tensor, hidden: Tensor | None) -> Decision:
        """By `rule.py`, and seen by an observer if there is one. Padding has τ = 0: its slots stay the router's own."""
        policy, routing = self.policy, self._routing(ids, gates, rows, hidden)
        protected = policy.protected(routing) if self.observers and isinstance(policy, TokenPolicy) else None
        decision = policy.route(routing)  # the policy's own way, also where a user's changes it
        for observer in self.observers:
            observer(routing, protected, decision)
        kept = decision.keep
        if self.votes and self.tokens.generating:
            decision = self._restored(routing, decision, rows)
        self._count(kept, decision.keep, rows)
        return decision

    def _restored(self, routing: Routing, decision: Decision, rows: Tensor) -> Decision:
        """With the slots whose expert is read anyway, by `rule.py`; experts read are counted."""
        ids, real = routing.ids, (rows > 0).unsqueeze(-1) & (routing.ids >= 0)
        read = rule.union(ids, decision.keep & real, self.experts)
        if self.tokens.counting:
            asked, prompt = rule.union(ids, real, self.experts), ((rows > 0) & (rows % len(PHASES) == 1)).any()
            seen = torch.stack([read.sum(), asked.sum()])
            self.reads.index_add_(0, prompt.long().view(1), seen.view(1, 2))
        keep = rule.restore(decision.keep, ids, read, self.free[rows.long()] > 0)
        return self.policy.skip(routing, keep)

    def watch(self, observer: Observer) -> Callable[[], None]:
        """Show the observer every decision; returns what ends it."""
        self.observers.append(observer)
        return lambda: self.observers.remove(observer)

    def _routing(self, ids: Tensor, gates: Tensor, rows: Tensor, hidden: Tensor | None) -> Routing:
        return Routing(
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

    @property
    def mean(self) -> Tensor | None:
        """[E, d]: what stands in for a skipped slot of each expert; such slots are coded then (`rule.coded`)."""
        return self.table_mean_output if self.compensates else None

    def _tables(self) -> dict[str, Tensor]:
        return {name: getattr(self, f"table_{name}") for name in self.names}

    def protected(self, routing: Routing) -> Tensor:
        """What this layer's policy would say of slots another one decides: protected contributions, [T, k]."""
        assert isinstance(self.policy, TokenPolicy)
        factor = self.factor[1] if self.weighed else None
        return self.policy.protected(routing._replace(tables=self._tables(), factor=factor, extras=self.extras))

    def _counter(self) -> Tensor:
        return self.counts if self.tokens.counting else torch.zeros_like(self.counts)

    def _count(self, keep: Tensor, runs: Tensor, rows: Tensor) -> None:
        """Routed, kept and restored slots of real tokens by row, without a host sync."""
        if not self.tokens.counting:
            return
        kept = keep.sum(-1)
        back = runs.sum(-1) - kept if runs is not keep else torch.zeros_like(kept)
        seen = torch.stack([torch.full_like(kept, keep.shape[-1]), kept, back], -1)
        self.counts.index_add_(0, rows.long(), seen * (rows > 0).unsqueeze(-1))

    # ---- as a module --------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Layer:
        """`.to(…)` of the model moves a layer; it never changes its precision."""
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
