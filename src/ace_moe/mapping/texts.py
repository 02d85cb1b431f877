"""The text that budgets are mapped on: one that is given, or what the unskipped model writes itself.

Its own text is several short samples, because one long can fall into a rut. A chat model writes both parts of a conversation.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import progress
from ..checkpoint.loading import load_tokenizer, load_windows
from ..errors import TextError, no_numbers
from ..plan import OWN
from ..scoring.predictions import predicts
from ..text import Text, Windows, cut, windows_of

SAMPLES, LENGTH, SEED = 8, 256, 0
LONGEST_TURN = 64  # tokens of a user's turn, so that most of a sample is answer
MARK = "ACEMARK"
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


# ---- the model's own ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """What stands around a user's turn, as tokens: a plain text has no turns, and begins with `before`."""

    before: list[int]
    between: list[int]
    ends: frozenset[int]

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: Any) -> Turns:
        return cls._of_template(model, tokenizer) or cls([first_token(model, tokenizer)], [], frozenset())

    @classmethod
    def _of_template(cls, model: PreTrainedModel, tokenizer: Any) -> Turns | None:
        """From the chat template, if there is one that shows what the user said as it was said."""
        if not getattr(tokenizer, "chat_template", None):
            return None
        user = [{"role": "user", "content": MARK}]
        try:
            parts = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True).split(MARK)
            before, between = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
        except Exception:  # templates are programs: what one raises has no common class
            return None
        if not before or not between:
            return None
        return cls(before, between, frozenset([between[0], *_ids(_facts(model, "eos_token_id"))]))


def first_token(model: PreTrainedModel, tokenizer: Any = None) -> int:
    """What a text begins with: the model's first token, else the one that ends the text before it."""
    for name in ("bos_token_id", "eos_token_id"):
        known = (getattr(tokenizer, name, None), *_facts(model, name))
        if found := _ids(known):
            return found[0]
    raise TextError(
        "The model names no token to begin a text with, so it cannot write its own. Give a text: --text FILE."
    )


def _facts(model: PreTrainedModel, name: str) -> list[Any]:
    """What generation and text configuration say."""
    return [getattr(c, name, None) for c in (model.generation_config, model.config.get_text_config())]


def _ids(found: Sequence[Any]) -> list[int]:
    """Single ids and lists of them, one after the other."""
    flat = [i for value in found for i in (value if isinstance(value, list | tuple) else [value])]
    return [i for i in flat if isinstance(i, int) and i >= 0]


class Writer:
    """One sample as it grows: what must come next stands in `forced`, else the model's choice is taken."""

    def __init__(self, turns: Turns):
        self.turns, self.forced = turns, deque(turns.before)
        self.asks, self.length = bool(turns.between), 0

    def take(self, choice: int) -> int:
        """The next token, where the model chose `choice`."""
        if self.forced:
            return self.forced.popleft()
        self.length += 1
        ended = choice in self.turns.ends or (self.asks and self.length > LONGEST_TURN)
        if not self.turns.between or not ended:
            return choice
        self.forced.extend(self.turns.between if self.asks else [choice, *self.turns.before])
        self.asks, self.length = not self.asks, 0
        return self.forced.popleft()


def own_windows(
    model: PreTrainedModel, tokenizer: Any = None, samples: int = SAMPLES, length: int = LENGTH, seed: int = SEED
) -> Windows:
    """Windows [samples, length] that the model samples at temperature 1 from its first token, each by itself."""
    if not predicts(model):
        raise TextError("The model predicts no tokens, so it cannot write its own text. Give one: --text FILE.")
    turns = Turns.of(model, tokenizer)
    return windows_of(_sample(model, [Writer(turns) for _ in range(samples)], length, seed), OWN)


@torch.no_grad()  # what comes out is an ordinary tensor, as a text's windows are
def _sample(model: PreTrainedModel, writers: Sequence[Writer], length: int, seed: int) -> Tensor:
    """[samples, length]. Choices are drawn on the CPU, so that a seed means the same on every device."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.tensor([[writer.take(0)] for writer in writers])
    cache: Any = None
    with progress.task("own text", length, done=1) as task:
        while ids.shape[1] < length:
            new = ids if cache is None else ids[:, -1:]
            out = model(input_ids=new.to(model.device), past_key_values=cache, use_cache=True)
            cache = getattr(out, "past_key_values", None)  # without one, everything is read again
            chosen = _draw(out.logits[:, -1], chance)
            ids = torch.cat([ids, torch.tensor([[w.take(c)] for w, c in zip(writers, chosen, strict=True)])], 1)
            task.advance()
    return ids


def _draw(logits: Tensor, chance: torch.Generator) -> list[int]:
    """logits [B, V] → one token for each row."""
    likely = logits.float().softmax(-1).cpu()
    if not likely.isfinite().all():
        raise no_numbers("logits")
    return torch.multinomial(likely, 1, generator=chance).squeeze(1).tolist()
