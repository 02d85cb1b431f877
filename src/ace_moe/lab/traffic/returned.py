"""Experts that a server returned (vLLM's --enable-return-routed-experts): an .npz file with ids [T, layers, k] for each request.

Slots stand in the order of their gates, which is all that is known of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ...decider.rows import PHASES
from ...engines.traces.record import Slots, Trace
from ...errors import TraceError, brief
from ...files import expand

SUFFIX = ".npz"


def load_returned(path: str | Path) -> Trace:
    """Layers are numbered as they come; gates are places: k for the first slot, 1 for the last."""
    path = expand(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            found = [np.asarray(file[name]) for name in file.files]
        whole = np.concatenate(found)
        numbers = whole.ndim == 3 and whole.dtype.kind in "iu" and whole.size
        if not numbers or not 0 <= whole.min() <= whole.max() < 1 << 15:
            raise ValueError(f"{whole.dtype} of shape {whole.shape} where experts [tokens, layers, slots] should be")
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise TraceError(
            f"{path} holds no returned experts ({brief(error)}). Save them with numpy.savez, one array [tokens, layers, slots] "
            "for each request."
        ) from error
    ids, k = torch.from_numpy(whole.astype(np.int64)), whole.shape[-1]
    places = torch.arange(k, 0, -1).float().expand(len(ids), k)
    layers = {str(n): Slots.of(ids[:, n], places) for n in range(ids.shape[1])}
    requests = torch.arange(len(found)).repeat_interleave(torch.tensor([len(part) for part in found])).int()
    nothing = torch.zeros(len(ids), dtype=torch.uint8)
    return Trace(layers, requests, nothing + PHASES.index("prefill"), nothing, (0.0,), None, has_gates=False).check()
