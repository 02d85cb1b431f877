"""The tokens a benchmark runs on: random ones, or a text's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...text import Windows

Tokens = Callable[[int, int], Tensor]  # (batch, length) → ids [B, L]


def random_tokens(model: PreTrainedModel, seed: int = 1) -> Tokens:
    vocabulary = model.get_input_embeddings().num_embeddings

    def draw(batch: int, length: int) -> Tensor:
        generator = torch.Generator(model.device).manual_seed(seed)
        return torch.randint(
            min(5, vocabulary - 1), vocabulary, (batch, length), device=model.device, generator=generator
        )

    return draw


def text_tokens(windows: Windows, device: torch.device) -> Tokens:
    """Sequences that start at places spread over the text; one too short for them is read again from its start."""
    text = windows.ids.flatten()

    def draw(batch: int, length: int) -> Tensor:
        starts = torch.arange(batch) * max(1, len(text) // batch)
        places = (starts.unsqueeze(1) + torch.arange(length)) % len(text)
        return text[places].to(device)

    return draw
