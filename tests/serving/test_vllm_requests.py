"""Budgets of single requests: what is admitted, what is refused, and how the prefix cache keeps them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ace_moe.budget import Budget
from ace_moe.engines.vllm import preflight, requests, skipping
from ace_moe.engines.vllm.requests import Admission, asked, carried, carry, salted
from ace_moe.engines.vllm.settings import Settings, read_agreed
from ace_moe.errors import AceError, BudgetError, OptionError, PlanError
from ace_moe.plan import Plan

CONFIG = SimpleNamespace(
    additional_config={"ace": {}}, model_config=SimpleNamespace(model="m"), parallel_config=SimpleNamespace()
)
OTHER = SimpleNamespace(additional_config={})


def params(**extra: Any) -> Any:
    return SimpleNamespace(extra_args=extra)


def test_what_a_request_may_say() -> None:
    assert asked(SimpleNamespace()) is None and asked(SimpleNamespace(extra_args=None)) is None and asked(None) is None
    assert asked(params(other=3)) is None
    assert asked(params(ace_skip=0.304)) == Budget.parse(0.3) and str(asked(params(ace_skip=0.304))) == "0.30"
    assert asked(params(ace_skip_prefill=0, ace_skip_decode=0.5)) == Budget(0.0, 0.5, 0.5)


def test_a_budget_is_carried_in_full() -> None:
    """Workers take it as it stands; admission says the same of it again, and other arguments stay."""
    wish = params(ace_skip_prefill=0, ace_skip_decode=0.504, other=3)
    assert carried(params(other=3)) is None and carried(SimpleNamespace(extra_args=None)) is None
    for _ in range(2):
        carry(wish, asked(wish) or pytest.fail("none"))
        assert wish.extra_args == {"ace_skip": {"prefill": 0.0, "decode": 0.5, "verify": 0.5}, "other": 3}
    assert carried(wish) == Budget(0.0, 0.5, 0.5)


@pytest.mark.parametrize(
    "value", [False, True, "half", None, -0.1, 1, 1.5, float("nan"), float("inf"), [0.3], {"decode": 0.3}]
)
def test_what_means_nothing_is_refused(value: Any) -> None:
    with pytest.raises(BudgetError, match="A budget"):
        asked(params(ace_skip=value))


@pytest.mark.parametrize(
    "extra", [{"ace_skip_decode": 0.3}, {"ace_skip": 0.3, "ace_skip_decode": 0.3}, {"ace_skips": 0.3}]
)
def test_half_a_budget_is_refused(extra: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="ace_skip_prefill and ace_skip_decode"):
        asked(params(**extra))


class Everything(Settings):
    """Settings under which there is a threshold for all budgets but one."""

    def read(self, model: Any) -> Any:
        return SimpleNamespace(top_k=8)

    def chosen(self, plan: Any = None, served: bool = True) -> Any:
        return SimpleNamespace(min_active=1)

    def lookup(self, plan: Any, policy: Any, budget: Budget, workload: Any = None) -> Any:
        budget.check(plan.top_k, policy.min_active)
        if budget.decode == 0.77:
            raise BudgetError("no threshold for 77 %")


def admission(servers: int = 1, alone: bool = False) -> Admission:
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="m"), parallel_config=SimpleNamespace(_api_process_count=servers)
    )
    return Admission(config, Everything(), alone)


def test_a_budget_the_plan_cannot_meet_is_refused_and_takes_no_room() -> None:
    door = admission()
    for bad in (0.77, 0.95):
        with pytest.raises(AceError):
            door.check(params(ace_skip=bad))
    for n in range(requests.BUDGETS - 1):
        assert door.check(params(ace_skip=n / 100)) == Budget.parse(n / 100)
    with pytest.raises(OptionError, match="room for 15"):
        door.check(params(ace_skip=0.5))
    assert door.check(params(ace_skip=0.141)) == Budget.parse(0.14), "one that is served already"
    assert admission(servers=4).most == 3
    assert admission(servers=4, alone=True).most == 15, "the engine core sees the requests of all"


# ---- the plan is read once in a process, at start --------------------------------------------------------------------


@pytest.fixture
def file(mapped: Path, tmp_path: Path) -> Path:
    """A plan without thresholds, which another command is going to map."""
    plan = Plan.load(mapped)
    return replace(plan, thresholds=(), curves=(), default_workload=None).save(tmp_path / "served.safetensors")


def started(plan: Path) -> dict[str, Any]:
    """The `ace` part of a configuration after the front end's checks."""
    settings = preflight.check({"ace": {"plan": str(plan)}})
    assert settings is not None
    return preflight.agreed({"ace": {}}, settings, "never opened")["ace"]


def test_a_plan_that_is_mapped_while_it_is_served(
    file: Path, mapped: Path, configured: Callable[..., Any], tmp_path: Path
) -> None:
    """The front end takes the plan for what it was at start, as workers do: what they have no τ for is refused."""
    config = configured(**started(file))
    own = skipping.find(config)
    front = Admission(config, own.settings)
    for text in (mapped.read_bytes(), b"another plan"):
        file.write_bytes(text)
        with pytest.raises(BudgetError, match="no threshold"):
            front.check(params(ace_skip=0.5))
        assert front.check(params(ace_skip=0.0)) == Budget.parse(0.0)
        assert front.settings.read("m").thresholds == own.settings.read("m").thresholds == ()
    file.unlink()
    assert front.settings.read("m").thresholds == ()


def test_a_process_that_reads_another_plan_does_not_start(
    file: Path, mapped: Path, configured: Callable[..., Any]
) -> None:
    ace = started(file)
    file.write_bytes(mapped.read_bytes())
    read_agreed.cache_clear()  # as in a process that was just started
    with pytest.raises(PlanError, match="changed in between"):
        configured(**ace)
    assert skipping.find(configured(plan=str(file))).part().skip == 0.0, "started again"


# ---- hooks -------------------------------------------------------------------------------------------------------------


@given(st.text(max_size=20), st.text(max_size=20), st.sampled_from([0.1, 0.2]), st.sampled_from([0.1, 0.2]))
def test_two_salts_are_equal_only_if_budget_and_user_are(a: str, b: str, x: float, y: float) -> None:
    first, second = (salted(f"ace={Budget.parse(skip)}", salt) for skip, salt in ((x, a), (y, b)))
    assert (first == second) == (a == b and x == y)


class Processor:
    def __init__(self, config: Any):
        self.vllm_config = config

    def process_inputs(self, request_id: str, prompt: Any, params: Any) -> Any:
        return SimpleNamespace(cache_salt=prompt, sampling_params=SimpleNamespace(**vars(params)))


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


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks on stand-ins, over a plan that has a threshold for all budgets but one."""
    monkeypatch.setattr(requests, "settings_of", lambda config: Everything() if config.additional_config else None)
    for cls, name, hook in (
        (Processor, "process_inputs", requests.admitting),
        (Core, "preprocess_add_request", requests.in_epochs),
        (Core, "collective_rpc", requests.beginning_epochs),
    ):
        monkeypatch.setattr(cls, name, hook(getattr(cls, name)))


def salt(core: Core, given: str | None, **extra: Any) -> Any:
    """The cache salt of a request that comes from a front end without hooks."""
    return core.preprocess_add_request(SimpleNamespace(cache_salt=given, sampling_params=params(**extra))).cache_salt


def test_without_ace_everything_is_as_before(hooked: None) -> None:
    assert Processor(OTHER).process_inputs("1", "mine", params(ace_skip="junk")).cache_salt == "mine"
    assert salt(Core(OTHER), "ace=x") == "ace=x"


def test_budgets_keep_caches_apart(hooked: None) -> None:
    front, core, wish = Processor(CONFIG), Core(CONFIG), params(ace_skip=0.304)
    own, shared = front.process_inputs("1", "mine", wish), front.process_inputs("2", None, params())
    assert own.cache_salt == "ace=0.30;4:mine" and carried(own.sampling_params) == Budget.parse(0.3)
    assert wish.extra_args == {"ace_skip": 0.304}, "the user's own are left alone"
    assert not core.preprocess_add_request(shared).cache_salt
    assert core.collective_rpc("ace_set", kwargs={"skip": 0.3})
    assert core.preprocess_add_request(shared).cache_salt == "ace#1;0:"
    assert core.preprocess_add_request(own).cache_salt == "ace=0.30;4:mine"
    assert carried(own.sampling_params) == Budget.parse(0.3)


def test_a_change_begins_an_epoch_whoever_asks_for_it(hooked: None) -> None:
    """Behind it: what a request computed before the change is not read by those that come after. None if it is refused."""
    core = Core(CONFIG)
    assert core.collective_rpc("ace_set", kwargs={"skip": 0.7}) and not salt(core, None)
    assert core.collective_rpc("ace_report", kwargs={"skip": 0.3}) == [{}, {}] and not salt(core, None)
    assert core.collective_rpc("ace_set", None, (), {"skip": 0.3}) == [{}, {}]
    assert not core.between and salt(core, None) == "ace#1;0:"
    assert core.collective_rpc("ace_set", kwargs={"skip": 0.4})
    assert (core.between, salt(core, None)) == ("ace#1;0:", "ace#2;0:")
    with pytest.raises(TimeoutError):
        core.collective_rpc("ace_set", kwargs={})
    assert salt(core, None) == "ace#3;0:", "it may have been carried out"


def test_a_front_end_that_is_not_hooked(hooked: None) -> None:
    """The engine core checks what it lets through, and keeps budgets apart in the prefix cache, whatever users call theirs."""
    core = Core(CONFIG)
    for bad in ("junk", 0.77):
        with pytest.raises(AceError):
            salt(core, None, ace_skip=bad)
    assert salt(core, "mine", ace_skip=0.3) == "ace=0.30;4:mine" and salt(core, None, ace_skip=0.3) == "ace=0.30;0:"
    assert salt(core, "ace=0.30;0:") not in ("ace=0.30;0:", salt(core, "ace=0.40;0:"))
    assert not salt(core, None) and salt(core, "mine") == "mine"
    assert core.preprocess_add_request(SimpleNamespace(cache_salt=None, sampling_params=None)).cache_salt is None
