"""Several threads and one attached model: one has a pass, also after one that was interrupted, and one attaches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import zoo
from ace_moe import ACE
from ace_moe.checkpoint import MoEModel
from ace_moe.checkpoint.loading import load_model
from ace_moe.demo import MODEL
from ace_moe.engines.transformers import attachment
from ace_moe.errors import IntegrationError
from ace_moe.plan import Plan


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(MODEL, device="cpu").float()


def in_thread(run: Callable[[], object]) -> BaseException | None:
    """What ended it; None where nothing did."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).exception(timeout=60)


def test_a_second_thread_in_a_running_pass_is_refused(model: PreTrainedModel, demo_plan: Plan) -> None:
    """By name; the first one's pass is what it is alone, and its tokens are counted once."""
    refused: list[BaseException | None] = []

    def look(*_: Any) -> None:
        refused.append(in_thread(lambda: zoo.run(model)))

    with ACE(demo_plan)(model) as ace:
        ace.set_threshold(0.11)
        expected, report = zoo.run(model), ace.report()
        ace.reset()
        handle = model.model.layers[3].register_forward_pre_hook(look)
        assert torch.equal(zoo.run(model), expected)
        handle.remove()
        assert ace.report() == report
        assert in_thread(lambda: zoo.run(model)) is None, "the pass is over"
    (error,) = refused
    assert isinstance(error, IntegrationError) and "Another thread is in a pass of this model" in str(error)


def test_threads_one_after_the_other(model: PreTrainedModel, demo_plan: Plan) -> None:
    """Each generates with prompt and budget of its own, pass by pass in turn: phases are counted under their own."""
    ids, new = zoo.inputs(batch=1, tokens=12)["input_ids"], 6
    turn = threading.Lock()
    with ACE(demo_plan)(model) as ace:
        ace.set_threshold([0.08, 0.15])
        stock = model.forward

        def one_at_a_time(*args: Any, **kwargs: Any) -> Any:
            with turn:
                return stock(*args, **kwargs)

        def generate(length: int) -> list[int]:
            made = model.generate(ids[:, :length], do_sample=False, max_new_tokens=new, min_new_tokens=new)
            return made[0].tolist()

        expected = [generate(length) for length in (12, 7)]
        ace.reset()
        model.forward = one_at_a_time
        try:
            with ThreadPoolExecutor(2) as pool:
                assert list(pool.map(generate, (12, 7))) == expected
        finally:
            del model.forward
        report = ace.report()
    assert report["prefill"]["routed"] == (12 + 7) * 8 * 6
    assert report["decode"]["routed"] == 2 * (new - 1) * 8 * 6


def test_two_threads_attach_to_one_model(
    model: PreTrainedModel, demo_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has it, the other is refused; both had passed the check where they meet."""
    meeting, refuse = threading.Barrier(2), attachment.refuse_adapters

    def meet(*given: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.3)
        refuse(*given)

    def attach(ace: ACE) -> str:
        try:
            return "has it" if ace.attach(model) else ""
        except IntegrationError as error:
            return str(error)

    stock = zoo.run(model)
    monkeypatch.setattr(attachment, "refuse_adapters", meet)
    both = [ACE(demo_plan), ACE(demo_plan)]
    with ThreadPoolExecutor(2) as pool:
        refused, had = sorted(pool.map(attach, both))
    assert had == "has it" and "already has a plan" in refused
    for ace in both:
        ace.detach()
    torch.testing.assert_close(zoo.run(model), stock, rtol=0, atol=0)


def test_no_thread_changes_a_model_that_is_looked_at(
    model: PreTrainedModel, demo_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that come or go while their names are listed end the listing with an error of Python's."""
    free, look = [], MoEModel.of

    def looked_at(inner: PreTrainedModel) -> MoEModel:
        with ThreadPoolExecutor(1) as pool:
            free.append(pool.submit(attachment.CHANGING.acquire, blocking=False).result())
        return look(inner)

    monkeypatch.setattr(MoEModel, "of", looked_at)
    with ACE(demo_plan)(model):
        assert free and not any(free)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_pass_that_ends_early_holds_nobody_up(
    model: PreTrainedModel, demo_plan: Plan, error: type[BaseException]
) -> None:
    """Ctrl-C on a cell, and then a thread that streams; a thread that died, and then the next cell."""

    def fail(*_: Any) -> None:
        raise error

    def interrupted() -> None:
        handle = model.model.layers[3].register_forward_pre_hook(fail)
        try:
            with pytest.raises(error):
                zoo.run(model)
        finally:
            handle.remove()

    with ACE(demo_plan)(model):
        interrupted()
        zoo.run(model)
        interrupted()
        assert in_thread(lambda: zoo.run(model)) is None
        assert in_thread(interrupted) is None
        zoo.run(model)
