"""Protocols against literal implementations; `ace perplexity`, stopped and continued."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ace_moe.checkpoint.loading import load_tokenizer
from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import TextError
from ace_moe.lab.compare import perplexity
from ace_moe.lab.compare.perplexity import PROTOCOLS, beginning, long_rows, measure, pieces
from ace_moe.plan import Plan
from ace_moe.scoring.predictions import score
from ace_moe.text import Windows
from command import run_ace

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


# ---- the command ----------------------------------------------------------------------------------------------------

SMALL = ("--text", TEXT, "--tokens", 300, "--window", 128)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.safetensors"
    options = ("--tokens", 512, "--window", 128, "--budgets", "0.5", "--no-correct", "--no-fidelity")
    assert run_ace("plan", MODEL, "-o", path, "--text", TEXT, *options).code == 0
    return path


def test_both_protocols(plan: Path) -> None:
    """Without a plan and at budget 0 the numbers are the same; the released protocol is another number."""
    plain = run_ace("perplexity", MODEL, *SMALL, "--json").json
    zero = run_ace("perplexity", MODEL, *SMALL, "-p", plan, "--skip", 0, "--json").json
    released = run_ace("perplexity", MODEL, *SMALL, "--protocol", "released", "--json").json
    assert plain["nll"] == zero["nll"] and zero["ace"]["realised"] == 0 and plain["ace"] is None
    assert (plain["windows"], plain["targets"]) == (3, 297)
    assert released["targets"] == 300 and released["perplexity"] != plain["perplexity"]
    assert plain["interval"][0] <= plain["perplexity"] <= plain["interval"][1]


def test_skipping_is_counted_and_printed(plan: Path) -> None:
    ran = run_ace("perplexity", MODEL, *SMALL, "-p", plan, "--skip", 0.5)
    assert ran.code == 0, ran.err
    assert "protocol standard, 3 windows of 128 tokens, 297 counted" in ran.out
    assert "requested 50.0%, realised 4" in ran.out or "requested 50.0%, realised 5" in ran.out


def test_a_stopped_run_goes_on(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after the second window: the file has two, the next run reads one, losses and counts are those of one run."""
    path, whole = tmp_path / "stopped.json", tmp_path / "whole.json"
    options = ("perplexity", MODEL, *SMALL, "-p", plan, "--skip", 0.5, "-o")
    wanted = run_ace(*options, whole, "--json").json
    reading, windows = perplexity.read, []

    def stopped(model: Any, ids: Any) -> list[float]:
        if len(windows) == 2:
            raise KeyboardInterrupt  # as Ctrl-C does
        windows.append(ids)
        return reading(model, ids)

    with monkeypatch.context() as patch:
        patch.setattr(perplexity, "read", stopped)
        assert run_ace(*options, path).code == 130
    assert len(json.loads(path.read_text())["nll"]) == 2
    found = run_ace(*options, path, "--json").json
    assert found["nll"] == wanted["nll"] and found["counts"] == wanted["counts"]
    assert found["ace"] == wanted["ace"] and found["perplexity"] == wanted["perplexity"]
    other = run_ace("perplexity", MODEL, *SMALL, "-o", path)
    assert other.code == 1 and "another measurement" in other.err
    read = Plan.load(plan)
    moved = replace(read, thresholds=tuple(replace(t, threshold=t.threshold / 2) for t in read.thresholds))
    again = run_ace(*options[:-3], "-p", moved.save(tmp_path / "moved.safetensors"), *options[-3:], path)
    assert again.code == 1 and "thresholds is" in again.err, "the same budget by other thresholds"


def test_bad_requests(plan: Path, tmp_path: Path) -> None:
    """All refused before a model is loaded."""
    for options, problem in (
        (("--protocol", "other"), "standard, released"),
        (("--skip", 0.5), "--plan"),
        (("--window", 1), "at least 2"),
        (("-o", tmp_path / "no" / "file.json"), "no folder"),
    ):
        ran = run_ace("perplexity", "no-such-model", "--text", TEXT, *options)
        assert ran.code == 1 and problem in ran.err.replace("\n", " "), ran.err
