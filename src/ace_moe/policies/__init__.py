"""Policies: methods that decide slots, by name."""

from .ace import Ace
from .base import Decision, Policy, Routing, Tables, TokenPolicy
from .registry import AUTO, POLICIES, PRESETS, choose, find, make, parse
from .single import Gsp, Rcr, Share

__all__ = [
    "AUTO",
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
    "choose",
    "find",
    "make",
    "parse",
]
