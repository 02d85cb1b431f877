"""Decoding that is not bound by the host: one CUDA graph per step over a static cache."""

from .decoder import Decoder, tuned

__all__ = ["Decoder", "tuned"]
