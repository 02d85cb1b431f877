"""One plan with everything any policy needs, calibrated on a little of the demo's text."""

import copy
from dataclasses import replace

import pytest
from policy_cases import NAMES, QUICK

from ace_moe.lab.policies import prepare
from ace_moe.lab.policies.calls import watch
from ace_moe.plan import Plan
from ace_moe.policies import make
from ace_moe.text import Windows


@pytest.fixture(scope="session")
def few_windows(demo_windows: Windows) -> Windows:
    """Two windows of 128 tokens."""
    return replace(demo_windows, ids=demo_windows.ids[:2, :128].contiguous())


@pytest.fixture(scope="session")
def ready_plan(demo_model, demo_plan: Plan, few_windows: Windows) -> Plan:
    plan = demo_plan
    for name in NAMES:
        plan = prepare(plan, make(name, **QUICK.get(name, {})), demo_model, few_windows)
    return prepare(plan, make("rcr", centred=False), demo_model, None)


@pytest.fixture(scope="session")
def fp32(demo_model):
    """A copy in fp32: formulas in another order agree to rounding."""
    return copy.deepcopy(demo_model).float()


@pytest.fixture(scope="session")
def seen(fp32, few_windows: Windows):
    """What reached layer 2 of the fp32 copy in each window."""
    return [watch(fp32, ids)["2"] for ids in few_windows.ids.split(1)]
