"""A trace of served requests: every real token once, with its request, phase and budget; nothing where it is not asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving_cases import Case, load_fp32, prompts, run_engine
from serving_parts import FOUND
from test_vllm_hooks import Old, request, scheduled

from ace_moe import ACE
from ace_moe.engines.traces.file import load_trace
from ace_moe.engines.vllm import skipping
from ace_moe.engines.vllm.settings import Settings
from ace_moe.errors import IntegrationError, OptionError
from ace_moe.lab.traffic.tracing import read
from ace_moe.plan import Plan
from ace_moe.text import windows_of


def engine(configured: Callable[..., Any], path: Path, **ace: Any) -> tuple[Old, Any]:
    """A runner of the first generation with the demo's six layers, traced."""
    config = configured(trace=str(path), **ace)
    own = skipping.find(config)
    assert own is not None
    for n in range(6):
        own.add(n, f"model.layers.{n}", FOUND)
    return Old(config), own


def routed(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gates, ids = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(seed)).softmax(-1).topk(8)
    return ids.int(), gates


def run(own: Any, tokens: int, seed: int) -> None:
    for n, layer in enumerate(own.deciders.values()):
        layer.decide(*routed(tokens, seed + n))


def test_every_token_is_kept_with_what_it_is(configured: Callable[..., Any], mapped: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    runner, own = engine(configured, path, plan=mapped, trace_tokens=9)
    own.change(threshold=0.1)
    runner._prepare_inputs(scheduled([request("a"), request("b", 0.2)]), np.array([2, 3]))
    run(own, 8, seed=0)  # three tokens of padding
    runner._prepare_inputs(scheduled(), np.array([1, 1]))
    run(own, 2, seed=20)
    own.part()
    trace = load_trace(path)
    assert trace.requests.tolist() == [0, 0, 1, 1, 1, 0, 1]
    assert trace.phases.tolist() == [1, 1, 0, 0, 0, 1, 0]
    assert [trace.skips[b] for b in trace.budgets.tolist()] == [None, None, 0.2, 0.2, 0.2, None, 0.2]
    for n, (ids, gates) in enumerate(trace.layers.values()):
        first, second = routed(8, n), routed(2, 20 + n)
        for at, (e, g) in enumerate([*zip(*(x[:5] for x in first), strict=True), *zip(*second, strict=True)]):
            order = e.argsort()
            assert ids[at].tolist() == e[order].tolist()
            assert torch.equal(gates[at], g[order].bfloat16()), "as the router gave them, though slots were skipped"
    for _ in range(3):
        runner._prepare_inputs(scheduled(), np.array([1, 1]))
        run(own, 2, seed=40)
    own.part()
    assert len(load_trace(path)) == 9, "it ends where it was told to"


def test_warm_ups_and_dummy_runs_are_no_traffic(configured: Callable[..., Any], tmp_path: Path) -> None:
    runner, own = engine(configured, tmp_path / "a.trace")
    runner._prepare_inputs(scheduled(), np.array([2, 3]))
    run(own, 5, seed=0)
    own.begin()
    runner._prepare_inputs(scheduled(), np.array([1, 1]))
    run(own, 2, seed=0)
    runner._dummy_run(4)  # another rank's step: what was there is taken out first
    run(own, 4, seed=9)
    own.part()
    assert len(load_trace(tmp_path / "a.trace")) == 2


def test_without_it_nothing_is_there(configured: Callable[..., Any], tmp_path: Path) -> None:
    """No buffer, no copy, and the router fused as before."""
    own = skipping.find(configured())
    layer = own.add(0, "model.layers.0", FOUND)
    assert own.tracing is None and layer.trace is None and own.settings.fuses
    assert not Settings.from_dict({"trace": "a.trace"}).fuses


def test_what_cannot_be_traced_is_refused(configured: Callable[..., Any], tmp_path: Path) -> None:
    own = skipping.find(configured(trace=str(tmp_path / "a.trace")))
    with pytest.raises(IntegrationError, match="sequence parallel"):
        own.add(0, "model.layers.0", FOUND, rank=0)
    for wrong in ({"trace": 3}, {"trace": "a", "trace_tokens": 0}, {"trace": "a", "trace_tokens": True}):
        with pytest.raises(OptionError, match="trace"):
            Settings.from_dict(wrong)


@pytest.mark.vllm
def test_an_engine_traces_what_transformers_sees(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """Compiled; prompts and generated tokens of all requests, gates to bfloat16's precision."""
    case, path = case_of("demo"), tmp_path / "a.trace"
    ours = run_engine(tmp_path, case.model, {"plan": str(case.plan), "skip": 0.0, "trace": str(path)}, [{}])
    trace, model, plan = load_trace(path), load_fp32(case.model), Plan.load(case.plan)
    assert trace.fingerprint == plan.fingerprint and trace.shared() == {"0%": len(trace)}
    lengths = {int((trace.phases[trace.requests == n] == 0).sum()): n for n in trace.requests.unique().tolist()}
    assert len(lengths) == len(prompts())  # a request is known by its own: runners put them in an order of theirs
    for start, made in zip(prompts(), ours["steps"][0]["tokens"], strict=True):
        whole = torch.tensor([[*start, *made[:-1]]])
        with ACE(plan, 0.0)(model) as ace:
            expected = read(model, ace.deciders, windows_of(whole, "own"))
        at = (trace.requests == lengths[len(start)]).nonzero().flatten()
        assert trace.phases[at].tolist() == [0] * len(start) + [1] * (len(made) - 1)
        for key, (ids, gates) in expected.layers.items():
            assert torch.equal(trace.layers[key].ids[at], ids)
            torch.testing.assert_close(trace.layers[key].gates[at].float(), gates.float(), rtol=0.01, atol=1e-4)
