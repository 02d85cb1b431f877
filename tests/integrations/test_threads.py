"""Several threads and one attached model: passes take turns, also where one is interrupted, and one thread attaches."""

from __future__ import annotations

import copy
import threading
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
from ace_moe.engines.transformers import attachment, turns
from ace_moe.errors import IntegrationError
from ace_moe.plan import Plan


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(MODEL, device="cpu").float()


def test_two_threads_with_different_budgets(model: PreTrainedModel, demo_plan: Plan) -> None:
    """One prefills, one decodes, many passes: every logit is right and every slot counted under its own phase."""
    ids, passes = zoo.inputs(batch=1, tokens=12)["input_ids"], 100
    wrong: list[str] = []

    def expected(run: Any) -> torch.Tensor:
        return run().clone()

    with ACE(demo_plan)(model) as ace, torch.no_grad():
        ace.set_threshold([0.08, 0.15])

        def prefill() -> torch.Tensor:
            return model(input_ids=ids, use_cache=False).logits

        caches = [model(input_ids=ids, use_cache=True).past_key_values for _ in range(2)]

        def decode() -> torch.Tensor:
            cache = copy.deepcopy(caches[0])
            return model(input_ids=ids[:, :1], past_key_values=cache).logits

        right = [expected(prefill), expected(decode)]
        ace.reset()

        def work(run: Any, want: torch.Tensor) -> None:
            for _ in range(passes):
                with torch.no_grad():
                    if not torch.equal(run(), want):
                        wrong.append(run.__name__)

        threads = [threading.Thread(target=work, args=pair) for pair in zip((prefill, decode), right, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report = ace.report()
    assert wrong == []
    assert report["prefill"]["routed"] == passes * 12 * 8 * 6
    assert report["decode"]["routed"] == passes * 1 * 8 * 6


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


def test_a_failing_pass_lets_go(model: PreTrainedModel, demo_plan: Plan) -> None:
    """Also one that is interrupted: another thread's pass must not wait for ever."""
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with ACE(demo_plan)(model):

            def fail(*_: Any, error: type[BaseException] = error) -> None:
                raise error

            handle = model.model.layers[3].register_forward_pre_hook(fail)
            with pytest.raises(error):
                zoo.run(model)
            handle.remove()
            zoo.run(model)
            done = threading.Thread(target=zoo.run, args=(model,), daemon=True)
            done.start()
            done.join(timeout=600)
            assert not done.is_alive()


def test_an_interrupted_pass_is_over(model: PreTrainedModel, demo_plan: Plan) -> None:
    """Ctrl-C on a cell, and then a thread that streams: torch calls no hook behind an interrupt, so the thread looks itself."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with ACE(demo_plan)(model):
        handle = model.model.layers[3].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            zoo.run(model)
        handle.remove()
        done = threading.Thread(target=zoo.run, args=(model,), daemon=True)
        done.start()
        done.join(timeout=60)
        assert not done.is_alive()
        zoo.run(model)


def test_a_pass_that_takes_long_is_waited_for(
    model: PreTrainedModel, demo_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking whether it still runs takes nothing from a thread that is in the middle of it."""
    monkeypatch.setattr(turns, "PATIENCE", 0.01)
    inside, go, order = threading.Event(), threading.Event(), list[str]()

    def wait(*_: Any) -> None:
        inside.set()
        go.wait(60)

    def second() -> None:
        zoo.run(model)
        order.append("second")

    with ACE(demo_plan)(model):
        handle = model.model.layers[3].register_forward_pre_hook(wait)
        first = threading.Thread(target=lambda: (zoo.run(model), order.append("first")), daemon=True)
        first.start()
        inside.wait(60)
        handle.remove()
        other = threading.Thread(target=second, daemon=True)
        other.start()
        other.join(timeout=0.3)
        assert order == []
        go.set()
        first.join(60), other.join(60)
    assert sorted(order) == ["first", "second"]
