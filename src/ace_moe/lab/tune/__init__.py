"""The settings that suit a model, chosen on one part of a text and checked on the rest."""

from .tuning import Tuned, tune

__all__ = ["Tuned", "tune"]
