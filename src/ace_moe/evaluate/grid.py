"""What a comparison compares: methods × budgets × gains, as typed and as policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import OptionError
from ..policies import POLICIES, PRESETS, Policy, find, make
from ..policies import parse as parse_method
from ..rule import GAINS

CITED = "cited"  # each method with the gain of its own paper


class Key(NamedTuple):
    """One cell of the grid."""

    method: str
    gain: str
    budget: float


@dataclass(frozen=True)
class Grid:
    """What is compared. `safeguards` are settings every policy gets beside its gain."""

    methods: tuple[str, ...]
    budgets: tuple[float, ...]
    gains: tuple[str, ...]
    safeguards: dict[str, Any]
    correct: bool = True

    def __post_init__(self) -> None:
        make("share", **self.safeguards)  # what no policy can have is refused before a model is loaded

    def __iter__(self) -> Iterator[Key]:
        return (Key(m, g, b) for m in self.methods for g in self.gains for b in self.budgets)

    def policy(self, method: str, gain: str) -> Policy:
        """The gain `cited` leaves the method its own."""
        name, params = parse_method(method)
        gains = {} if gain == CITED else {"gain": gain}
        return make(PRESETS.get(name, name), **{**self.safeguards, **params, **gains})

    @property
    def calibrated(self) -> bool:
        """Whether any of the methods needs a text."""
        names = (parse_method(method)[0] for method in self.methods)
        return any(find(name).calibrated for name in names if name not in PRESETS)


def parse_methods(text: str) -> tuple[str, ...]:
    """ "all", or names of policies with settings after colons: "share,ace:fusion=min"."""
    named = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    methods = tuple(POLICIES) if named == ("all",) else named
    if not methods:
        raise OptionError(f"No method was named. Choose all, or some of: {', '.join(POLICIES)}.")
    for method in methods:
        name, params = parse_method(method)
        make(PRESETS.get(name, name), **params)
    return methods


def parse_gains(text: str) -> tuple[str, ...]:
    gains = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = [gain for gain in gains if gain not in (*GAINS, CITED)]
    if wrong or not gains:
        raise OptionError(f"gains are some of {', '.join(GAINS)} and {CITED} (each method's own), not {text!r}.")
    return gains
