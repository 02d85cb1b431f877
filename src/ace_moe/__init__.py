"""Faster Mixture-of-Experts inference by not running the expert slots that contribute little."""

from .ace import ACE, detach
from .errors import AceError
from .plan import Plan
from .tables.build import build_plan
from .version import __version__

__all__ = ["ACE", "AceError", "Plan", "__version__", "build_plan", "detach"]
