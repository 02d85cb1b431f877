"""The one place that launches the rule: alone behind a router, or together with its top-k.

`launch_rule` and `launch_route` are plain functions for engines whose own operators hide them from a compiler; `rule`
and `route` are the same as torch operators, opaque to torch.compile and safe in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..rule import CONSTANT, FUSIONS, GAINS, NORMS, Form, Gain
from . import restore_kernel, route_kernel, rule_kernel
from .launch import cdiv, early_start, on, power_of_two


class Rule(NamedTuple):
    """What a kernel must know of a policy beside its tensors."""

    form: Form
    gain: Gain = "power"
    min_active: int = 1
    min_mass: float = 0.0
    weighed: bool = False  # whether a factor is applied

    def __str__(self) -> str:
        """Write a rule as an operator takes it: operators have no records among their arguments."""
        f = self.form
        constants = (len(f.tables), f.fusion, f.power, f.norm, int(f.cumulative), self.gain, self.min_active)
        return "|".join(map(str, (*constants, self.min_mass, int(self.weighed))))


@lru_cache(maxsize=256)
def constants(rule: str) -> dict[str, int | float | bool]:
    """Read the kernels' constants from `str(Rule(…))`."""
    views, fusion, power, norm, cumulative, gain, min_active, min_mass, weighed = rule.split("|")
    return {
        "VIEWS": int(views), "FUSION": FUSIONS.index(fusion), "POWER": int(power), "NORM": NORMS.index(norm),
        "CUMULATIVE": cumulative == "1", "FACTOR": weighed == "1",
        "GAIN": (*GAINS, CONSTANT).index(gain), "MIN_ACTIVE": int(min_active), "MIN_MASS": float(min_mass),
    }  # fmt: skip


TOGETHER = 32  # slots up to which one program has all tokens of a step and needs no second launch
ALONE = 2048  # slots up to which every program of the second launch looks at all of them by itself


def _views(tables: list[Tensor], stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tables, or stand-ins that are never read."""
    first, second, *_ = [*tables, stand_in, stand_in]
    return first, second


def _vote(voting: Sequence[Tensor], stand_in: Tensor, slots: int) -> tuple[Tensor, Tensor, int]:
    """Return (free rows, reads, VOTE)."""
    if not voting:
        return stand_in, stand_in, 0
    free, reads = voting
    return free, reads, 1 if slots <= TOGETHER else 2


def launch_rule(
    ids: Tensor, gates: Tensor, rows: Tensor, tau: Tensor, factor: Tensor, tables: list[Tensor], counts: Tensor, mark: int,
    rule: str, voting: Sequence[Tensor] = (), experts: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decide: ids, gates [T, k], rows [T], τ [R] → ids, gates for the experts, `mark` at skipped slots; counts [R, 3] grow.

    `voting`, if slots are restored: the rows that get them, [R] int8, and reads [2, 2], which grow.
    """
    ids, gates, rows = ids.contiguous(), gates.contiguous(), rows.contiguous()
    (tokens, k), new_ids, new_gates = ids.shape, torch.empty_like(ids), torch.empty_like(gates)
    padded = power_of_two(k)
    *votes, vote = _vote(voting, tau, power_of_two(tokens) * padded)
    small = min(8, power_of_two(tokens), max(1, 64 // padded))  # short programs in decode
    block = power_of_two(tokens) if vote == 1 else small if tokens <= 256 else max(1, 512 // padded)
    if not tokens:
        return new_ids, new_gates
    with on(ids.device):
        rule_kernel.decide[(cdiv(tokens, block),)](
            ids, gates, rows, tau, *_views(tables, tau), factor, counts, *votes, new_ids, new_gates, tokens, mark,
            K=k, KP=padded, BT=block, VOTE=vote, **constants(rule),
            num_warps=4 if tokens > 256 or vote == 1 else 1,
        )  # fmt: skip
        if vote == 2:
            return _second(new_ids, new_gates, rows, factor, counts, voting, mark, experts, rule)
    return new_ids, new_gates


def launch_route(
    logits: Tensor, rows: Tensor, tau: Tensor, factor: Tensor, tables: list[Tensor], counts: Tensor, mark: int, rule: str,
    top_k: int, sigmoid: bool, normalise: bool, times: float, dtype: torch.dtype, ids_dtype: torch.dtype,
    voting: Sequence[Tensor] = (), bias: Tensor | None = None, scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Do what the router's top-k (`routing.reference`) and `launch_rule` do, straight from its logits [T, E]."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, (tokens, experts) = rows.contiguous(), logits.shape
    ids = torch.empty(tokens, top_k, dtype=ids_dtype, device=logits.device)
    gates = torch.empty(tokens, top_k, dtype=dtype, device=logits.device)
    *votes, vote = _vote(voting, tau, power_of_two(tokens) * power_of_two(top_k))
    vectors = [tau if vector is None else vector.contiguous() for vector in (bias, scale)]
    block = power_of_two(tokens) if vote == 1 else 1 if tokens <= 64 else 16
    if not tokens:
        return ids, gates
    with on(logits.device):
        route_kernel.route[(cdiv(tokens, block),)](
            logits, *vectors, rows, tau, *_views(tables, tau), factor,
            counts, *votes, ids, gates, tokens, experts, logits.stride(0), mark, K=top_k, KP=power_of_two(top_k),
            EP=power_of_two(experts), BT=block, SIGMOID=sigmoid, NORMALISE=normalise, BIAS=bias is not None,
            SCALE=scale is not None, TIMES=times, VOTE=vote, **constants(rule), **early_start(logits.device),
            num_warps=block if vote == 1 else 1 if block == 1 else 4,
        )  # fmt: skip
        if vote == 2:
            return _second(ids, gates, rows, factor, counts, voting, mark, experts, rule)
    return ids, gates


def _second(
    ids: Tensor,
    gates: Tensor,
    rows: Tensor,
    factor: Tensor,
    counts: Tensor,
    voting: Sequence[Tensor],
    mark: int,
    experts: int,
    rule: str,
) -> tuple[Tensor, Tensor]:
    """Restore slots and rescale gates, where one program did not see the whole step."""
    (tokens, k), new_ids, new_gates = ids.shape, torch.empty_like(ids), torch.empty_like(gates)
    sizes = {"K": k, "KP": power_of_two(k), "EP": power_of_two(experts), "BT": 16}
    free, reads = voting
    grid, every, votes = (cdiv(tokens, 16),), power_of_two(tokens), reads
    if every * sizes["KP"] > ALONE:
        every, votes = 0, torch.zeros(2 * sizes["EP"] + 1, dtype=torch.int32, device=ids.device)
        restore_kernel.vote[grid](ids, rows, votes, tokens, **sizes)
    restore_kernel.restore[grid](
        ids, gates, rows, factor, free, votes, counts, reads, new_ids, new_gates, tokens, mark, TP=every,
        GAIN=constants(rule)["GAIN"], **sizes, **early_start(ids.device),
    )  # fmt: skip
    return new_ids, new_gates


@torch.library.custom_op("ace_moe::rule", mutates_args=("counts", "voting"))
def rule(
    ids: Tensor, gates: Tensor, rows: Tensor, tau: Tensor, factor: Tensor, tables: list[Tensor], counts: Tensor, mark: int,
    rule: str, voting: list[Tensor], experts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return launch_rule(ids, gates, rows, tau, factor, tables, counts, mark, rule, voting, experts)


@rule.register_fake
def _(ids, gates, *rest):
    return ids.new_empty(ids.shape), gates.new_empty(gates.shape)  # contiguous, whatever the router's are


@torch.library.custom_op("ace_moe::route", mutates_args=("counts", "voting"))
def route(
    logits: Tensor, rows: Tensor, tau: Tensor, factor: Tensor, tables: list[Tensor], counts: Tensor, mark: int, rule: str,
    top_k: int, sigmoid: bool, normalise: bool, times: float, dtype: torch.dtype, ids_dtype: torch.dtype,
    voting: list[Tensor], bias: Tensor | None = None, scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kind = (top_k, sigmoid, normalise, times)
    arguments = (logits, rows, tau, factor, tables, counts, mark, rule)
    return launch_route(*arguments, *kind, dtype, ids_dtype, voting, bias, scale)


@route.register_fake
def _(
    logits, rows, tau, factor, tables, counts, mark, rule, top_k, sigmoid, normalise, times, dtype, ids_dtype, *_, **__
):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=ids_dtype), logits.new_empty(shape, dtype=dtype)
