"""Budgets of single requests: what is admitted, what is refused, and how the prefix cache keeps them apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ace_moe.engines.vllm import requests
from ace_moe.engines.vllm.requests import Admission, Budget, asked, salted
from ace_moe.engines.vllm.settings import Settings
from ace_moe.errors import AceError, BudgetError, OptionError


def params(**extra: Any) -> Any:
    return SimpleNamespace(extra_args=extra)


def test_what_a_request_may_say() -> None:
    assert asked(SimpleNamespace()) is None and asked(SimpleNamespace(extra_args=None)) is None and asked(None) is None
    assert asked(params(other=3)) is None
    assert asked(params(ace_skip=0.304)) == Budget(0.3, 0.3) and str(Budget(0.3, 0.3)) == "0.30"
    assert asked(params(ace_skip_prefill=0, ace_skip_decode=0.5)) == Budget(0.0, 0.5)


@pytest.mark.parametrize("value", [True, "0.3", None, -0.1, 1, 1.5, float("nan"), float("inf"), [0.3], {"decode": 0.3}])
def test_what_means_nothing_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="fraction"):
        asked(params(ace_skip=value))


@pytest.mark.parametrize(
    "extra", [{"ace_skip_decode": 0.3}, {"ace_skip": 0.3, "ace_skip_decode": 0.3}, {"ace_skips": 0.3}]
)
def test_half_a_budget_is_refused(extra: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="ace_skip_prefill and ace_skip_decode"):
        asked(params(**extra))


def admission(plan: Any, servers: int = 1, alone: bool = False) -> Admission:
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="m"), parallel_config=SimpleNamespace(_api_process_count=servers)
    )
    made = Admission(config, Settings(policy="share"), alone)
    made._opened = plan, SimpleNamespace(settings={}, min_active=1)
    return made


class Everything:
    """A plan with a threshold for all budgets but one."""

    top_k = 8

    def lookup(self, settings: Any, budget: float, *rest: Any) -> Any:
        if budget == 0.77:
            raise BudgetError("no threshold for 77 %")
        return SimpleNamespace(threshold=budget / 8, notice=None)


def test_a_budget_the_plan_cannot_meet_is_refused_and_takes_no_room() -> None:
    door = admission(Everything())
    for bad in (0.77, 0.95):
        with pytest.raises(AceError):
            door.check(params(ace_skip=bad))
    assert not door.known
    for n in range(requests.BUDGETS - 1):
        assert door.check(params(ace_skip=n / 100)) == Budget(n / 100, n / 100)
    with pytest.raises(OptionError, match="room for 15"):
        door.check(params(ace_skip=0.5))
    assert door.check(params(ace_skip=0.141)) == Budget(0.14, 0.14), "one that is served already"
    assert admission(Everything(), servers=4).most == 3
    assert admission(Everything(), servers=4, alone=True).most == 15, "the engine core sees the requests of all"


@given(st.text(max_size=20), st.text(max_size=20), st.sampled_from([0.1, 0.2]), st.sampled_from([0.1, 0.2]))
def test_two_salts_are_equal_only_if_budget_and_user_are(a: str, b: str, x: float, y: float) -> None:
    first, second = salted(f"ace={Budget(x, x)}", a), salted(f"ace={Budget(y, y)}", b)
    assert (first == second) == (a == b and x == y)


class Processor:
    def __init__(self, config: Any):
        self.vllm_config, self.seen = config, 0

    def process_inputs(self, request_id: str, prompt: Any, params: Any) -> Any:
        self.seen += 1
        return SimpleNamespace(cache_salt=prompt, sampling_params=params)


class Core:
    def __init__(self, config: Any):
        self.vllm_config = config

    def preprocess_add_request(self, request: Any) -> Any:
        return request

    def collective_rpc(self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> Any:
        """Workers that refuse more than half, and one call that gets no answer. A request comes in before they answer."""
        self.between = self.preprocess_add_request(SimpleNamespace(cache_salt=None, sampling_params=None)).cache_salt
        if kwargs.get("skip") is None:
            raise TimeoutError
        return [{"error": "no threshold"} if kwargs["skip"] > 0.5 else {}] * 2


def test_hooks_set_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processor, "process_inputs", requests._admitting(Processor.process_inputs))
    monkeypatch.setattr(Core, "preprocess_add_request", requests._in_epochs(Core.preprocess_add_request))
    plain = Processor(SimpleNamespace(additional_config={}))
    assert plain.process_inputs("1", "mine", params(ace_skip="junk")).cache_salt == "mine", "no ACE: as before"
    ours = Processor(SimpleNamespace(additional_config={}))
    ours.ace_admission = admission(Everything())  # type: ignore[attr-defined]
    own = ours.process_inputs("1", "mine", params(ace_skip=0.3))
    assert own.cache_salt == "ace=0.30;4:mine"
    shared = ours.process_inputs("2", None, params())
    core = Core(SimpleNamespace(additional_config={}))
    assert core.preprocess_add_request(SimpleNamespace(cache_salt="ace=x")).cache_salt == "ace=x", "no ACE: as before"
    core.ace_admission = admission(Everything())  # type: ignore[attr-defined]
    assert not core.preprocess_add_request(shared).cache_salt
    core._ace_epoch = 1  # type: ignore[attr-defined]
    assert core.preprocess_add_request(shared).cache_salt == "ace#1;0:"
    assert core.preprocess_add_request(own).cache_salt == "ace=0.30;4:mine"


def test_a_change_begins_an_epoch_whoever_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it: what a request computed before the change is not read by those that come after. None if it is refused."""
    monkeypatch.setattr(Core, "preprocess_add_request", requests._in_epochs(Core.preprocess_add_request))
    monkeypatch.setattr(Core, "collective_rpc", requests._beginning_epochs(Core.collective_rpc))
    core = Core(SimpleNamespace(additional_config={}))
    core.ace_admission = admission(Everything())  # type: ignore[attr-defined]

    def salt() -> Any:
        return core.preprocess_add_request(SimpleNamespace(cache_salt=None, sampling_params=None)).cache_salt

    assert core.collective_rpc("ace_set", kwargs={"skip": 0.7}) and not salt()
    assert core.collective_rpc("ace_report", kwargs={"skip": 0.3}) == [{}, {}] and not salt()
    assert core.collective_rpc("ace_set", None, (), {"skip": 0.3}) == [{}, {}]
    assert not core.between and salt() == "ace#1;0:"
    assert core.collective_rpc("ace_set", kwargs={"skip": 0.4}) and (core.between, salt()) == ("ace#1;0:", "ace#2;0:")
    with pytest.raises(TimeoutError):
        core.collective_rpc("ace_set", kwargs={})
    assert salt() == "ace#3;0:", "it may have been carried out"


def test_a_front_end_that_is_not_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core checks what it lets through, and keeps budgets apart in the prefix cache, whatever users call theirs."""
    monkeypatch.setattr(Core, "preprocess_add_request", requests._in_epochs(Core.preprocess_add_request))
    core = Core(SimpleNamespace(additional_config={}))
    core.ace_admission = admission(Everything())  # type: ignore[attr-defined]

    def salt(given: str | None, **extra: Any) -> Any:
        return core.preprocess_add_request(
            SimpleNamespace(cache_salt=given, sampling_params=params(**extra))
        ).cache_salt

    for bad in ("junk", 0.77):
        with pytest.raises(AceError):
            salt(None, ace_skip=bad)
    assert salt("mine", ace_skip=0.3) == "ace=0.30;4:mine" and salt(None, ace_skip=0.3) == "ace=0.30;0:"
    assert salt("ace=0.30;0:") not in ("ace=0.30;0:", salt("ace=0.40;0:")) and not salt(None) and salt("mine") == "mine"
    assert core.preprocess_add_request(SimpleNamespace(cache_salt=None, sampling_params=None)).cache_salt is None
