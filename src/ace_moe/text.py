"""Texts as workloads: read a file, tokenise it, cut it into windows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import OptionError, TextError, brief
from .files import expand
from .plan import Workload

JSON = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Windows:
    """ids [N, L]: consecutive windows of one text, none padded."""

    ids: Tensor
    workload: Workload

    def batches(self, size: int) -> list[Tensor]:
        """Split the windows into batches [size, L], the last one smaller."""
        check_sizes(self.ids.shape[1], batch=size)
        return list(self.ids.split(size))


@dataclass(frozen=True)
class Text:
    """A text, and the name it goes by in messages."""

    content: str
    name: str

    @classmethod
    def of(cls, source: str | Path | Sequence[str] | Text) -> Text:
        """Read a file, join the documents of a list, or take a string as the text itself.

        A string names a file if that is there, or if it can only be meant as one: a single line that ends like a file.
        """
        if isinstance(source, Text):
            return source
        if isinstance(source, str):
            endings = (".txt", ".raw", *JSON)
            if os.path.isfile(expand(source)) or ("\n" not in source and Path(source).suffix.lower() in endings):
                source = Path(source)
        if isinstance(source, Path):
            return cls(read_text(source), source.name)
        several = isinstance(source, Iterable) and not isinstance(source, (str, Mapping))
        parts: list[Any] = list(source) if several else [source]
        if not all(isinstance(part, str) for part in parts) or not "".join(parts).strip():
            raise TextError("A text is a file, a string or a list of strings, and not empty.")
        return cls("\n\n".join(parts), "given text")


def read_text(path: str | Path) -> str:
    """Read a plain text file, or join the `text` fields of a JSON file (lines or a list) by blank lines."""
    path = expand(path)
    if not os.path.isfile(path):
        raise TextError(f"There is no text file at {path}. Give a .txt file, or a .jsonl file with a `text` field.")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() in JSON:
            # one list of objects, or one object a line; not splitlines(): a JSON string may hold other line ends (U+2028)
            listed = text.lstrip().startswith("[")
            rows = json.loads(text) if listed else [json.loads(row) for row in text.split("\n") if row.strip()]
            text = "\n\n".join(row["text"] for row in rows)
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text ({error.reason}). Give a .txt or .jsonl file.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TextError(
            f"{path}: each line must be a JSON object with a `text` field ({type(error).__name__}: {brief(error)}). "
            "Fix the file, or give plain text as .txt."
        ) from error
    if not text.strip():
        raise TextError(f"{path} is empty. Give a text of the kind the model will serve.")
    return text


def check_sizes(window: int, tokens: int | None = None, batch: int = 1) -> None:
    """Refuse sizes that no pass can have; a window predicts every token but its first, so it needs two."""
    if window < 2 or batch < 1 or (tokens is not None and tokens < window):
        raise OptionError(
            f"A pass needs windows of at least 2 tokens, at least one window in `tokens` and one at a time; not window "
            f"{window}, tokens {tokens}, batch {batch}. Change --window, --tokens or --batch."
        )


def encode(tokenizer: Any, text: str, vocabulary: int, special: bool = True) -> Tensor:
    """Tokenise a text into ids [L] that the model knows; `special`: with what the tokenizer puts around a text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(f"The text has characters that are not Unicode text ({error.reason}). Remove them.") from error
    how = {} if special else {"add_special_tokens": False}
    ids = torch.tensor(tokenizer(text, verbose=False, **how)["input_ids"], dtype=torch.long)
    if len(ids) and int(ids.max()) >= vocabulary:
        raise TextError(
            f"The tokenizer gives token {int(ids.max())}, the model knows {vocabulary}: it is the tokenizer of another "
            "model. Put the model's own tokenizer files into its folder."
        )
    return ids


def cut(text: str, tokenizer: Any, window: int, tokens: int | None, vocabulary: int, name: str) -> Windows:
    """Cut whole windows of `window` tokens from the start of the text, at most `tokens` tokens in all."""
    check_sizes(window, tokens)
    # about four characters make a token; sixteen leave room, and a gigabyte of text is not tokenised for 64k tokens
    used = text if tokens is None else text[: 16 * tokens]
    ids = encode(tokenizer, used, vocabulary)[:tokens]
    count = len(ids) // window
    if count == 0:
        raise TextError(
            f"{name} has {len(ids)} tokens, a window has {window}. Give a longer text or a smaller --window."
        )
    return windows_of(ids[: count * window].view(count, window), name)


def windows_of(ids: Tensor, name: str) -> Windows:
    """Wrap ids [N, L] as a workload that goes by the hash of its tokens."""
    digest = hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest()
    return Windows(ids, Workload(name, digest, ids.numel()))
