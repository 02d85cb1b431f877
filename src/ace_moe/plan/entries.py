"""Thresholds of a plan: what an entry holds, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Phase = Literal["both", "prefill", "decode", "verify"]
PHASES: tuple[str, ...] = get_args(Phase)
OWN = "own text"
LONGEST_GAIN = 40  # characters; which gains there are is the policies' business


@dataclass(frozen=True)
class Workload:
    """The text a threshold was mapped on; the hash is of its tokens."""

    name: str
    sha256: str
    tokens: int

    @property
    def own(self) -> bool:
        """Whether the model wrote it."""
        return self.name == OWN

    @classmethod
    def from_json(cls, found: Mapping[str, Any], where: str) -> Workload:
        made = cls(**found)
        for value, kind in ((made.name, str), (made.sha256, str), (made.tokens, int)):
            expect(value, kind, f"{where}: workload")
        return made


@dataclass(frozen=True)
class Threshold:
    """τ for one budget under exact settings, and the ratio it realised on the text it was mapped on."""

    policy: str
    params: dict[str, Any]
    gain: str
    min_active: int
    min_mass: float
    budget: float
    threshold: float
    realised: float
    corrected: bool
    passes: int
    workload: Workload
    phase: Phase = "both"
    factor: str | None = None  # name of the table of layer factors
    fidelity: dict[str, Any] | None = None  # what it does to predictions, where that was measured

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same for this τ to hold."""
        return {n: getattr(self, n) for n in ("policy", "params", "gain", "min_active", "min_mass", "factor")}

    def fits(self, settings: Mapping[str, Any]) -> bool:
        return compared(self.settings) == compared(settings)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Threshold:
        found = cls(**{**entry, "workload": Workload.from_json(entry["workload"], "thresholds")})
        expect_each(vars(found), KINDS, "thresholds: ")
        check_settings(found.settings, "thresholds")
        if found.phase not in PHASES:
            raise ValueError(f"thresholds: phase {found.phase!r:.40} is none of {', '.join(PHASES)}")
        if not 0 < len(found.gain) <= LONGEST_GAIN:
            raise ValueError(f"thresholds: {found.gain!r:.60} is no name of a gain")
        if not 0 <= found.threshold <= MOST_TAU or not all(0 <= n <= 1 for n in (found.budget, found.realised)):
            raise ValueError(f"threshold entry with budget {found.budget!r} has a value out of range")  # NaN too
        return found


def typed(policy: str, settings: Mapping[str, Any]) -> str:
    """A policy with settings as a command takes it: ace, share:squared=true."""
    return ":".join([policy, *(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings.items())])


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """What shapes contributions, of the right kind and meaning something."""
    expect_each(settings, SETTINGS, f"{where}: ")
    if settings["min_active"] < 0:
        raise ValueError(f"{where}: min_active is {settings['min_active']}, less than no slot")
    if not 0 <= settings["min_mass"] <= 1:  # NaN fails too
        raise ValueError(f"{where}: min_mass {settings['min_mass']!r} has a value out of range")


MOST_TAU = 2  # contributions end at 1, τ a little above
NUMBER = (int, float)
Kinds = dict[str, type | tuple[type, ...]]
SETTINGS: Kinds = {
    "policy": str, "params": dict, "min_active": int, "min_mass": NUMBER, "factor": (str, type(None)),
}  # fmt: skip
KINDS: Kinds = {
    **dict.fromkeys(("gain", "phase"), str),
    **dict.fromkeys(("budget", "threshold", "realised"), NUMBER),
    **{"passes": int, "corrected": bool, "fidelity": (dict, type(None))},
}


def expect(value: object, kind: type | tuple[type, ...], name: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.40}")


def expect_each(found: Mapping[str, Any], kinds: Kinds, where: str = "") -> None:
    for name, kind in kinds.items():
        expect(found[name], kind, f"{where}{name}")


def compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as entries are found by: what says nothing, no factor and denominator 0, is as if left out."""
    rest = {name: value for name, value in settings.items() if (name, value) != ("factor", None)}
    return {**rest, "params": without_denominator(settings["params"])}


def without_denominator(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a policy without the `"denominator": 0` that schema 1 has for "fixed"; it says nothing."""
    return {name: value for name, value in params.items() if (name, value) != ("denominator", 0)}
