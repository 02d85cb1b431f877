"""What a language model makes of a text: the negative log-likelihood of windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from .text import Windows

Tick = Callable[[], None]


@dataclass
class Score:
    """Negative log-likelihood by window, and what each window weighs (its predicted tokens; empty: all the same)."""

    nll: list[float]
    targets: int
    weights: list[int] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.nll) / self.targets)

    @property
    def by_window(self) -> list[int]:
        """Weights, [windows]."""
        return self.weights or [self.targets // len(self.nll)] * len(self.nll)


@torch.inference_mode()
def score(model: PreTrainedModel, windows: Windows, batch: int = 1, tick: Tick = lambda: None) -> Score:
    """Each window is read by itself; every token but its first is predicted."""
    nll: list[float] = []
    for ids in windows.batches(batch):
        nll += read(model, ids)
        tick()
    return Score(nll, windows.ids.shape[0] * (windows.ids.shape[1] - 1))


def read(model: PreTrainedModel, ids: Tensor) -> list[float]:
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits
    return window_nll(logits, ids.to(logits.device)).tolist()


def window_nll(logits: Tensor, ids: Tensor) -> Tensor:
    """logits [B, L, V], ids [B, L] → [B], summed in fp32."""
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return loss.view(ids.shape[0], -1).double().sum(1)
