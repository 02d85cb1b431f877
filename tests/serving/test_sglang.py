"""The SGLang hook around a stand-in with the signature of its 0.5.23 function. SGLang itself is not run here."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ace_moe.errors import BudgetError, IntegrationError, OptionError, PlanError
from ace_moe.integrations import sglang
from ace_moe.plan import Plan
from ace_moe.policies import Routing, make

SHIFT = 100  # the stand-in's remapping for load balancing


def stand_in(
    topk_ids: Tensor, topk_weights: Tensor, topk_config: Any, router_logits: Tensor, layer_id: int | None = None
) -> tuple[Tensor, Tensor]:
    """Remaps ids and appends a shared expert, as SGLang does; −1 would be remapped too."""
    assert (topk_ids >= 0).all()
    shared = torch.full_like(topk_ids[:, :1], 999)
    return torch.cat([topk_ids + SHIFT, shared], -1), torch.cat(
        [topk_weights, torch.ones_like(topk_weights[:, :1])], -1
    )


@pytest.fixture
def skipping(demo_plan: Plan) -> sglang.Skipping:
    own = sglang.Skipping(demo_plan, make("ace"), 0.0)
    own.runtime.set(torch.full((3,), 0.12))
    return own


def routed(tokens: int) -> tuple[Tensor, Tensor]:
    gates, ids = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(0)).softmax(-1).topk(8)
    return ids.int(), gates / gates.sum(-1, keepdim=True)


def test_rule_sees_logical_ids_and_marks_physical_ones(skipping: sglang.Skipping, demo_plan: Plan) -> None:
    ids, gates = routed(12)
    new_ids, new_gates = sglang.around(skipping)(stand_in, ids, gates, None, gates, layer_id=3)
    expected = make("ace").route(Routing(ids.long(), gates, demo_plan.tables["3"], torch.tensor(0.12)))
    assert torch.equal(new_ids[:, :8], torch.where(expected.keep, ids + SHIFT, -1)) and (new_ids[:, 8] == 999).all()
    assert torch.equal(new_gates[:, :8], expected.gates) and (new_gates[:, 8] == 1).all()
    found = skipping.report()
    assert (found["decode"]["routed"], found["decode"]["kept"]) == (96, int(expected.keep.sum()))
    assert list(found["layers"]) == ["3"] and found["prefill"]["routed"] == 0 and not expected.keep.all()


def test_threshold_zero_changes_nothing(demo_plan: Plan) -> None:
    ids, gates = routed(5)
    found = sglang.around(sglang.Skipping(demo_plan, make("ace"), 0.0))(stand_in, ids, gates, None, gates, layer_id=0)
    assert all(torch.equal(a, b) for a, b in zip(found, stand_in(ids, gates, None, gates), strict=True))


def test_padding_stays_and_is_not_counted(skipping: sglang.Skipping) -> None:
    ids, gates = routed(4)
    ids[2] = -1
    keep, new_gates = skipping.decide(0, ids, gates)
    assert keep[2].all() and torch.equal(new_gates[2], gates[2]) and skipping.report()["decode"]["routed"] == 24
    others = sglang.Skipping(skipping.runtime.plan, make("ace"), 0.0)
    others.runtime.set(torch.full((3,), 0.12))
    real = [0, 1, 3]
    expected, _ = others.decide(0, ids[real], gates[real])
    assert torch.equal(keep[real], expected)


def test_a_function_that_returns_ids_alone(skipping: sglang.Skipping) -> None:
    ids, gates = routed(6)
    weights = gates.clone()
    found = sglang.around(skipping)(lambda i, w, *rest, **more: i, ids, weights, None, None, 2)
    assert (weights[found < 0] == 0).all() and (found < 0).any()


def test_foreign_layer_is_refused(skipping: sglang.Skipping) -> None:
    ids, gates = routed(2)
    with pytest.raises(IntegrationError, match="no layer 99"):
        skipping.decide(99, ids, gates)
    with pytest.raises(IntegrationError, match="top_k 8 in the plan, 4"):
        skipping.decide(0, ids[:, :4], gates[:, :4])


def test_register_hooks_only_when_asked(demo_plan: Plan, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    plugins = ModuleType("sglang.srt.plugins")
    registry = type("HookRegistry", (), {"register": staticmethod(lambda *given: hooks.append(given))})
    plugins.HookRegistry, plugins.HookType = registry, type("HookType", (), {"AROUND": "around"})  # type: ignore[attr-defined]
    for name, module in (
        ("sglang", ModuleType("sglang")),
        ("sglang.srt", ModuleType("sglang.srt")),
        ("sglang.srt.plugins", plugins),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    sglang.register()
    assert hooks == []
    path = demo_plan.save(tmp_path / "plan.safetensors")
    monkeypatch.setenv(sglang.VARIABLE, json.dumps({"plan": str(path)}))
    sglang.register()
    assert [(target, kind) for target, _, kind in hooks] == [(sglang.TARGET, "around")]
    monkeypatch.setenv(sglang.VARIABLE, json.dumps({"plan": str(path), "skip": {"prefill": 0.5}}))
    with pytest.raises(OptionError, match="one budget"):
        sglang.register()
    for ignored in ({"track": True}, {"restore": True}, {"allow_other_weights": True}):
        monkeypatch.setenv(sglang.VARIABLE, json.dumps({"plan": str(path), **ignored}))
        with pytest.raises(OptionError, match=f"{next(iter(ignored))}: of vLLM alone"):
            sglang.register()
    monkeypatch.setenv(sglang.VARIABLE, json.dumps({"plan": str(path), "workload": "no such text"}))
    with pytest.raises(BudgetError, match="no such text"):
        sglang.register()
    monkeypatch.setenv(sglang.VARIABLE, "plan.safetensors")
    with pytest.raises(OptionError, match="no JSON object"):
        sglang.register()
    monkeypatch.setenv(sglang.VARIABLE, json.dumps({"plan": str(path), "policy": "aimer"}))
    with pytest.raises(PlanError, match="aimer"):  # the hook does not know the checkpoint
        sglang.register()
