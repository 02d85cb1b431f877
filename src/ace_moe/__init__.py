"""Faster Mixture-of-Experts inference by not running the expert slots that contribute little."""

from .ace import ACE
from .errors import AceError
from .offline import build_plan
from .plan import Plan
from .version import __version__

__all__ = ["ACE", "AceError", "Plan", "__version__", "build_plan"]
