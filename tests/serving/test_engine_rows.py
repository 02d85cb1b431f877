"""A token is what it is, however the engine cuts its steps: chunks, drafts, preemption. fp32, greedy, {prefill: 0, decode: 60 %}.

Under such budgets a token counted as the wrong kind would also be computed otherwise, and the text would change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_cases import run_engine

from ace_moe.checkpoint.loading import load_tokenizer
from ace_moe.demo import MODEL, TEXT

LENGTHS = (21, 34, 47)  # of the prompts, all different: a request is known by its own
NEW = 40
SLOTS = 8 * 6  # of a token: top-k times layers
SKIP = {"prefill": 0.0, "decode": 0.6}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
Token = tuple[int, int, str]  # length of its request's prompt, position, kind


def starts() -> list[list[int]]:
    """Prompts that repeat themselves, so that drafts are found and some are accepted."""
    ids = load_tokenizer(MODEL)(TEXT.read_text(encoding="utf-8")[:2000])["input_ids"]
    return [(ids[100 * n : 100 * n + 9] * 9)[:length] for n, length in enumerate(LENGTHS)]


Start = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def start(mapped: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """One generation of all prompts by an engine with these options."""

    def run(skip: Any = SKIP, **llm: Any) -> dict[str, Any]:
        task = {"prompts": starts(), "max_tokens": NEW, "logprobs": None}
        options = {"enforce_eager": True, "max_num_seqs": 4, **llm}
        ace = {"plan": str(mapped), "skip": skip}
        return run_engine(tmp_path_factory.mktemp("rows"), MODEL, ace, [{}], task, **options)["steps"][0]

    return run


@pytest.fixture(scope="module")
def plain(start: Start) -> dict[str, Any]:
    found = start()
    assert routed(found) == {"prefill": sum(LENGTHS) * SLOTS, "decode": len(LENGTHS) * (NEW - 1) * SLOTS}
    assert found["report"]["prefill"]["realised"] == 0 and 0.4 < found["report"]["decode"]["realised"] < 0.75
    return found


def routed(step: dict[str, Any]) -> dict[str, int]:
    return {p: step["report"][p]["routed"] for p in ("prefill", "decode", "verify") if p in step["report"]}


def computed(step: dict[str, Any]) -> Iterator[Token]:
    """Every token the engine computed, by a plain account of what its runner said of each step."""
    for lengths, before, prompts, drafts, *_ in step["trace"]:
        for length, first, prompt, draft in zip(lengths, before, prompts, drafts or [0] * len(lengths), strict=True):
            for j in range(length):
                drafted = "verify" if j >= length - draft else "decode"
                yield prompt, first + j, "prefill" if first + j < prompt else drafted


def slots(tokens: list[Token]) -> dict[str, int]:
    kinds = [kind for *_, kind in tokens]
    return {kind: kinds.count(kind) * SLOTS for kind in ("prefill", "decode", "verify") if kind in kinds}


@pytest.mark.vllm
def test_a_last_chunk_of_one_token_is_prompt(start: Start, plain: dict[str, Any]) -> None:
    """Twenty tokens a step: the first prompt's last token comes alone."""
    chunked = start(max_num_batched_tokens=20, max_model_len=128)
    alone = [s for s in chunked["trace"] if s[0][0] == 1 and s[1][0] == 20 and s[2][0] == 21]
    assert alone and len(alone[0][0]) > 1  # beside a chunk of the second prompt
    assert chunked["tokens"] == plain["tokens"] and routed(chunked) == routed(plain)
    assert chunked["report"]["prefill"]["realised"] == 0
    assert chunked["report"]["decode"]["kept"] == plain["report"]["decode"]["kept"]


@pytest.mark.vllm
def test_drafts_are_counted_apart_and_change_nothing(start: Start, plain: dict[str, Any]) -> None:
    """Prompt lookup: decode has the first token of each step, verify the drafts behind it, also those that are rejected."""
    drafted = start(speculative_config=LOOKUP)
    assert drafted["tokens"] == plain["tokens"]
    assert routed(drafted) == slots(list(computed(drafted))) and drafted["report"]["verify"]["routed"] > 0
    assert routed(drafted)["prefill"] == routed(plain)["prefill"] and drafted["report"]["prefill"]["realised"] == 0
    assert routed(drafted)["decode"] < routed(plain)["decode"]  # some drafts were accepted
    assert drafted["report"]["verify"]["realised"] > 0.4
    assert drafted["report"]["threshold"]["verify"] == drafted["report"]["threshold"]["decode"] > 0


@pytest.mark.vllm
def test_drafts_have_a_budget_of_their_own(start: Start) -> None:
    """Decode whole and drafts at 20 %: what is drafted is skipped by its own threshold, and nothing else is skipped."""
    found = start({"prefill": 0.0, "decode": 0.0, "verify": 0.2}, speculative_config=LOOKUP)["report"]
    assert found["threshold"]["decode"] == 0 < found["threshold"]["verify"]
    assert found["prefill"]["realised"] == found["decode"]["realised"] == 0
    assert 0.1 < found["verify"]["realised"] < 0.3


@pytest.mark.vllm
def test_a_preempted_request_is_computed_again_as_what_it_was(start: Start, plain: dict[str, Any]) -> None:
    """A cache too small for all three: what was generated comes back in one wide query behind its prompt."""
    squeezed = start(block_size=32, num_gpu_blocks_override=7, max_model_len=128)
    tokens = list(computed(squeezed))
    again = [t for t in set(tokens) if tokens.count(t) > 1]
    assert {kind for *_, kind in again} == {"prefill", "decode"}
    assert squeezed["tokens"] == plain["tokens"]
    assert routed(squeezed) == slots(tokens) and slots(sorted(set(tokens))) == routed(plain)
    assert squeezed["report"]["prefill"]["realised"] == 0
    assert squeezed["report"]["decode"]["realised"] == pytest.approx(plain["report"]["decode"]["realised"], abs=0.03)


@pytest.mark.vllm
def test_a_draft_model_is_left_as_it_is(start: Start, plain: dict[str, Any]) -> None:
    """The demo drafts for itself, unskipped: its layers have the same numbers and are not counted."""
    drafted = start(speculative_config={"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 2})
    assert drafted["tokens"] == plain["tokens"]
    assert routed(drafted) == slots(list(computed(drafted))) and drafted["report"]["verify"]["routed"] > 0
    assert drafted["report"]["executors"] == {"compact": 6}
