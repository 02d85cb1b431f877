"""Traces of routing: what a model's routers said of real traffic, kept in a small file and asked questions without a model."""

from .record import Slots, Trace

__all__ = ["Slots", "Trace"]
