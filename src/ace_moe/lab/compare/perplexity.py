"""Perplexity by protocol, the two ways of WikiText-2 by name, as a run that can be stopped.

`standard`: the text as it stands, windows of 2,048 tokens that do not overlap, the last one shorter; a model that expects
a BOS token gets one in front of every window; each predicted token counts once.
`released`: what the ACE paper's released code does. Only rows of at least 512 characters, joined without a blank line; BOS
in front of the first window alone; each window's mean loss is multiplied by its length, one more than it predicts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ... import progress
from ...ace import ACE
from ...errors import OptionError, TextError
from ...scoring.losses import Losses, perplexity_interval
from ...scoring.predictions import read
from ...text import check_sizes, encode
from ..store import PERPLEXITY, Results, ResultsFile
from .subject import identity_of

SHORTEST_ROW = 512  # characters; rows under it are left out by the released code


# ---- protocols ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """A way to cut a text into windows and to turn their losses into one number."""

    name: str
    prepare: Callable[[str], str]
    bos_everywhere: bool  # in front of every window, else of the text
    loss_times_length: bool

    def score(self, nll: Sequence[float], lengths: Sequence[int]) -> Losses:
        """nll, lengths [windows]; a window of L tokens predicts L − 1."""
        if not self.loss_times_length:
            weights = [n - 1 for n in lengths]
            return Losses(list(nll), sum(weights), weights)
        scaled = [value / (n - 1) * n for value, n in zip(nll, lengths, strict=True)]
        return Losses(scaled, sum(lengths), list(lengths))


def long_rows(text: str) -> str:
    """Rows of at least 512 characters with their line ends; a row is a line of the raw file."""
    return "".join(row for row in text.splitlines(keepends=True) if len(row) >= SHORTEST_ROW)


PROTOCOLS = {
    "standard": Protocol("standard", lambda text: text, bos_everywhere=True, loss_times_length=False),
    "released": Protocol("released", long_rows, bos_everywhere=False, loss_times_length=True),
}


def protocol_named(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise OptionError(f"There is no protocol {name!r}. Choose one of: {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]


def pieces(
    protocol: Protocol, text: str, tokenizer: Any, vocabulary: int, window: int = 2048, tokens: int | None = None
) -> list[Tensor]:
    """The text as windows [L], the last one shorter if need be; at most `tokens` tokens of it."""
    check_sizes(window, tokens)
    used = protocol.prepare(text)
    used = used if tokens is None else used[: 16 * tokens]
    ids = encode(partial(tokenizer, add_special_tokens=False), used, vocabulary)[:tokens]
    start = torch.tensor(beginning(tokenizer), dtype=torch.long)
    if protocol.bos_everywhere:
        cut = [torch.cat([start, part]) for part in ids.split(window - len(start))]
    else:
        cut = list(torch.cat([start, ids]).split(window))
    found = [part for part in cut if len(part) > max(1, len(start))]  # a lone token predicts nothing
    if not found:
        raise TextError(f"Protocol {protocol.name!r} leaves nothing of this text. Give a longer one.")
    return found


def beginning(tokenizer: Any) -> list[int]:
    """Tokens the tokenizer puts in front of a text by itself: [BOS], or none."""
    plain, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    starts = (i for i in range(len(full)) if full[i : i + len(plain)] == plain)
    return list(full[: next(starts, 0)])


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    protocol: Protocol,
    windows: Sequence[Tensor],
    batch: int = 1,
    known: Sequence[float] = (),
    save: Callable[[list[float]], None] = lambda nll: None,
) -> Losses:
    """The protocol's score, by batches of windows of one length. `known` are windows an earlier run finished; `save` gets all
    finished ones after each batch."""
    nll = list(known)
    with progress.task("windows", len(windows), done=len(nll)) as task:
        for _, alike in groupby(windows[len(nll) :], key=len):
            for ids in torch.stack(list(alike)).split(batch):
                nll += read(model, ids)
                save(nll)
                task.advance(len(ids))
    return protocol.score(nll, [len(w) for w in windows])


# ---- a run that can be stopped --------------------------------------------------------------------------------------


def run(
    model: PreTrainedModel,
    ace: ACE | None,
    protocol: Protocol,
    windows: Sequence[Tensor],
    path: Path | None,
    facts: Results,
    batch: int = 1,
) -> Results:
    """The protocol's perplexity with its interval and, with a plan attached, the realised ratio.

    Losses and slot counts go into `path`, if it is given, after every batch; a run that was stopped goes on from there.
    """
    text = hashlib.sha256(torch.cat(list(windows)).numpy().tobytes()).hexdigest()
    identity = {"protocol": protocol.name, "text": text, "windows": len(windows), **facts["setup"]}
    file = ResultsFile(path, PERPLEXITY, identity) if path is not None else None
    results: Results = {"kind": PERPLEXITY} if file is None else file.read()
    if ace is not None:
        ace.reset()
        ace.deciders.continue_counts(results.get("counts", {}))

    def save(nll: list[float]) -> None:
        counts = {} if ace is None else {key: c.tolist() for key, c in ace.deciders.counts().items()}
        with nullcontext(results) if file is None else file.changed() as stored:
            if len(nll) > len(stored.get("nll", ())):  # windows come in order: the longer list has all of the other
                stored |= {**facts, "nll": list(nll), "counts": counts}

    losses = measure(model, protocol, windows, batch, results.get("nll", []), save)
    bounds = perplexity_interval(losses)
    with nullcontext(results) if file is None else file.changed() as stored:
        stored |= {
            **facts,
            "perplexity": losses.perplexity,
            "interval": [bounds.low, bounds.high],
            "windows": len(windows),
            "targets": losses.targets,
            "ace": None if ace is None else ace.report(),
        }
    return stored


def setup_of(model: PreTrainedModel, ace: ACE | None, skip: float, batch: int) -> Results:
    """The model, its precision and what is skipped. Batches are part of it: they change rounding."""
    settings = {} if ace is None else {**ace.policy.settings, "thresholds": ace.thresholds.tolist()}
    return {**identity_of(model), "skip": skip, "batch": batch, **settings}
