"""Policies by name: ours, those of installed packages, and classes named `module:Class`."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from dataclasses import fields, replace
from importlib.metadata import entry_points
from typing import Any

from ..errors import PolicyError, brief
from .allocation import AllocL, AllocT, Lexi
from .as_compared import AS_COMPARED
from .base import Policy, TokenPolicy
from .batch import Oea, XShare
from .diep import Diep
from .expert_sparsity import ExpertSparsity
from .forms import Ace, Aimer, Fixed, Gsp, Rcr, Relative, Score, Share, TopP
from .modes import Modes
from .naee import Naee
from .oracle import Oracle, RawOracle
from .pesf import Pesf
from .random import Random
from .reap import Reap, ReapPruning
from .sere import Sere
from .subset import AimerPruning

ALL: tuple[type[Policy], ...] = (
    *(Ace, Gsp, Rcr, Share, Random, Score, Relative, TopP, Fixed, Aimer, Naee, Modes, Reap, Pesf, Oracle, RawOracle),
    *(AllocT, AllocL, Lexi, Sere, XShare, Oea, ExpertSparsity, Diep, ReapPruning, AimerPruning),
    *AS_COMPARED,
)
POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in ALL}
PRESETS: dict[str, TokenPolicy] = {"paper": Ace(fusion="max", gain="kept", min_active=1, min_mass=0.0)}
GROUP = "ace_moe.policies"  # of entry points: NAME = "module:Class"
AUTO = "auto"  # what a plan says; where it says nothing, the plain gate share, best by KL of what needs gates alone


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


def find(name: str) -> type[Policy]:
    """The class of a name: a built-in, an installed package's, or `module:Class`."""
    if name in POLICIES:
        return POLICIES[name]
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            return _checked(name, entry.load())
    module, _, attribute = name.partition(":")
    if module and attribute:
        return _checked(name, _imported(name, module, attribute))
    near = difflib.get_close_matches(name, POLICIES, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise PolicyError(f"There is no policy {name!r}.{meant} Choose one of: {', '.join(POLICIES)}, or module:Class.")


def _imported(name: str, module: str, attribute: str) -> Any:
    """From the current folder too: a command's own path holds the folder it is installed in, not the user's."""
    sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise whatever it likes
        raise PolicyError(
            f"There is no policy {name!r}: {brief(error)}. Name a built-in one ({', '.join(POLICIES)}), or module:Class of a "
            "file that Python can import from here."
        ) from error
    finally:
        sys.path.remove(os.getcwd())


def _checked(name: str, found: Any) -> type[Policy]:
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise PolicyError(
            f"{name} is no policy: it must be a class derived from ace_moe.policies.TokenPolicy or Policy."
        )
    return found


def make(policy: str | Policy = "ace", **settings: Any) -> Policy:
    """A policy by name, with settings after colons if you like, or an instance, used as it is but for the settings given."""
    if isinstance(policy, Policy):
        _check_settings(type(policy), policy.key, settings)
        return replace(policy, **settings) if settings else policy
    name, written = parse(str(policy))
    cls = find(name)
    _check_settings(cls, name, {**written, **settings})
    return cls(**{**written, **settings})


def _check_settings(cls: type[Policy], name: str, settings: dict[str, Any]) -> None:
    known = [field.name for field in fields(cls)]
    if unknown := sorted(set(settings) - set(known)):
        raise PolicyError(f"Policy {name!r} has no setting {', '.join(unknown)}. It has: {', '.join(known)}.")


def choose(policy: str | Policy = AUTO, preset: str | None = None, **settings: Any) -> Policy:
    """The policy of a name or a preset, with the settings that are given."""
    if preset is None:
        return make("share" if policy == AUTO else policy, **settings)
    if preset not in PRESETS:
        raise PolicyError(f"There is no preset {preset!r}. Choose one of: {', '.join(PRESETS)}.")
    if policy not in (AUTO, PRESETS[preset].name):
        raise PolicyError(f"Preset {preset!r} is a policy by itself; give it or policy={policy!r}, not both.")
    return make(PRESETS[preset], **settings)
