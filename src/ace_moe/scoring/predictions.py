"""What a language model makes of a text: the negative log-likelihood of windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from .. import progress
from ..errors import ModelError
from ..text import Windows
from .fidelity import Fidelity, Reference, compare

LARGEST = 700.0  # a loss past which exp() is no number
Whole = Callable[[int, Tensor], Tensor]


@dataclass
class Score:
    """Negative log-likelihood by window, and what each window weighs (its predicted tokens; empty: all the same)."""

    nll: list[float]
    targets: int
    weights: list[int] = field(default_factory=list)
    fidelity: Fidelity | None = None  # against the unskipped model, where that was asked

    @property
    def perplexity(self) -> float:
        return math.exp(_sane(sum(self.nll) / self.targets))

    @property
    def by_window(self) -> list[int]:
        """Weights, [windows]."""
        return self.weights or [self.targets // len(self.nll)] * len(self.nll)


@torch.inference_mode()
def score(
    model: PreTrainedModel, windows: Windows, batch: int = 1, whole: Whole | None = None, keep: Reference | None = None
) -> Score:
    """Each window is read by itself; every token but its first is predicted.

    `whole(number, ids)` gives the unskipped model's logits of a batch to hold these against; `keep` keeps these as such.
    """
    nll: list[float] = []
    fidelity = None if whole is None else Fidelity()
    with progress.task("windows", len(windows.ids)) as task:
        for number, ids in enumerate(windows.batches(batch)):
            logits = predict(model, ids)
            nll += window_nll(logits, ids.to(logits.device)).tolist()
            if keep is not None:
                keep.keep(number, logits)
            if whole is not None and fidelity is not None:
                fidelity.add(compare(whole(number, ids), logits))
            task.advance(len(ids))
    return Score(nll, windows.ids.shape[0] * (windows.ids.shape[1] - 1), fidelity=fidelity)


def predict(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [B, L, V]."""
    return model(input_ids=ids.to(model.device), use_cache=False).logits


def predicts(model: PreTrainedModel) -> bool:
    """Whether the model has a head that predicts tokens."""
    return model.get_output_embeddings() is not None


def read(model: PreTrainedModel, ids: Tensor) -> list[float]:
    """Loss of each window [B, L]; a model that gives no numbers is noticed before anything is kept of them."""
    logits = predict(model, ids)
    losses = window_nll(logits, ids.to(logits.device)).tolist()
    for loss in losses:
        _sane(loss / ids.shape[1])
    return losses


def _sane(loss: float) -> float:
    """The loss a token has, if a perplexity can be made of it."""
    if not loss < LARGEST:  # NaN is not
        raise ModelError(
            f"The model gives no perplexity on this text: its loss is {loss:g} a token. It is damaged or diverged, or runs in "
            "a precision it was not trained for; check the checkpoint, or try another --device."
        )
    return loss


def window_nll(logits: Tensor, ids: Tensor) -> Tensor:
    """logits [B, L, V], ids [B, L] → [B], summed in fp32."""
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return loss.view(ids.shape[0], -1).double().sum(1)
