"""What Triton's interpreter has to be taught before kernels run in it."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain_masks() -> None:
    """Triton 3.9's takes no mask whose numbers are not bool, which a comparison of scalars gives it."""
    from triton.runtime.interpreter import InterpreterBuilder

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        _bool(InterpreterBuilder, name, place)


def _bool(builder: type, name: str, place: int) -> None:
    stock = getattr(builder, name)

    def patched(self: object, *args: object, **kwargs: object) -> object:
        mask: Any = args[place]
        if not isinstance(mask, np.ndarray):  # a descriptor's is one, of bool
            mask.data = mask.data.astype(bool)
        return stock(self, *args, **kwargs)

    setattr(builder, name, patched)
