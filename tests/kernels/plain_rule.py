"""The rule one slot at a time: a second reading of `rule.py`'s words, with no tensor in it, and cases to try it on.

Gates are sixteenths and tables powers of two, so that sums are exact in fp32 in any order and what is a tie in one
implementation is a tie in all. Only `cumulative` adds up rounded numbers; its τ keeps away from them.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from ace_moe.rule import FUSIONS, GAINS, Form, Gain

EXPERTS = 12
F32 = np.float32
FORMS: dict[str, Form] = {
    "share": Form(),
    "squared": Form(power=2),
    "table": Form(("a",)),
    "table squared": Form(("a",), power=2),
    **{f"two tables {how}": Form(("a", "b"), how) for how in FUSIONS},
    "largest": Form(norm="max"),
    "largest of a table": Form(("a",), norm="max"),
    "largest of two tables": Form(("a", "b"), "min", norm="max"),
    "rank": Form(norm="rank"),
    "cumulative": Form(cumulative=True),
    "cumulative squared": Form(power=2, cumulative=True),
    "own factor": Form(factor="own"),
    "combined": Form(("a", "b"), "mean", 2, "sum", True, "own"),
}


class Setting(NamedTuple):
    """What is around a form. `common` is the layer's factor: ∞ guards it, None applies none."""

    gain: Gain = "power"
    min_active: int = 1
    min_mass: float = 0.0
    common: float | None = None


class Token(NamedTuple):
    """The slots of one token. `routed` is the k it was routed with, where some of its slots are none; 0: all are there."""

    ids: list[int]
    gates: list[float]
    routed: int = 0


Tables = dict[str, list[float]]


def contributions(form: Form, token: Token, tables: Tables) -> list[np.float32]:
    """By slot."""
    views = [_view(form, token, tables[name]) for name in form.tables] or [_view(form, token, [1.0] * EXPERTS)]
    fused = {"max": max, "min": min, "mean": lambda both: (both[0] + both[-1]) / F32(2)}[form.fusion]
    c = [fused(of_slot) for of_slot in zip(*views, strict=True)]
    if form.cumulative:
        larger = {i: [j for j in _order(token) if _place(token, j) < _place(token, i)] for i in range(len(c))}
        c = [min(max(F32(1) - sum((c[j] for j in larger[i]), F32(0)), F32(0)), F32(1)) for i in range(len(c))]
    return [x * F32(tables["own"][0]) for x in c] if form.factor else c


def _view(form: Form, token: Token, table: list[float]) -> list[np.float32]:
    if form.norm == "rank":
        k = token.routed or len(token.ids)
        return [F32(k - _order(token).index(i)) / F32(k) for i in range(len(token.ids))]
    s = [F32(abs(g)) ** form.power * F32(table[e]) for e, g in zip(token.ids, token.gates, strict=True)]
    whole = max([*s, F32(1e-8)]) if form.norm == "max" else sum(s, F32(0)) + F32(1e-8)
    return [x / whole for x in s]


def _place(token: Token, slot: int) -> tuple[float, int]:
    return -abs(token.gates[slot]), token.ids[slot]


def _order(token: Token) -> list[int]:
    """Slots by falling gate, equal ones by rising id."""
    return sorted(range(len(token.ids)), key=lambda i: _place(token, i))


def protected(setting: Setting, token: Token, c: list[np.float32]) -> list[float]:
    """+∞ at slots that stay whatever τ is."""
    out, slots = [float(x) for x in c], range(len(c))
    out[_order(token)[0]] = math.inf
    for i in sorted(slots, key=lambda i: (-out[i], token.ids[i]))[: setting.min_active]:
        out[i] = math.inf
    mass, room = F32(0), F32(1.0 - setting.min_mass) * F32(sum(token.gates))
    for i in sorted(slots, key=lambda i: (out[i], -token.ids[i])):
        mass += F32(0 if out[i] == math.inf else token.gates[i])
        if setting.min_mass > 0 and mass > room:
            out[i] = math.inf
    return out if setting.common is None else [x * setting.common for x in out]


def scores(form: Form, setting: Setting, token: Token, tables: Tables) -> list[float]:
    """What is compared with τ, by slot."""
    if setting.common == math.inf:
        return [math.inf] * len(token.ids)
    return protected(setting, token, contributions(form, token, tables))


def rescaled(gain: Gain, gates: list[float], keep: list[bool]) -> list[float]:
    if all(keep) or gain not in ("kept", "power"):
        constant = 1.0 if all(keep) or gain == "none" else float(gain)
        return [g * constant if kept else 0.0 for g, kept in zip(gates, keep, strict=True)]
    power = 2 if gain == "power" else 1
    every, kept = sum(g**power for g in gates), sum(g**power for g, stays in zip(gates, keep, strict=True) if stays)
    factor = (every / kept) ** (1 / power) if kept else 1.0
    return [g * factor if stays else 0.0 for g, stays in zip(gates, keep, strict=True)]


def thresholds(values: list[float], exact: bool) -> list[float]:
    """0, one above all, between any two contributions, and where they are the same numbers everywhere, on each."""
    found = sorted({v for v in values if math.isfinite(v)})
    middles = [(a + b) / 2 for a, b in itertools.pairwise(found) if b - a > 1e-5]
    return [0.0, 4.0, *middles, *(found if exact else [])]


# ---- cases -------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Tokens of k slots each, unsorted, with a τ each that may fall on a contribution; tables of [E]."""

    k: int
    tokens: list[Token]
    taus: list[float]
    tables: Tables
    setting: Setting
    dtype: torch.dtype

    def tensors(self, device: str = "cpu") -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """ids, gates [T, k] and tables."""
        shape = (len(self.tokens), self.k)
        ids = torch.tensor([t.ids for t in self.tokens], dtype=torch.int64, device=device).reshape(shape)
        gates = torch.tensor([t.gates for t in self.tokens], dtype=self.dtype, device=device).reshape(shape)
        return ids, gates, {name: torch.tensor(v, device=device) for name, v in self.tables.items()}

    def expected(self, form: Form) -> tuple[list[list[bool]], list[list[float]]]:
        """keep, gates by token and slot."""
        every = [scores(form, self.setting, t, self.tables) for t in self.tokens]
        keep = [[not c < tau for c in row] for row, tau in zip(every, self.taus, strict=True)]
        gates = [rescaled(self.setting.gain, t.gates, kept) for t, kept in zip(self.tokens, keep, strict=True)]
        return keep, gates


gate = st.sampled_from([0.25, 1.0]) | st.integers(0, 32).map(lambda n: n / 16)  # ties are drawn often
settings = st.builds(
    Setting,
    st.sampled_from([*GAINS, "0.75", "1.25"]),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.0, 0.3, 0.5, 1.0]),
    st.sampled_from([None, None, 0.5, math.inf]),
)


@st.composite
def cases(draw: st.DrawFn, form: Form, exact: bool = True, most: int = 6) -> Case:
    k, setting = draw(st.integers(1, 7)), draw(settings)
    order = st.permutations(range(EXPERTS)).map(lambda ids: ids[:k])
    token = st.tuples(order, st.lists(gate, min_size=k, max_size=k)).map(lambda slots: Token(*slots))
    tokens = draw(st.lists(token, max_size=most))
    table = st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=EXPERTS, max_size=EXPERTS)
    tables = {"a": draw(table), "b": draw(table), "own": [draw(st.sampled_from([0.25, 1.0]))]}
    exact = exact and not form.cumulative
    every = [thresholds(scores(form, setting, t, tables), exact) for t in tokens]
    taus = [draw(st.sampled_from(values)) for values in every]
    return Case(k, tokens, taus, tables, setting, draw(st.sampled_from([torch.float32, torch.bfloat16])))
