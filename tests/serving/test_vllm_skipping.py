"""Skipping as an engine holds it: found by its configuration, kept out of the compile hash, each layer checked as it comes."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_parts import FOUND, vllm_config
from test_vllm_hooks import request

from ace_moe.budget import Budget
from ace_moe.decider import row_of
from ace_moe.engines.vllm import skipping
from ace_moe.errors import IntegrationError, PlanError
from ace_moe.plan import Plan
from ace_moe.plan.entries import Workload


def test_budgets_are_not_in_the_compile_hash(configured: Callable[..., Any]) -> None:
    first, second = configured(), configured(gain="none")
    skipping.find(second).change(threshold=0.2)
    assert json.dumps(first.additional_config, sort_keys=True) == json.dumps(second.additional_config, sort_keys=True)
    assert type(pickle.loads(pickle.dumps(first.additional_config))) is dict
    assert copy.deepcopy(first.additional_config).skipping is skipping.find(first) is skipping.configure(first)


def test_vllms_default_type_and_device_are_not_inherited(configured: Callable[..., Any], mapped: Path) -> None:
    """vLLM builds layers under the model's type and on its device; the plan is read and checked all the same."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            own, tables = (
                skipping.find(configured(**given)) for given in ({"plan": mapped, "skip": 0.5}, {"policy": "ace"})
            )
            made, scored = (o.add(0, "model.layers.0.mlp.experts", FOUND) for o in (own, tables))
    finally:
        torch.set_default_dtype(torch.float32)
    (wanted,) = [t.threshold for t in Plan.load(mapped).thresholds if t.budget == 0.5]
    assert made.tau[1:4].tolist() == [float(torch.tensor(wanted, dtype=torch.float32))] * 3  # not rounded to bf16
    for tensor in (made.tau, made.factor, scored.table_gsp, scored.table_rcr):
        assert tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    assert made.counts.device.type == own.classes.buffer.device.type == "cpu"


def test_no_configuration_no_skipping() -> None:
    for additional in ({}, {"other": 1}, None):
        config = SimpleNamespace(additional_config=additional)
        assert skipping.configure(config) is None and config.additional_config is additional
    assert skipping.configure(None) is None


def test_a_draft_models_configuration_is_left_alone(configured: Callable[..., Any]) -> None:
    """vLLM makes it from the engine's by `replace`, and pydantic copies our dictionary into a plain one."""
    config = configured()
    draft = SimpleNamespace(**vars(config) | {"additional_config": dict(config.additional_config)})
    assert skipping.configure(draft) is None and skipping.find(draft) is None
    assert draft.additional_config == {"ace": skipping.CONFIGURED, "other": 1}


def test_tau_is_changed_where_layers_read_it(configured: Callable[..., Any]) -> None:
    own = skipping.find(configured())
    made = own.add(0, "model.layers.0.mlp.experts", FOUND)
    where = made.tau.data_ptr()
    own.change(threshold=[0.1, 0.2])
    assert made.tau[:4].tolist() == pytest.approx([0, 0.1, 0.2, 0.2]) and made.tau.data_ptr() == where
    assert own.skip is None and made.tau[4:].sum() == 0


def test_a_request_that_was_admitted_is_served_under_any_text(
    configured: Callable[..., Any], mapped: Path, tmp_path: Path
) -> None:
    """Front ends know the server's first text alone. An error here, in the middle of a step, would end the engine."""
    plan = Plan.load(mapped)
    few = [replace(t, workload=Workload("few.txt", "f" * 64, 99)) for t in plan.thresholds if t.budget == 0.2]
    own = skipping.find(configured(plan=plan.with_thresholds(few).save(tmp_path / "two.safetensors"), policy="share"))
    own.change(skip=Budget.parse(0.2), workload="few.txt")
    own.admit(SimpleNamespace(scheduled_new_reqs=[request("1", 0.6)]), ())
    (wanted,) = [t.threshold for t in plan.thresholds if t.budget == 0.6]
    assert own.part().tau[row_of("decode", 1)] == pytest.approx(wanted)


def test_a_step_goes_on_whatever_a_request_asks(
    configured: Callable[..., Any], mapped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Admission refuses such requests; if one comes all the same it runs under the server's own budget, and the log says so."""
    own = skipping.find(configured(plan=mapped, skip=0.2))
    odd = SimpleNamespace(req_id="odd", sampling_params=SimpleNamespace(extra_args={"ace_skip": {"prefill": "junk"}}))
    many = [request(f"many {n}", n / 100) for n in range(20, 36)]
    with caplog.at_level(logging.ERROR, "vllm.ace_moe"):
        own.admit(SimpleNamespace(scheduled_new_reqs=[odd, request("high", 0.95), request("good", 0.5)]), ())
        own.admit(SimpleNamespace(scheduled_new_reqs=many), ["good"])
    assert own.owned == {"good": 1} | {f"many {n}": n - 18 for n in range(20, 34)}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4 and all("under the server's own budget" in line for line in said)
    assert "request odd" in said[0] and "cannot be met" in said[1] and "no room" in said[2]


@pytest.mark.parametrize(
    ("part", "name", "value", "flag"),
    [
        ("vllm_config", "lora_config", object(), "--enable-lora"),
        ("vllm_config", "speculative_config", SimpleNamespace(enable_adaptive_verification=True), "adaptive"),
        ("parallel_config", "enable_dbo", True, "--enable-dbo"),
        ("parallel_config", "ubatch_size", 2, "--ubatch-size"),
        ("model_config", "enable_sleep_mode", True, "--enable-sleep-mode"),
        ("vllm_config", "cache_config", SimpleNamespace(kv_sharing_fast_prefill=True), "--kv-sharing-fast-prefill"),
        ("parallel_config", "prefill_context_parallel_size", 2, "--prefill-context-parallel-size"),
        ("model_config", "enable_return_routed_experts", True, "--enable-return-routed-experts"),
    ],
)
def test_what_would_be_wrong_or_silent_is_refused(part: str, name: str, value: Any, flag: str, tmp_path: Path) -> None:
    config = vllm_config(tmp_path / "never read", trace="of this as well")
    setattr(config if part == "vllm_config" else getattr(config, part), name, value)
    with pytest.raises(IntegrationError, match=flag):
        skipping.configure(config)


def test_layers_are_checked_as_they_come(configured: Callable[..., Any]) -> None:
    own = skipping.find(configured())
    assert own.add(0, "model.layers.0.mlp.experts", FOUND) is own.deciders["0"]
    assert own.add(0, "draft_model.model.layers.0.mlp.experts", FOUND) is None
    assert own.add(6, "model.layers.6.mlp.experts", FOUND) is None  # an MTP head
    with pytest.raises(PlanError, match="layer 1 has experts 32 in the plan, 64 in the model"):
        own.add(1, "model.layers.1.mlp.experts", {**FOUND, "experts": 64})
    with pytest.raises(IntegrationError, match=r"vLLM runs layer 1 \(and 4 more\) outside"):
        own.ready()
