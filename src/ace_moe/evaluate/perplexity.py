"""Perplexity of a causal language model over windows of text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..text import Windows


@dataclass
class Score:
    """Negative log-likelihood of each window's predicted tokens."""

    nll: list[float]
    targets: int

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.nll) / self.targets)


@torch.inference_mode()
def score(model: PreTrainedModel, windows: Windows, batch: int = 1, tick: Callable[[], None] = lambda: None) -> Score:
    """Each window is read by itself; every token but its first is predicted."""
    nll: list[float] = []
    for ids in windows.batches(batch):
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits
        nll += window_nll(logits, ids.to(logits.device)).tolist()
        tick()
    return Score(nll, windows.ids.shape[0] * (windows.ids.shape[1] - 1))


def window_nll(logits: Tensor, ids: Tensor) -> Tensor:
    """logits [B, L, V], ids [B, L] → [B], summed in fp32."""
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return loss.view(ids.shape[0], -1).double().sum(1)
