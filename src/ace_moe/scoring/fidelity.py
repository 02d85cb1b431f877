"""Distance between the skipped and the unskipped model: their predictions compared token by token.

KL(p ‖ q) = Σ_v p log(p / q) in nats, p unskipped and q skipped, both through the same dispatch in the same precision.
Agreement: whether the likeliest token is the same. Acceptance: Σ_v min(p, q), the share of the skipped model's drafts that
speculative decoding would accept. Perplexity can fall when a model gets blunter; these cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROOM = 2 << 30  # bytes of the unskipped model's logits that are kept; what does not fit is computed again
CHUNK = 1 << 26  # numbers compared at once: bounds memory for any vocabulary
CACHED = 1 << 20  # the same on a CPU, where what leaves the cache takes four times as long


@dataclass
class Fidelity:
    """Sums over the predicted tokens of each window, [windows]."""

    kl: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)

    def add(self, sums: Tensor) -> None:
        """Append the sums [B, 3] of one batch of windows."""
        for name, column in zip(("kl", "agreement", "acceptance"), sums.T.tolist(), strict=True):
            getattr(self, name).extend(column)


def compare(whole: Tensor, skipped: Tensor) -> Tensor:
    """Compare logits [B, L, V]: KL, agreement and acceptance, summed over all tokens but the last, [B, 3] in fp64.

    The last token of a window predicts what is not there: it has no part in perplexity, and so none here.
    """
    batch, length, vocabulary = whole.shape
    step = max(1, (CACHED if skipped.device.type == "cpu" else CHUNK) // (batch * vocabulary))
    total = torch.zeros(batch, 3, dtype=torch.float64)
    for start in range(0, length - 1, step):
        part = slice(start, min(start + step, length - 1))
        log_p = whole[:, part].to(skipped.device).float().log_softmax(-1)  # [B, l, V]
        log_q = skipped[:, part].float().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)  # rounding can make it negative
        same = (log_p.argmax(-1) == log_q.argmax(-1)).float()
        accepted = torch.minimum(log_p, log_q).exp().sum(-1)
        total += torch.stack([x.double().sum(-1) for x in (kl, same, accepted)], dim=-1).cpu()
    return total


class Reference:
    """The unskipped model's logits by batch of windows, kept in bounded memory as the model gives them."""

    def __init__(self, room: int = ROOM):
        self.room = room
        self._kept: dict[int, Tensor] = {}

    def keep(self, number: int, logits: Tensor) -> None:
        """Keep a batch's logits on the CPU if there is room."""
        size = logits.numel() * logits.element_size()
        if number not in self._kept and size <= self.room:
            self.room -= size
            self._kept[number] = logits.detach().cpu()

    def of(self, number: int, compute: Callable[[], Tensor]) -> Tensor:
        """Take logits that were kept, else compute them again."""
        logits = self._kept.get(number)
        if logits is None:
            logits = compute()
            self.keep(number, logits)
        return logits
