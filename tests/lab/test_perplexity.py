"""Protocols against literal implementations: which tokens are read, which are counted, and how often."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ace_moe.checkpoint.loading import load_tokenizer
from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import TextError
from ace_moe.lab.compare.perplexity import PROTOCOLS, beginning, long_rows, measure, pieces
from ace_moe.scoring.predictions import Score, score
from ace_moe.text import Windows

STANDARD, RELEASED = PROTOCOLS["standard"], PROTOCOLS["released"]


class Letters:
    """A tokenizer of letters: a is 1, b is 2 …; it puts special tokens where it is told to."""

    def __init__(self, front: tuple[int, ...] = (), back: tuple[int, ...] = ()):
        self.front, self.back = front, back

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        plain = [ord(letter) - 96 for letter in text]
        return {"input_ids": [*self.front, *plain, *self.back] if add_special_tokens else plain}


def cut(name: str, text: str, front: tuple[int, ...] = (), window: int = 4, **options: Any) -> list[list[int]]:
    return [p.tolist() for p in pieces(PROTOCOLS[name], text, Letters(front), 50, window, **options)]


@pytest.mark.parametrize(("front", "back"), [((), ()), ((40,), ()), ((40,), (41,)), ((), (41,)), ((40, 42), ())])
def test_what_a_tokenizer_puts_in_front(front: tuple[int, ...], back: tuple[int, ...]) -> None:
    """BOS as the model expects it is found by trying, not by name; what is put behind a text does not count."""
    assert beginning(Letters(front, back)) == list(front)


def test_standard_without_bos_reads_every_token_once() -> None:
    """Windows do not overlap and the last one is shorter."""
    assert cut("standard", "abcdefghij") == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]


def test_standard_with_bos_predicts_every_token_once() -> None:
    """BOS stands in front of every window, inside its length."""
    found = cut("standard", "abcdefgh", front=(40,))
    assert found == [[40, 1, 2, 3], [40, 4, 5, 6], [40, 7, 8]]
    assert [token for window in found for token in window[1:]] == list(range(1, 9))


def test_a_lone_last_token_is_left_out() -> None:
    """It would predict nothing without BOS; behind BOS it is a target."""
    assert cut("standard", "abcde") == [[1, 2, 3, 4]]
    assert cut("standard", "abcd", front=(40,)) == [[40, 1, 2, 3], [40, 4]]


def test_tokens_bound_the_text() -> None:
    assert cut("standard", "abcdefghij", tokens=6) == [[1, 2, 3, 4], [5, 6]]


def test_released_keeps_long_rows_and_one_bos() -> None:
    """Rows of 512 characters and more, with their line ends; nothing is put between them."""
    rows = ["x" * 511 + "\n", "short\n", "\n", "y" * 510 + "\n", "z" * 600]
    assert long_rows("".join(rows)) == rows[0] + rows[4]
    found = cut("released", "a" * 513, front=(40,), window=512)
    assert [len(w) for w in found] == [512, 2]
    assert found[0][0] == 40 and found[1][0] == 1


def test_released_weighs_windows_by_length() -> None:
    """Mean loss × length, as the released code has it; the standard protocol weighs by predicted tokens."""
    nll, lengths = [30.0, 4.0], [11, 3]
    assert STANDARD.score(nll, lengths).perplexity == pytest.approx(math.exp(34 / 12))
    assert RELEASED.score(nll, lengths).perplexity == pytest.approx(math.exp((3 * 11 + 2 * 3) / 14))


def test_nothing_left_is_refused() -> None:
    with pytest.raises(TextError, match="leaves nothing"):
        cut("released", "short rows only\n")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_measure_equals_the_models_own_loss(demo_model: PreTrainedModel, name: str) -> None:
    """Window by window against transformers' loss, whose mean is over the predicted tokens."""
    tokenizer, text = load_tokenizer(MODEL), TEXT.read_text(encoding="utf-8")
    protocol = PROTOCOLS[name]
    windows = pieces(protocol, text, tokenizer, 8192, window=128, tokens=300)
    assert [len(w) for w in windows] == [128, 128, 44]
    found = measure(demo_model, protocol, windows, batch=2)
    total = weight = 0.0
    with torch.no_grad():
        for window in windows:
            loss = float(demo_model(input_ids=window[None], labels=window[None]).loss)
            times = len(window) if name == "released" else len(window) - 1
            total, weight = total + loss * times, weight + times
    assert found.perplexity == pytest.approx(math.exp(total / weight), rel=2e-3)  # bf16: batches differ in rounding
    assert found.targets == weight


def test_a_stopped_measurement_goes_on(demo_model: PreTrainedModel) -> None:
    """Windows that are known are not read again, and the result is the same to the bit."""
    windows = pieces(STANDARD, TEXT.read_text(encoding="utf-8"), load_tokenizer(MODEL), 8192, window=64, tokens=200)
    saved: list[list[float]] = []
    whole = measure(demo_model, STANDARD, windows, save=lambda nll: saved.append(list(nll)))
    assert [len(nll) for nll in saved] == [1, 2, 3, 4]
    more: list[list[float]] = []
    again = measure(demo_model, STANDARD, windows, known=saved[1], save=lambda nll: more.append(list(nll)))
    assert again == whole
    assert len(more) == 2


def test_whole_windows_agree_with_score(demo_model: PreTrainedModel, demo_windows: Windows) -> None:
    """`score` and the standard protocol are the same measurement where no window is partial."""
    plain = score(demo_model, demo_windows)
    found = measure(demo_model, STANDARD, list(demo_windows.ids))
    assert found.nll == plain.nll
    assert found.perplexity == plain.perplexity
    assert plain.by_window == found.by_window == [255] * 4


def test_score_keeps_its_old_face() -> None:
    assert Score([2.0, 4.0], 6).perplexity == pytest.approx(math.e)
