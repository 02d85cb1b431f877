"""Policies: methods that decide slots, by name."""

from __future__ import annotations

import json
from typing import Any

from ..errors import PolicyError
from .ace import Ace
from .aimer import Aimer, AimerPruning
from .alloc import AllocL, AllocT
from .base import Decision, Policy, Routing, Tables, TokenPolicy, parameters_of
from .diep import Diep, DiepAsCompared
from .expert_sparsity import ExpertSparsity, ExpertSparsityAsCompared
from .fixed import Fixed
from .lexi import Lexi
from .modes import Modes, ModesAsCompared
from .naee import Naee, NaeeAsCompared
from .oea import Oea
from .oracle import Oracle, RawOracle
from .pesf import Pesf
from .random import Random
from .reap import Reap, ReapPruning
from .relative import Relative
from .score import Score, ScoreAsCompared
from .sere import Sere, SereAsCompared
from .single import Gsp, Rcr, Share
from .top_p import TopP
from .xshare import XShare, XShareAsCompared

ALL: tuple[type[Policy], ...] = (
    *(Ace, Gsp, Rcr, Share, Random, Score, Relative, TopP, Fixed, Aimer, Naee, Modes, Reap, Pesf, Oracle, RawOracle),
    *(AllocT, AllocL, Lexi, Sere, XShare, Oea, ExpertSparsity, Diep, ReapPruning, AimerPruning),
    *(ScoreAsCompared, NaeeAsCompared, ExpertSparsityAsCompared, DiepAsCompared, SereAsCompared, XShareAsCompared),
    ModesAsCompared,
)
POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in ALL}
PRESETS: dict[str, Policy] = {"paper": Ace(fusion="max", gain="kept", min_active=1, min_mass=0.0)}


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """ "ace:fusion=min:min_active=2" → ("ace", {"fusion": "min", "min_active": 2}); a variant's colon stays in its name."""
    parts = text.split(":")
    pairs = [part.partition("=") for part in parts if "=" in part]
    return ":".join(part for part in parts if "=" not in part), {k: _value(v) for k, _, v in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def make(policy: str | Policy = "ace", **settings: Any) -> Policy:
    """A policy by name, with settings after colons if you like, or an instance; with the settings that are given."""
    if isinstance(policy, Policy):
        return make(policy.name, **{**policy.own_settings, **settings})
    policy, written = parse(str(policy))
    settings = {**written, **settings}
    if policy not in POLICIES:
        raise PolicyError(f"There is no policy {policy!r}. Choose one of: {', '.join(POLICIES)}.")
    cls = POLICIES[policy]
    unknown = sorted(set(settings) - set(parameters_of(cls)))
    if unknown:
        raise PolicyError(
            f"Policy {policy!r} has no setting {', '.join(unknown)}. It has: {', '.join(parameters_of(cls))}."
        )
    return cls(**settings)


__all__ = [
    "POLICIES",
    "PRESETS",
    "Ace",
    "Decision",
    "Gsp",
    "Policy",
    "Rcr",
    "Routing",
    "Share",
    "Tables",
    "TokenPolicy",
    "make",
    "parse",
]
