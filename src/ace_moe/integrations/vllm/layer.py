"""One MoE layer's rule in vLLM: which routed slots run, and with what gates. A skipped slot gets id −1 and gate 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...dispatch import RULED
from ...errors import PlanError
from ...kernels.routing import TopK
from ...plan import missing_table
from ...policies import Policy, Routing
from .phases import Phases

SKIPPED = -1


class Layer:
    """Tables, counters and rule of one layer; τ and phases are shared by all layers of the engine."""

    def __init__(self, key: str, policy: Policy, tables: Mapping[str, Tensor], thresholds: Tensor, phases: Phases):
        self.key, self.policy, self.thresholds, self.phases = key, policy, thresholds, phases
        device = thresholds.device
        for name in policy.needs:
            if name not in tables:
                raise PlanError(missing_table(policy.name, name, policy.calibrated))
        self.tables = {name: tables[name].to(device, torch.float32).contiguous() for name in policy.needs}
        self.counts = torch.zeros(2, 2, dtype=torch.int64, device=device)  # [phase]: routed, kept
        self.start, self.split = 0, False  # sequence parallel: which part of the step's tokens this rank sees
        self.executor = "not chosen yet"
        self.choose_executor: Callable[[], None] = lambda: None
        self.has_kernel = type(policy) in RULED and device.type == "cuda"

    def route(self, gates: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """gates, ids [T, k] as the router gave them → the same with −1 and 0 at skipped slots. No host sync."""
        phases = self.phases.of(ids.shape[0], self._offset(ids.shape[0]))
        if self.has_kernel:
            return self._route_kernel(gates, ids, phases)
        return self._route_torch(gates, ids, phases)

    def _offset(self, tokens: int) -> int:
        return self.start * tokens if self.split else 0

    def _route_torch(self, gates: Tensor, ids: Tensor, phases: Tensor) -> tuple[Tensor, Tensor]:
        threshold = self.thresholds[phases.clamp(max=1).long()].unsqueeze(-1)
        decision = self.policy.route(Routing(ids.long(), gates, self.tables, threshold))
        keep = decision.keep
        for phase in range(2):
            real = (phases == phase).unsqueeze(-1).expand_as(keep)
            self.counts[phase] += torch.stack([real.sum(), (real & keep).sum()])
        return decision.gates, torch.where(keep, ids, SKIPPED)

    def _route_kernel(self, gates: Tensor, ids: Tensor, phases: Tensor) -> tuple[Tensor, Tensor]:
        """One launch."""
        from ...kernels import ops, rule_kernel

        ids, gates = ids.contiguous(), gates.contiguous()
        (tokens, k), new_ids, new_gates = ids.shape, torch.empty_like(ids), torch.empty_like(gates)
        padded = ops.power_of_two(k)
        block = min(8, ops.power_of_two(tokens)) if tokens <= 256 else max(8, 512 // padded)  # short programs in decode
        if tokens:
            rule_kernel.decide[(-(-tokens // block),)](
                ids, gates, *self._views(ids), self.thresholds, phases, self.counts, new_ids, new_gates, tokens, SKIPPED,
                K=k, KP=padded, BT=block, **self._constants(), num_warps=1 if block <= 8 else 4,
            )  # fmt: skip
        return new_gates, new_ids

    def route_logits(self, logits: Tensor, router: TopK, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Top-k and rule in one launch, from the router's logits [T, E]: what the rule adds to a step is then nothing."""
        from ...kernels import ops, route_kernel
        from ...kernels.launch import early_start

        tokens, experts = logits.shape
        ids = torch.empty(tokens, router.top_k, dtype=dtype, device=logits.device)
        gates = torch.empty(tokens, router.top_k, dtype=torch.float32, device=logits.device)
        block = 1 if tokens <= 64 else 16
        if tokens:
            route_kernel.route[(-(-tokens // block),)](
                logits, *self._views(ids), self.thresholds, self.phases.of(tokens, self._offset(tokens)), self.counts,
                ids, gates, tokens, experts, logits.stride(0), K=router.top_k, KP=ops.power_of_two(router.top_k),
                EP=ops.power_of_two(experts), BT=block, SIGMOID=router.sigmoid, NORMALISE=router.normalise,
                **self._constants(), **early_start(logits.device), num_warps=1 if block == 1 else 4,
            )  # fmt: skip
        return gates, ids

    def _views(self, stand_in: Tensor) -> tuple[Tensor, Tensor]:
        first, second, *_ = [*self.tables.values(), stand_in, stand_in]
        return first, second

    def _constants(self) -> dict[str, int | float]:
        from ...kernels import ops

        settings = dict(zip(ops.SETTINGS, ops.settings(self.policy), strict=True))
        return {"VIEWS": len(self.tables), "MASKED": False, "PHASED": True, **settings}
