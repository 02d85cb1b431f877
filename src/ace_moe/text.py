"""Texts as workloads: read a file, tokenise it, cut it into windows."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import TextError
from .plan import Workload


@dataclass(frozen=True)
class Windows:
    """ids [N, L]: consecutive windows of one text, none padded."""

    ids: Tensor
    workload: Workload

    def batches(self, size: int) -> list[Tensor]:
        return list(self.ids.split(size))


def read_text(path: str | Path) -> str:
    """A plain text file, or a JSON-lines file whose rows have a `text` field, joined by blank lines."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise TextError(f"There is no text file at {path}.")
    try:
        text = path.read_text(encoding="utf-8")
        text = (
            "\n\n".join(json.loads(row)["text"] for row in text.splitlines() if row)
            if path.suffix == ".jsonl"
            else text
        )
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text ({error.reason}). Give a .txt or .jsonl file.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TextError(f"{path}: each line must be a JSON object with a `text` field ({error!r}).") from error
    if not text.strip():
        raise TextError(f"{path} is empty. Give a text of the kind the model will serve.")
    return text


def cut(text: str, tokenizer: Any, window: int, tokens: int | None, vocabulary: int, name: str) -> Windows:
    """Whole windows of `window` tokens from the start of the text, at most `tokens` tokens in all."""
    # about four characters make a token; eight leave room, and a gigabyte of text is not tokenised for 64k tokens
    used = text if tokens is None else text[: 16 * tokens]
    ids = torch.tensor(tokenizer(used, verbose=False)["input_ids"], dtype=torch.long)
    if tokens is not None:
        ids = ids[:tokens]
    if len(ids) and int(ids.max()) >= vocabulary:
        raise TextError(
            f"The tokenizer gives token {int(ids.max())}, the model knows {vocabulary}: it is the tokenizer of another model."
        )
    count = len(ids) // window
    if count == 0:
        raise TextError(
            f"{name} has {len(ids)} tokens, a window has {window}. Give a longer text or a smaller --window."
        )
    ids = ids[: count * window].view(count, window)
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    return Windows(ids, Workload(name, digest, ids.numel()))
