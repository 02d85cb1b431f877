"""Skipping as an engine holds it: found by its configuration, kept out of the compile hash, each layer checked as it comes."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_parts import FOUND

from ace_moe.errors import IntegrationError, PlanError
from ace_moe.integrations.vllm import skipping


def test_budgets_are_not_in_the_compile_hash(configured: Callable[..., Any]) -> None:
    first, second = configured(), configured(gain="none")
    skipping.find(second).set_threshold(0.2)
    assert json.dumps(first.additional_config, sort_keys=True) == json.dumps(second.additional_config, sort_keys=True)
    assert type(pickle.loads(pickle.dumps(first.additional_config))) is dict
    assert copy.deepcopy(first.additional_config).skipping is skipping.find(first) is skipping.configure(first)


def test_vllms_default_type_and_device_are_not_inherited(configured: Callable[..., Any]) -> None:
    """vLLM builds layers under the model's type and on its device; the plan is read and checked all the same."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            own = skipping.find(configured())
            made = own.add(0, "model.layers.0.mlp.experts", FOUND)
    finally:
        torch.set_default_dtype(torch.float32)
    for tensor in (own.thresholds, *made.tables.values()):
        assert tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    assert made.counts.device.type == own.phases.buffer.device.type == "cpu"


def test_no_configuration_no_skipping() -> None:
    for additional in ({}, {"other": 1}, None):
        config = SimpleNamespace(additional_config=additional)
        assert skipping.configure(config) is None and config.additional_config is additional
    assert skipping.configure(None) is None


def test_layers_are_checked_as_they_come(configured: Callable[..., Any]) -> None:
    own = skipping.find(configured())
    assert own.add(0, "model.layers.0.mlp.experts", FOUND) is own.layers["0"]
    assert own.add(0, "draft_model.model.layers.0.mlp.experts", FOUND) is None
    assert own.add(6, "model.layers.6.mlp.experts", FOUND) is None  # an MTP head
    with pytest.raises(PlanError, match="layer 1 has experts 32 in the plan, 64 in the model"):
        own.add(1, "model.layers.1.mlp.experts", {**FOUND, "experts": 64})
    with pytest.raises(IntegrationError, match=r"vLLM runs layer 1 \(and 4 more\) outside"):
        own.ready(SimpleNamespace())
