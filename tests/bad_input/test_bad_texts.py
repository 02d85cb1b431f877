"""Texts, windows, tokenizers and prompts that give the model nothing to read, or what it cannot read, are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from bad_input_cases import Damage, Refuse, budget_arguments, run_arguments, save_tokenizer
from tokenizers import normalizers

from ace_moe.checkpoint.loading import load_tokenizer
from ace_moe.demo import MODEL as DEMO
from ace_moe.errors import OptionError
from ace_moe.plan import Workload
from ace_moe.text import Windows, cut, read_text

BAD_TEXTS = {
    "empty": ("t.txt", b"", ("empty", "Give a text")),
    "blank": ("t.txt", b" \n\n\t ", ("empty", "Give a text")),
    "shorter than a window": ("t.txt", b"x" * 63, ("63 tokens, a window has 64", "smaller --window")),
    "not UTF-8": ("t.txt", b"caf\xe9 " * 40, ("not UTF-8", "Give a .txt or .jsonl")),
    "jsonl without text": ("t.jsonl", b'{"content": "x"}\n' * 9, ("`text` field", "KeyError", ".txt")),
    "jsonl with a number": ("t.jsonl", b'{"text": 5}\n' * 9, ("`text` field", ".txt")),
    "jsonl of lists": ("t.jsonl", b'["text"]\n' * 9, ("`text` field", ".txt")),
    "jsonl that is text": ("t.jsonl", b"Once upon a time\n" * 9, ("`text` field", ".txt")),
    "jsonl cut in a row": ("t.jsonl", b'{"text": "all that"}\n{"text": "is', ("`text` field", ".txt")),
    "jsonl without rows": ("t.jsonl", b"\n\n", ("empty", "Give a text")),
    "half a surrogate pair": ("t.jsonl", b'{"text": "\\ud83d' + b"x" * 99 + b'"}', ("not Unicode text", "Remove")),
}


@pytest.mark.parametrize(("name", "data", "says"), BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_text(
    name: str, data: bytes, says: tuple[str, ...], originals: Path, plan: Path, tmp_path: Path, refuse: Refuse
) -> None:
    (tmp_path / name).write_bytes(data)
    refuse(*budget_arguments(originals / "single", plan, tmp_path / name), says=says)


def test_text_that_is_not_there(originals: Path, plan: Path, tmp_path: Path, refuse: Refuse) -> None:
    """Said before the model is loaded: here there is no model either, and the text is what is named."""
    for path in (tmp_path / "missing.txt", tmp_path):
        refuse(*budget_arguments(tmp_path / "no-model", plan, path), says=("There is no text file at", "Give a .txt"))


def test_json_lines_may_hold_any_character(tmp_path: Path) -> None:
    """U+2028 ends a line for Python's splitlines(), not in JSON; and some editors put a mark in front of a file."""
    path = tmp_path / "t.jsonl"
    path.write_text('\ufeff{"text": "one\u2028two\x85three"}\n{"text": "four"}\r\n', encoding="utf-8")
    assert read_text(path) == "one\u2028two\x85three\n\nfour"


@pytest.mark.parametrize(
    "options", [("--window", 0), ("--window", 1), ("--window", -5), ("--tokens", 0), ("--tokens", 63), ("--batch", 0)]
)
def test_sizes_of_a_pass(options: tuple[object, ...], originals: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    says = ("windows of at least 2 tokens", "Change --window, --tokens or --batch")
    refuse(*budget_arguments(originals / "single", plan, text), *options, says=says)


def test_window_of_nothing_by_hand(originals: Path) -> None:
    with pytest.raises(OptionError, match="at least 2 tokens"):
        cut("some text", load_tokenizer(originals / "single"), 0, None, 260, "text")


def test_windows_that_are_not_there() -> None:
    """A batch is one window at least, also without the command."""
    with pytest.raises(OptionError, match="one at a time"):
        Windows(torch.ones(2, 4, dtype=torch.long), Workload("x", "", 8)).batches(0)


def test_tokenizer_of_another_model(single: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    """The demo's tokenizer has 8192 tokens, the model 260 rows; an index error deep in the embedding says nothing."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, single)
    says = ("the model knows 260", "tokenizer of another model", "own tokenizer files")
    refuse(*budget_arguments(single, plan, text), says=says)
    refuse(*run_arguments(single, plan), says=says)


TOKENIZER_DAMAGE = {
    "no files": lambda f: [p.unlink() for p in f.glob("tokenizer*")],
    "no tokenizer.json": lambda f: (f / "tokenizer.json").unlink(),
    "tokenizer.json is no JSON": lambda f: (f / "tokenizer.json").write_text("{"),
    "tokenizer.json is another": lambda f: (f / "tokenizer.json").write_text("{}"),
    "tokenizer.json is cut": lambda f: (f / "tokenizer.json").write_bytes((f / "tokenizer.json").read_bytes()[:900]),
    "tokenizer_config.json is a list": lambda f: (f / "tokenizer_config.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", TOKENIZER_DAMAGE.values(), ids=TOKENIZER_DAMAGE)
def test_missing_or_damaged_tokenizer(damage: Damage, single: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    """Without files transformers makes an empty tokenizer, and every text has 0 tokens; that is no text error."""
    damage(single)
    says = ("no usable tokenizer", "Put its tokenizer files into the folder")
    refuse(*budget_arguments(single, plan, text), says=says)
    refuse(*run_arguments(single, plan), says=says)


def test_empty_prompt(originals: Path, plan: Path, tmp_path: Path, refuse: Refuse) -> None:
    """Said at once, also where the model is not even there."""
    for model in (originals / "single", tmp_path / "no-model"):
        refuse(*run_arguments(model, plan), "--prompt", "", says=("prompt is empty", "--prompt"))


def test_prompt_that_is_no_text(originals: Path, plan: Path, refuse: Refuse) -> None:
    """A byte that is not UTF-8 on the command line arrives as half a surrogate pair."""
    refuse(*run_arguments(originals / "single", plan), "--prompt", "caf\udce9", says=("not Unicode text", "Remove"))


def test_prompt_of_no_tokens(single: Path, plan: Path, refuse: Refuse) -> None:
    """A tokenizer may strip all there is."""
    save_tokenizer(single, normalizers.Strip())
    says = ("makes no token of the prompt '  '", "Give the model some text")
    refuse(*run_arguments(single, plan), "--prompt", "  ", says=says)
