"""A language model over windows of a text: its logits and losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from .. import progress
from ..text import Windows
from .fidelity import Fidelity, Reference, compare
from .losses import Losses, check_loss

Whole = Callable[[int, Tensor], Tensor]


@torch.inference_mode()
def score(
    model: PreTrainedModel, windows: Windows, batch: int = 1, whole: Whole | None = None, keep: Reference | None = None
) -> Losses:
    """Measure the loss of every window, each read by itself; every token but its first is predicted.

    `whole(number, ids)` gives the unskipped model's logits of a batch, to compare these with; `keep` keeps these as such.
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
    return Losses(nll, windows.ids.shape[0] * (windows.ids.shape[1] - 1), fidelity=fidelity)


def predict(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Run the model: ids [B, L] → logits [B, L, V]."""
    return model(input_ids=ids.to(model.device), use_cache=False).logits


def predicts(model: PreTrainedModel) -> bool:
    """True if the model has a head that predicts tokens."""
    return model.get_output_embeddings() is not None


def read(model: PreTrainedModel, ids: Tensor) -> list[float]:
    """Measure the loss of each window [B, L]; refuse a model whose losses are not numbers before anything is stored."""
    logits = predict(model, ids)
    losses = window_nll(logits, ids.to(logits.device)).tolist()
    for loss in losses:
        check_loss(loss / ids.shape[1])
    return losses


def window_nll(logits: Tensor, ids: Tensor) -> Tensor:
    """Sum the loss of each window: logits [B, L, V], ids [B, L] → [B]."""
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return loss.view(ids.shape[0], -1).double().sum(1)
