"""Faster Mixture-of-Experts inference by not running the expert slots that contribute little."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .ace import ACE as ACE
    from .ace import detach as detach
    from .errors import AceError as AceError
    from .plan import Plan as Plan
    from .policies import POLICIES as POLICIES
    from .policies import Policy as Policy
    from .tables.build import build_plan as build_plan

# Where each name lives. Torch and transformers take seconds to import: they are, once one of these is asked for.
LIVES_IN = {
    "ACE": "ace",
    "AceError": "errors",
    "POLICIES": "policies",
    "Plan": "plan",
    "Policy": "policies",
    "build_plan": "tables.build",
    "detach": "ace",
}

__all__ = ["ACE", "POLICIES", "AceError", "Plan", "Policy", "__version__", "build_plan", "detach"]


def __getattr__(name: str) -> Any:
    if name not in LIVES_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f".{LIVES_IN[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
