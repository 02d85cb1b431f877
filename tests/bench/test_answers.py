"""Tasks by likelihood: what is read, what counts as an answer, and the page of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import answers
import answers_page

from ace_moe.checkpoint.loading import load_model, load_tokenizer
from ace_moe.demo import MODEL
from ace_moe.lab.tasks.tasks import TASKS


def test_likelihoods_do_not_depend_on_the_batch() -> None:
    """Against one way at a time, without padding; choices are told apart by the likeliest, last words by what is predicted."""
    model, tokenizer = load_model(MODEL, "cpu", "float32"), load_tokenizer(MODEL)
    rows = [{"goal": "To boil water", "sol1": "put it on a fire.", "sol2": "use a kettle on the stove and wait.", "label": 1},
            {"goal": "Ice", "sol1": "is cold", "sol2": "runs", "label": 0}]  # fmt: skip
    every = answers.asked(TASKS["piqa"], rows, tokenizer)
    likely, said = answers.read(model, every, tokens=4096)
    for one, value, tokens in zip(every, likely, said, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([one.ids])).logits[0].log_softmax(-1)
        first = len(one.ids) - one.count
        each = [float(scores[i - 1, one.ids[i]]) for i in range(first, len(one.ids))]
        assert value == pytest.approx(sum(each), abs=1e-3) and len(tokens) == one.count
        assert tokenizer.decode(one.ids[first:]).strip() in (*rows[one.question].values(),)
    given = answers.answers(TASKS["piqa"], every, (likely, said))
    assert given == [int(likely[1] > likely[0]), int(likely[3] > likely[2])]
    assert answers.right(TASKS["piqa"], rows, every, given) == [float(given[0] == 1), float(given[1] == 0)]


@pytest.mark.skipif(not answers_page.RESULT.exists(), reason="the tasks' result is not stored")
def test_the_page_is_the_stored_result() -> None:
    text = answers_page.PAGE.read_text(encoding="utf-8")
    assert text == answers_page.page(), "python benchmarks/answers_page.py"
