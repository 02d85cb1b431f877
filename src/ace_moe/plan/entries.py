"""Thresholds of a plan and the texts they were mapped on. Texts go by the sha256 of their tokens, and are shown by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import BudgetError
from ..schema import choice, flag, maybe, number, record, text, thing

Phase = Literal["both", "prefill", "decode", "verify"]
OWN = "own text"
MOST_TAU = 2  # contributions end at 1, τ a little above
SHOWN = 4  # characters of a hash, or as many more as tell two texts apart

WORKLOAD = record({"name": text, "sha256": text, "tokens": number(0, whole=True)}, closed=True)
SETTINGS = {"policy": text, "params": thing, "min_active": number(0, whole=True), "min_mass": number(0, 1)}
THRESHOLD = record(
    {
        **SETTINGS,
        "gain": text,
        "workload": WORKLOAD,
        "threshold": number(0, MOST_TAU),
        "budget": number(0, 1),
        "realised": number(0, 1),
        "corrected": flag,
        "passes": number(0, whole=True),
    },
    {"phase": choice(*get_args(Phase)), "factor": maybe(text), "fidelity": maybe(thing)},
    closed=True,
)


@dataclass(frozen=True)
class Workload:
    """The text a threshold was mapped on; the hash is of its tokens."""

    name: str
    sha256: str
    tokens: int

    @property
    def own(self) -> bool:
        """True if the model wrote it."""
        return self.name == OWN


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
        """The settings under which this τ holds."""
        return {n: getattr(self, n) for n in ("policy", "params", "gain", "min_active", "min_mass", "factor")}

    def fits(self, settings: Mapping[str, Any]) -> bool:
        """True if this τ holds under these settings."""
        return compared(self.settings) == compared(settings)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Threshold:
        """Build a threshold from metadata that passed `THRESHOLD`."""
        return cls(**{**entry, "workload": Workload(**entry["workload"])})


def typed(policy: str, settings: Mapping[str, Any]) -> str:
    """Write a policy with settings as a command takes it: ace, share:squared=true."""
    return ":".join([policy, *(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings.items())])


def compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as entries are looked up by: no factor and denominator 0 say nothing and are left out."""
    rest = {name: value for name, value in settings.items() if (name, value) != ("factor", None)}
    return {**rest, "params": without_denominator(settings["params"])}


def without_denominator(params: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the `"denominator": 0` that schema 1 has for "fixed"."""
    return {name: value for name, value in params.items() if (name, value) != ("denominator", 0)}


# ---- texts --------------------------------------------------------------------------------------------------------------


def distinct(workloads: Iterable[Workload]) -> list[Workload]:
    """Each text once, in the order of first use."""
    return list({w.sha256: w for w in reversed(list(workloads))}.values())[::-1]


def labels(workloads: Sequence[Workload]) -> dict[str, str]:
    """sha256 → name, or name#ab12 where another text has that name too."""
    shown = {}
    for workload in workloads:
        name, digest, length = workload.name, workload.sha256, SHOWN
        namesakes = [other.sha256 for other in workloads if other.name == name and other.sha256 != digest]
        while any(other[:length] == digest[:length] for other in namesakes) and length < 64:
            length += 1
        shown[digest] = f"{name}#{digest[:length]}" if namesakes else name
    return shown


def pick(workloads: Sequence[Workload], wanted: str) -> Workload:
    """Find a text by its name, or by name#ab12."""
    name, mark, digest = str(wanted).rpartition("#")
    meant = [w for w in workloads if w.name == wanted]
    if not meant and mark:
        meant = [w for w in workloads if w.name == name and w.sha256.startswith(digest)]
    if len(meant) == 1:
        return meant[0]
    shown = labels(workloads)
    listed = ", ".join(shown[w.sha256] for w in meant or workloads) or "none"
    if meant:
        raise BudgetError(f"The plan has several texts {wanted!r}: {listed}. Name one of these as the workload.")
    raise BudgetError(
        f"The plan has no workload {wanted!r}; it has: {listed}. Name one of these, or map that text with `ace plan MODEL "
        "--plan PLAN --text FILE`."
    )
