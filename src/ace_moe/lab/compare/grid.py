"""The grid of a comparison: methods × budgets × gains, as typed and as policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...errors import OptionError
from ...plan import Plan, typed
from ...policies import POLICIES, PRESETS, Policy, make
from ...policies import parse as parse_method
from ...rule import GAINS
from ...tables import TABLES
from .verdict import CITED

FIRST = ("fixed", "share", "share:squared=true", "top_p:squared=true", "ace", "paper")  # where none are named
SMALLEST_STEP = 0.2  # under it one slot of a token is all there is to skip


class Key(NamedTuple):
    """One cell of the grid."""

    method: str
    gain: str
    budget: float


@dataclass(frozen=True)
class Grid:
    """Cells to measure. `safeguards` are settings every policy gets beside its gain; `steps` the ratios that a method which
    knows steps of 1/k alone is measured at, and the others too, so that pairs skip equally."""

    methods: tuple[str, ...]
    budgets: tuple[float, ...]
    gains: tuple[str, ...]
    safeguards: dict[str, Any]
    correct: bool = True
    steps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        make("share", **self.safeguards)  # what no policy can have is refused before a model is loaded

    def __iter__(self) -> Iterator[Key]:
        return (Key(m, g, b) for m in self.methods for g in self.gains_of(m) for b in self.budgets_of(m))

    def gains_of(self, method: str) -> tuple[str, ...]:
        """A preset and a method that is written with its gain have that one alone."""
        name, params = parse_method(method)
        own = params.get("gain", PRESETS[name].gain if name in PRESETS else None)
        return self.gains if own is None else (CITED,) if CITED in self.gains else (str(own),)

    def budgets_of(self, method: str) -> tuple[float, ...]:
        if self.steps and made(method).stepwise:
            return self.steps
        return tuple(sorted({*self.budgets, *self.steps}))

    def stepped(self, top_k: int) -> Grid:
        """Add the steps of 1/k, where a method is compared that knows no others."""
        if not any(made(method).stepwise for method in self.methods):
            return self
        steps = tuple(n / top_k for n in range(1, top_k) if SMALLEST_STEP <= n / top_k <= max(self.budgets))
        return replace(self, steps=steps)

    def policy(self, method: str, gain: str) -> Policy:
        """The gain `cited` leaves the method its own, and a gain that is written with the method wins."""
        gains = {} if gain == CITED or parse_method(method)[0] in PRESETS else {"gain": gain}
        return made(method, **self.safeguards, **gains)

    def servable(self) -> dict[str, str]:
        """Methods that every engine serves without a text of their own, and how each is asked for: policy or preset."""
        policies = {method: made(method) for method in self.methods}
        return {
            method: "preset" if parse_method(method)[0] in PRESETS else "policy"
            for method, policy in policies.items()
            if policy.by_token and not needs_text(policy)
        }

    @property
    def calibrated(self) -> bool:
        """True if any of the methods needs a text."""
        return any(needs_text(made(method)) for method in self.methods)


def made(method: str, **settings: Any) -> Policy:
    """A policy or preset as typed, with these settings unless others are written with it."""
    name, params = parse_method(method)
    return make(PRESETS.get(name, name), **{**settings, **params})


def needs_text(policy: Policy) -> bool:
    """True if the policy reads a table that weights alone do not give: a running model makes it from a text."""
    return not set(policy.needs) <= set(TABLES)


def first_methods(plan: Plan) -> tuple[str, ...]:
    """Methods to compare where none is named: the rivals everybody asks about, and the one the plan recommends."""
    recommended = (plan.recommendation or {}).get("settings")
    return FIRST if recommended is None else tuple(dict.fromkeys((*FIRST, written(recommended))))


def written(settings: Mapping[str, Any]) -> str:
    """A policy's settings as a method is written on the command line."""
    given = {**settings.get("params", {}), **{k: v for k, v in settings.items() if k not in ("policy", "params")}}
    return typed(settings["policy"], {name: value for name, value in given.items() if value is not None})


def parse_methods(text: str) -> tuple[str, ...]:
    """ "all", or names of policies with settings after colons: "share,ace:fusion=min"."""
    named = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if named in ((), ("all",)):
        from ..policies import LAB_POLICIES  # imports every method of the lab

        known = (*POLICIES, *LAB_POLICIES)
        if not named:
            raise OptionError(f"No method was named. Choose all, or some of: {', '.join(known)}.")
    methods = known if named == ("all",) else named
    for method in methods:
        made(method)
    return methods


def parse_gains(text: str) -> tuple[str, ...]:
    gains = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = [gain for gain in gains if gain not in (*GAINS, CITED)]
    if wrong or not gains:
        raise OptionError(f"gains are some of {', '.join(GAINS)} and {CITED} (each method's own), not {text!r}.")
    return gains
