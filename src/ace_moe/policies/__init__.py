"""Policies: methods that decide slots, by name."""

from .base import Decision, Policy, Routing, Tables, TokenPolicy
from .forms import Ace, Gsp, Rcr, Share
from .registry import AUTO, POLICIES, PRESETS, choose, find, is_ours, lab, make, parse, policy_for

__all__ = [
    "AUTO", "POLICIES", "PRESETS", "Ace", "Decision", "Gsp", "Policy", "Rcr", "Routing", "Share", "Tables",
    "TokenPolicy", "choose", "find", "is_ours", "lab", "make", "parse", "policy_for",
]  # fmt: skip
