"""The text that budgets are mapped on: one that is given, or what the model writes itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint.loading import load_tokenizer, load_windows
from ..errors import TextError
from ..text import Text, Windows, cut, windows_of
from .own_text import own_windows

MIXED = "mixed"


@dataclass(frozen=True)
class TextSource:
    """Where a text comes from: `text` if it is given, else the model writes its own. `model` says where the tokenizer is."""

    model: str | Path
    text: Text | None = None
    window: int = 1024
    tokens: int = 65536
    tokenizer: Any = None

    def windows(self, model: PreTrainedModel) -> Windows:
        if self.text is not None:
            return load_windows(model, self._tokenizer(), self.text, self.window, self.tokens)
        tokenizer = self.tokenizer
        with suppress(TextError):  # its chat template is all that is wanted of it
            tokenizer = tokenizer or load_tokenizer(self.model)
        return own_windows(model, tokenizer)

    def sha256(self) -> str | None:
        """The hash that a given text has in a plan, known without the model; None for the model's own text."""
        if self.text is None:
            return None
        windows = cut(self.text.content, self._tokenizer(), self.window, self.tokens, sys.maxsize, self.text.name)
        return windows.workload.sha256

    def _tokenizer(self) -> Any:
        if self.tokenizer is None and not str(self.model).strip("."):  # a model that was made, not loaded
            raise TextError(
                "The model does not say where its tokenizer is. Give it: ACE.from_pretrained(…, tokenizer=…)."
            )
        return self.tokenizer or load_tokenizer(self.model)


def windows_by_text(
    model: PreTrainedModel, source: str | Path, texts: Sequence[Path], window: int = 1024, tokens: int = 65536
) -> list[Windows]:
    """Windows of each text, and behind several of all of them together, where each counts by its tokens."""
    sources = [TextSource(source, None if text is None else Text.of(text), window, tokens) for text in texts or (None,)]
    each = [one.windows(model) for one in sources]
    return each if len(each) == 1 else [*each, windows_of(torch.cat([w.ids for w in each]), MIXED)]
