"""A trace comes back as it was, takes little room, is its owner's alone, and a damaged one is refused."""

from __future__ import annotations

import contextlib
import json
import stat
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_moe.engines.traces import Slots, Trace
from ace_moe.engines.traces.collector import Collector
from ace_moe.engines.traces.file import load_trace, save_trace
from ace_moe.errors import TraceError
from ace_moe.lab.traffic.returned import load_returned
from ace_moe.plan import Fingerprint, Plan, Routers
from command import run_ace


def fingerprint(experts: int, k: int, layers: int = 2) -> Fingerprint:
    return Fingerprint({str(n): {"experts": experts, "top_k": k} for n in range(layers)}, Routers("0" * 64))


def made(tokens: int, experts: int, k: int, seed: int, requests: int = 3) -> Trace:
    """Routing at random, as routers give it: in the order of gates."""
    generator = torch.Generator().manual_seed(seed)
    collector = Collector(fingerprint(experts, k), tokens)
    budgets = [collector.budget(skip) for skip in (0.0, {"prefill": 0.1, "decode": 0.3}, None)]
    about = torch.stack([torch.randint(n, (tokens,), generator=generator) for n in (requests, 3, len(budgets))])
    layers = {}
    for key in ("0", "1"):
        gates, ids = torch.randn(tokens, experts, generator=generator).softmax(-1).topk(k)
        layers[key] = ids, gates
    collector.add(about, layers)
    return collector.trace()


def same(one: Trace, other: Trace) -> bool:
    slots = all(
        torch.equal(a, b) for key in one.layers for a, b in zip(one.layers[key], other.layers[key], strict=True)
    )
    tokens = all(torch.equal(getattr(one, n), getattr(other, n)) for n in ("requests", "phases", "budgets"))
    return slots and tokens and (one.skips, one.fingerprint, one.model) == (other.skips, other.fingerprint, other.model)


@settings(max_examples=25)
@given(st.integers(1, 40), st.sampled_from([(4, 1), (8, 2), (64, 8), (300, 6), (512, 10)]), st.integers(0, 99))
def test_a_trace_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, tokens: int, size, seed: int) -> None:
    path, trace = tmp_path_factory.mktemp("traces") / "a.trace", made(tokens, *size, seed)
    save_trace(trace, path)
    assert same(load_trace(path), trace)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_others_could_read_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    path.touch(0o644)
    save_trace(made(4, 8, 2, 0), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(("experts", "k"), [(32, 8), (128, 8), (256, 8), (512, 10)])
def test_random_routing_takes_at_most_two_bytes_and_a_fifth(tmp_path: Path, experts: int, k: int) -> None:
    """The worst there is: experts at random compress least."""
    trace = made(8192, experts, k, 0, requests=64)
    assert save_trace(trace, tmp_path / "a.trace").stat().st_size <= 2.2 * 2 * trace.layers["0"].ids.numel()


def test_slots_are_sorted_by_expert_with_their_gates() -> None:
    slots = Slots.of(torch.tensor([[5, 2, 9]]), torch.tensor([[0.5, 0.25, 0.125]]))
    assert slots.ids.tolist() == [[2, 5, 9]] and slots.gates.tolist() == [[0.25, 0.5, 0.125]]


def test_a_collector_stops_at_its_tokens() -> None:
    collector = Collector(fingerprint(4, 1, layers=1), 5)
    collector.budget(0.0)
    for _ in range(3):
        collector.add(torch.zeros(3, 2), {"0": (torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))})
    assert collector.full and len(collector.trace()) == 5


@settings(max_examples=40)
@given(st.floats(0, 1, exclude_max=True))
def test_a_cut_file_is_refused(tmp_path_factory: pytest.TempPathFactory, part: float) -> None:
    path = tmp_path_factory.mktemp("traces") / "a.trace"
    whole = save_trace(made(16, 8, 2, 0), path).read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(TraceError):
        load_trace(path)


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_file_is_refused_or_read_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Some bytes say nothing that could be checked, such as a gate's; no other error than ours comes out."""
    path = tmp_path_factory.mktemp("traces") / "a.trace"
    content = bytearray(save_trace(made(16, 8, 2, 0), path).read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(TraceError):
        assert len(load_trace(path)) > 0


def test_no_more_is_inflated_than_the_header_says(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    bomb = torch.frombuffer(bytearray(zlib.compress(bytes(1 << 26))), dtype=torch.uint8)
    facts = {"schema": 1, "model": "", "fingerprint": None, "skips": [0.0], "tokens": 2, "slots": {"0": 1}}
    path = tmp_path / "a.trace"
    save_file({"layers.0": bomb, "tokens": bomb.clone()}, path, metadata={"trace": json.dumps(facts)})
    with pytest.raises(TraceError, match="bytes where 8 should be"):
        load_trace(path)


def test_other_files_are_no_traces(tmp_path: Path, demo_plan: Plan) -> None:
    plan = demo_plan.save(tmp_path / "plan.safetensors")
    for path in (plan, tmp_path / "nothing.trace"):
        with pytest.raises(TraceError, match="ace trace"):
            load_trace(path)
    ran = run_ace("trace", "MODEL", "--text", "x.txt", "-o", plan)
    assert ran.code == 1 and "not a trace" in ran.err and Plan.load(plan) == demo_plan


def test_returned_experts_have_an_order_and_no_gates(tmp_path: Path) -> None:
    path = tmp_path / "experts.npz"
    np.savez(path, first=np.array([[[3, 1]], [[0, 2]]]), second=np.array([[[1, 3]]]))
    trace = load_returned(path)
    assert trace.requests.tolist() == [0, 0, 1] and not trace.has_gates and trace.experts("0") == 4
    assert trace.layers["0"].ids.tolist() == [[1, 3], [0, 2], [1, 3]]
    assert trace.layers["0"].gates.tolist() == [[1, 2], [2, 1], [2, 1]]
    np.savez(path, first=np.array([[0.5]]))
    with pytest.raises(TraceError, match="returned experts"):
        load_returned(path)
