"""What a token is in a vLLM step: prompt, generated, draft or padding, by its position; and the buffer that says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from serving_parts import layer, routing, step

from ace_moe.decider import PADDING, row_of
from ace_moe.engines.vllm.steps import RankClasses, TokenClasses, classes_of, pieces_of
from ace_moe.errors import IntegrationError

P, D, V = (row_of(phase) for phase in ("prefill", "decode", "verify"))
KINDS = {
    "one token each": (([1, 1], [9, 12], [4, 12]), [D, D]),
    "a mixed batch": (([1, 3, 1], [7, 0, 30], [5, 3, 20]), [D, P, P, P, D]),
    "a chunk in the middle of a prompt": (([4], [8], [20]), [P] * 4),
    "a last chunk of one token": (([1, 1], [20, 21], [21, 21]), [P, D]),
    "a prompt of one token": (([1], [0], [1]), [P]),
    "a prompt whose other tokens were all cached": (([1], [31], [32]), [P]),
    "a preempted request computed again": (([9], [0], [5]), [P] * 5 + [D] * 4),
    "computed again from a cached prefix on": (([5], [3], [5]), [P, P, D, D, D]),
    "drafts": (([4, 1, 3], [9, 9, 9], [5, 5, 5], [3, 0, 2]), [D, V, V, V, D, D, V, V]),
    "fewer drafts than wide": (([4], [9], [5], [2]), [D, D, V, V]),
    "drafts beside a prompt": (([3, 4], [9, 0], [5, 4], [2, 0]), [D, V, V, P, P, P, P]),
    "drafts behind the last token of a prompt": (([3], [4], [5], [2]), [P, V, V]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_what_it_is_by_its_position(kind: str) -> None:
    given, expected = KINDS[kind]
    found = classes_of(pieces_of(step(*given)))
    assert found.dtype == np.int8 and found.tolist() == expected


def test_a_step_is_not_taken_for_one_with_budgets() -> None:
    """Three requests with budgets 1, 0, 0 are as many numbers as four without, of which the last has a prompt of one token."""
    classes, three = TokenClasses(64, "cpu"), step([1, 1, 1], 9, 5)
    classes.mark(step([1] * 4, [9, 9, 9, 0], [5, 5, 5, 1]))
    assert classes.rows(5, torch.device("cpu")).tolist() == [D, D, D, P, PADDING]
    classes.mark(three._replace(budgets=np.array([1, 0, 0])))
    assert classes.rows(5, torch.device("cpu")).tolist() == [row_of("decode", 1), D, D, PADDING, PADDING]


def test_classes_agree_with_a_token_by_token_account() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        n = int(random.integers(1, 9))
        lengths, computed, prompts = (random.integers(low, 12, n) for low in (1, 0, 1))
        drafts = np.minimum(random.integers(0, 4, n), lengths)
        expected = [
            P if computed[r] + j < prompts[r] else V if j >= lengths[r] - drafts[r] else D
            for r in range(n)
            for j in range(lengths[r])
        ]
        assert classes_of(pieces_of(step(lengths.tolist(), computed, prompts, drafts))).tolist() == expected


def test_drafts_that_only_the_device_counts() -> None:
    """Adaptive verification: the host knows how many drafts there may be, the device where each request's tokens begin."""
    random, classes = np.random.default_rng(1), TokenClasses(128, "cpu")
    for _ in range(200):
        n = int(random.integers(1, 9))
        most = random.integers(0, 4, n)
        drafts = np.minimum(random.integers(0, 4, n), most)
        rest, computed, prompts = (random.integers(low, 9, n) for low in (1, 0, 1))
        budgets = random.integers(0, 3, n) if random.integers(2) else None
        starts = torch.tensor([0, *np.cumsum(rest + drafts)], dtype=torch.int32)
        told = step((rest + most).tolist(), computed, prompts, most)
        classes.mark(told._replace(starts=starts, tokens=int(starts[-1]), budgets=budgets))
        expected = classes_of(pieces_of(step((rest + drafts).tolist(), computed, prompts, drafts)), budgets)
        assert classes.buffer[: len(expected)].tolist() == expected.tolist()
        assert (classes.buffer[len(expected) :] == PADDING).all()
    classes.mark(step([1], 9, 4))
    assert classes.buffer[:2].tolist() == [D, PADDING]


def at(classes: Any, tokens: int) -> list[int]:
    return classes.rows(tokens, torch.device("cpu")).tolist()


def test_a_steady_decode_writes_nothing() -> None:
    classes = TokenClasses(16, "cpu")
    buffer, before = classes.buffer, classes.buffer._version
    for computed in range(5):
        classes.mark(step([1, 1], [9 + computed, 12 + computed], 4))
    assert buffer._version == before + 1 and at(classes, 4) == [D, D, PADDING, PADDING]
    for computed in range(0, 9, 3):
        classes.mark(step([3, 3], 9 + computed, 4, [2, 2]))
    assert buffer._version == before + 2
    classes.mark(step([1, 1, 1], 20, 4))
    assert buffer._version == before + 3 and at(classes, 4) == [D, D, D, PADDING]


def test_behind_a_step_is_padding() -> None:
    classes = TokenClasses(16, "cpu")
    where = classes.buffer.data_ptr()
    assert at(classes, 16) == [PADDING] * 16
    classes.mark(step([6, 1], [0, 9], [6, 4]))
    assert at(classes, 16) == [P] * 6 + [D] + [PADDING] * 9
    classes.mark(step([1], 9, 4))  # fewer tokens than before: what was there goes
    assert at(classes, 16) == [D] + [PADDING] * 15
    classes.profile()
    assert at(classes, 16) == [P] * 16
    classes.mark(step([1], 9, 4))
    assert at(classes, 1040) == [D] + [PADDING] * 1039
    classes.clear()
    assert at(classes, 16) == [PADDING] * 16
    classes.mark(step([1], 9, 4))  # the same as before it was cleared: it must be written again
    assert at(classes, 2) == [D, PADDING] and classes.buffer.data_ptr() == where  # graphs read this address


def test_a_step_of_prompts_alone_is_known() -> None:
    """Nothing can be restored in it, so no vote is held; captured and measured steps are not such."""
    classes = TokenClasses(64, "cpu")
    assert classes.generating and RankClasses(classes, 0).generating
    classes.mark(step([6, 3], [0, 9], [6, 12]))
    assert not classes.generating and not RankClasses(classes, 1).generating
    for told in (step([6, 1], [0, 9], [6, 4]), step([6], [0], [4]), step([3], [4], [5], [2])):
        classes.mark(step([6], 0, 6))
        classes.mark(told)
        assert classes.generating
    for other in (classes.clear, classes.profile):
        classes.mark(step([6], 0, 6))
        other()
        assert classes.generating


@pytest.mark.parametrize("kernels", [False, True])
def test_a_prompt_is_decided_as_with_a_vote(kernels: bool) -> None:
    if kernels:
        pytest.importorskip("triton")
    found = []
    for generating in (False, True):
        own = layer(step=step([300], 0, 300), kernels=kernels)
        own.votes, own.experts, own.tokens.generating = True, 16, generating  # type: ignore[misc]
        own.free[D:] = 1
        found.append((*own.decide(*routing(300)), own.counts.clone()))
    ids, gates, counts = zip(*found, strict=True)
    assert torch.equal(*ids) and torch.equal(*counts) and (ids[0] < 0).any()
    torch.testing.assert_close(*gates, rtol=3e-6, atol=1e-7)


def test_a_rank_sees_its_share_of_a_step() -> None:
    """Sequence parallel: rank r of 2 has the tokens from r · T on, where the last rank's end is padding."""
    classes = TokenClasses(16, "cpu")
    classes.mark(step([3, 1, 1], [0, 9, 9], [3, 4, 4]))
    first, second = RankClasses(classes, 0), RankClasses(classes, 1)
    assert at(first, 3) == [P, P, P] and at(second, 3) == [D, D, PADDING]
    own = layer(taus=(0.0, 0.0))
    own.tokens = second
    own.decide(*routing(3))
    assert own.counts[:, 0].tolist() == [0, 0, 12, 0]
    classes.counting = False
    assert not first.counting


def test_a_step_larger_than_announced_is_an_error() -> None:
    with pytest.raises(IntegrationError, match="larger than"):
        at(TokenClasses(16, "cpu"), 5000)
