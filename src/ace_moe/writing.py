"""Text from a model: a prompt or a conversation as tokens, its continuation as it comes, and two texts word by word."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TextStreamer

from . import progress
from .errors import OptionError, brief
from .text import encode

if TYPE_CHECKING:
    from .ace import ACE

Message = dict[str, str]  # {"role": "user", "content": …}
Words = list[tuple[str, bool]]  # a word with the space in front of it, and whether the other text has it too


@dataclass(frozen=True)
class Written:
    """A model's text, and how long it took; the first token apart, which is mostly the prompt."""

    text: str
    tokens: int
    first: float  # seconds to the first token
    seconds: float  # in all

    @property
    def speed(self) -> float:
        """Tokens a second behind the first."""
        return (self.tokens - 1) / (self.seconds - self.first) if self.tokens > 1 else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.speed}


class Stream(TextStreamer):
    """Whole words as they come, and when the first of them did."""

    def __init__(self, tokenizer: Any, say: Callable[[str], object]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.say, self.times = say, list[float]()

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())  # the prompt first, then each token
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.say(text)


def check_prompt(prompt: str, max_new_tokens: int) -> None:
    """Refuse a prompt without text, or nothing to generate."""
    if not prompt:
        raise OptionError("The prompt is empty. Give the model some text to continue with --prompt.")
    if max_new_tokens < 1:
        raise OptionError(f"There is nothing to generate: give --max-new-tokens of at least 1, not {max_new_tokens}.")


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def as_text(tokenizer: Any, messages: Sequence[Message], chat: bool) -> str:
    """Write a conversation as the model's chat template does, or what was said, one after the other."""
    if not chat:
        return "".join(message["content"] for message in messages)
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs: what one raises has no common class
        raise OptionError(
            f"The model's chat template cannot be used ({brief(error)}). Give --no-chat for plain text."
        ) from error


def tokens_of(model: PreTrainedModel, tokenizer: Any, text: str, chat: bool = False) -> Tensor:
    """Encode a text: [1, L]. A chat template has the special tokens in its text already."""
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = encode(tokenizer, text, vocabulary, special=not chat).to(model.device)[None]
    if not ids.numel():
        raise OptionError(f"The tokenizer makes no token of the prompt {text!r}. Give the model some text to continue.")
    return ids


@torch.inference_mode()
def write(
    model: PreTrainedModel,
    tokenizer: Any,
    ids: Tensor,
    max_new_tokens: int,
    say: Callable[[str], object] = lambda piece: None,
) -> Written:
    """Continue ids [1, L] greedily, and say each piece as it comes."""
    stream, start = Stream(tokenizer, say), time.perf_counter()
    mask = torch.ones_like(ids)
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, streamer=stream)
    new = tokens[0, ids.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    return Written(text, len(new), stream.times[1] - start, stream.times[-1] - start)


def word_by_word(one: str, other: str) -> tuple[Words, Words]:
    """Split both texts into words, each marked as shared or not."""
    first, second = (re.findall(r"\s*\S+", text) for text in (one, other))
    one_bare, other_bare = ([word.strip() for word in words] for words in (first, second))
    shared: tuple[set[int], set[int]] = (set(), set())
    for a, b, size in SequenceMatcher(None, one_bare, other_bare, autojunk=False).get_matching_blocks():
        shared[0].update(range(a, a + size))
        shared[1].update(range(b, b + size))
    return [(w, i in shared[0]) for i, w in enumerate(first)], [(w, i in shared[1]) for i, w in enumerate(second)]


# ---- side by side -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A text of the stock model and one with a budget."""

    unskipped: Written
    skipped: Written
    requested: float
    realised: float

    @property
    def words(self) -> tuple[Words, Words]:
        return word_by_word(self.unskipped.text, self.skipped.text)

    def to_json(self) -> dict[str, Any]:
        texts = {"unskipped": self.unskipped.to_json(), "skipped": self.skipped.to_json()}
        return {**texts, "requested": self.requested, "realised": self.realised}


def write_pair(
    model: PreTrainedModel, tokenizer: Any, ids: Tensor, ace: ACE, max_new_tokens: int, requested: float
) -> Pair:
    """Write both continuations of ids [1, L]. Two tokens in front of each are not timed: first calls build things."""
    with progress.task("texts", 2 * max_new_tokens) as task:

        def advance(piece: str) -> None:
            task.advance()

        write(model, tokenizer, ids, 2)
        unskipped = write(model, tokenizer, ids, max_new_tokens, advance)
        with ace(model):
            write(model, tokenizer, ids, 2)
            ace.reset()
            skipped = write(model, tokenizer, ids, max_new_tokens, advance)
    return Pair(unskipped, skipped, requested, ace.realised)
