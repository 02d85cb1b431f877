"""Policies by name: built-in ones, those that installed packages declare (our own lab too), and classes named `module:Class`."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from ..errors import PlanError, PolicyError, brief
from ..plan import Plan, pick
from ..plan.entries import without_denominator
from .base import COMMON, PACKAGE, Policy, TokenPolicy
from .forms import Ace, Aimer, Fixed, Gsp, Rcr, Relative, Share, TopP
from .learned import Modes, Naee, Reap
from .random import Random

ALL: tuple[type[Policy], ...] = (Ace, Gsp, Rcr, Share, Random, Relative, TopP, Fixed, Aimer, Naee, Modes, Reap)
POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in ALL}
PRESETS: dict[str, TokenPolicy] = {"paper": Ace(fusion="max", gain="kept", min_active=1, min_mass=0.0)}
GROUP = "ace_moe.policies"  # of entry points: NAME = "module:Class"
LAB = "lab"  # the entry of our own that is a mapping of names to classes
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
    """The class of a name: a built-in, one of the lab, an installed package's, or `module:Class`."""
    if is_ours(name):
        return POLICIES.get(name) or lab()[name]
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            return _checked(name, entry.load())
    module, _, attribute = name.partition(":")
    if module and attribute:
        return _checked(name, _imported(name, module, attribute))
    near = difflib.get_close_matches(name, [*POLICIES, *lab()], n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise PolicyError(f"There is no policy {name!r}.{meant} {_choices()}")


def is_ours(name: str) -> bool:
    """Whether this package has the policy: all that a file may name, which must not decide whose code is run."""
    return name in POLICIES or name in lab()


@cache
def lab() -> Mapping[str, type[Policy]]:
    """The methods of this package's lab, by name. What runs and serves imports none of them: the package's metadata names
    them in one entry point, and they are loaded when somebody asks for a name that is not built in."""
    ours = (e for e in entry_points(group=GROUP) if e.name == LAB and e.module.partition(".")[0] == PACKAGE)
    return next((entry.load() for entry in ours), {})


def _choices() -> str:
    also = ", ".join(lab()) or "(this installation does not declare the lab's methods: install the package again)"
    return f"Choose one of: {', '.join(POLICIES)}; to compare with: {also}; or module:Class."


def _imported(name: str, module: str, attribute: str) -> Any:
    """From the current folder too: a command's own path holds the folder it is installed in, not the user's."""
    sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise whatever it likes
        raise PolicyError(
            f"There is no policy {name!r}: {brief(error)}. Name a file that Python can import from here. {_choices()}"
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


# ---- the policy that is meant -----------------------------------------------------------------------------------------------


def policy_for(
    plan: Plan,
    policy: str | Policy = AUTO,
    preset: str | None = None,
    workload: str | None = None,
    served: bool = False,
    **settings: Any,
) -> Policy:
    """The policy that is named. `auto`: the plan's recommendation, else that of its newest thresholds (on the text
    `workload`), else the gate share. `served`: only one that every engine can run."""
    own = _of_plan(plan, served, workload) if policy == AUTO and preset is None else None
    return choose(policy, preset, **settings) if own is None else make(_rebuilt(own), **settings)


def _of_plan(plan: Plan, served: bool, workload: str | None) -> Mapping[str, Any] | None:
    recommendation = plan.recommendation or {}
    settings = recommendation.get("served") or recommendation.get("settings")  # older plans have two
    if settings is not None:
        return settings
    sha256 = None if workload is None else pick(plan.workloads, workload).sha256
    newest_first = [t.settings for t in reversed(plan.thresholds) if sha256 in (None, t.workload.sha256)]
    return next((known for known in newest_first if not served or _rebuilt(known).by_token), None)


def _rebuilt(settings: Mapping[str, Any]) -> Policy:
    """The policy of settings as a plan keeps them. A file may not say which code runs: built-in policies alone."""
    name = settings.get("policy") if isinstance(settings, Mapping) else settings
    if not isinstance(name, str) or not is_ours(name):
        raise PlanError(
            f"The plan's own choice is policy {name!r:.80}, which is not built in. Name the policy you want (--policy)."
        )
    try:
        common = {key: settings[key] for key in COMMON if key in settings}
        return make(name, **{**without_denominator(settings.get("params", {})), **common})
    except (PolicyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"The plan's own choice cannot be used: {error} Name the policy you want (--policy), or run `ace tune` again."
        ) from error
