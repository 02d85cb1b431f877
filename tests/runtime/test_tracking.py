"""Thresholds that keep a budget by themselves: on synthetic streams, on a real model, by kernel and in torch."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from ace_moe import ACE, build_plan
from ace_moe.decider import row_of
from ace_moe.decider.controller import HIGHEST, LOWEST, Controller, moved
from ace_moe.decider.report import NOT_COUNTED
from ace_moe.decider.rows import Same, rows_for
from ace_moe.decider.state import UNCONTROLLED, State
from ace_moe.errors import OptionError, PolicyError

K, LAYERS = 8, 4


def stream(g, tokens, flat):
    """Shares [tokens, LAYERS · K] of a workload; the largest of each layer is protected."""
    shares = (torch.randn(tokens, LAYERS, K, generator=g) * flat).softmax(-1)
    return torch.where(shares == shares.max(-1, keepdim=True).values, torch.inf, shares).flatten(1)


@settings(max_examples=6)
@given(st.sampled_from([0.3, 0.5, 0.6]), st.sampled_from([1, 16]), st.integers(0, 9))
@pytest.mark.long
def test_the_budget_is_kept_across_workloads(asked, batch, seed):
    """Over any 2,000 tokens behind the first 2,000, also where the workload changes: within three points."""
    g = torch.Generator().manual_seed(seed)
    slots = torch.cat([stream(g, 4000, flat) for flat in (0.6, 1.1, 0.8)])
    tau, target = torch.tensor([0.0, 0.02, 0.9]), torch.tensor([UNCONTROLLED, asked, UNCONTROLLED])
    skipped = []
    for step in slots.split(batch):
        kept = int((~(step < tau[1])).sum())
        skipped += [1 - kept / step.numel()] * len(step)
        tau = moved(tau, target, torch.tensor([[7, 7], [step.numel(), kept], [99, 1]]), LAYERS * K)
    ratios = torch.tensor(skipped)[2000:].unfold(0, 2000, 100).mean(-1)
    assert (ratios - asked).abs().max() < 0.03
    assert tau[0] == 0 and tau[2] == torch.tensor(0.9), "rows without a target stay"


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 4096), st.floats(0, 1)), min_size=1, max_size=6), st.integers(0, 99))
def test_it_stays_within_bounds_and_still_rows_stay(step, seed):
    rows, g = len(step), torch.Generator().manual_seed(seed)
    tau = torch.rand(rows, generator=g) * 10 ** torch.randint(-6, 2, (rows,), generator=g)
    counts = torch.tensor([[n, int(n * kept)] for n, kept in step])
    new = moved(tau, torch.full((rows,), 0.5), counts, K)
    still = counts[:, 0] == 0
    assert torch.equal(new[still], tau[still]) and new.isfinite().all()
    assert ((new >= LOWEST * 0.999) & (new <= HIGHEST * 1.001))[~still].all()


def test_the_kernel_moves_alike():
    pytest.importorskip("triton")
    from ace_moe.decider.controller import RATE
    from ace_moe.kernels.track import launch_track

    g = torch.Generator().manual_seed(0)
    counts = [torch.randint(0, 50, (7, 3), generator=g) for _ in range(5)]
    for c in counts:
        c[:, 1] = torch.minimum(c[:, 0], c[:, 1])
    seen = torch.randint(0, 20, (7, 2), generator=g)
    seen[2] = sum(counts)[2, :2]
    tau, target = torch.rand(7, generator=g), torch.tensor([UNCONTROLLED, 0.3, 0.5, 0.6, UNCONTROLLED, 0.9, 0.1])
    total = sum(counts)[:, :2]
    expected = moved(tau, target, total - seen, 40)
    launch_track(counts, tau, target, seen, 40, RATE, LOWEST, HIGHEST)
    torch.testing.assert_close(tau, expected, rtol=1e-6, atol=0)
    assert torch.equal(seen, total)


@torch.no_grad()
def run(model, ids, steps):
    """Teacher-forced: a prompt, then one token a step."""
    out = model(ids[:, :-steps], use_cache=True)
    for i in range(ids.shape[1] - steps, ids.shape[1]):
        out = model(ids[:, i : i + 1], past_key_values=out.past_key_values)
    return out.logits


@pytest.mark.long
def test_a_model_keeps_its_budget_without_a_text(demo_model, demo_plan, demo_windows):
    ids = demo_windows.ids[:4, :100]
    with ACE(demo_plan, {"prefill": 0.0, "decode": 0.5}, policy="share", control="track")(demo_model) as ace:
        run(demo_model, ids, 60)
        ace.reset()
        run(demo_model, ids, 60)
        found = ace.report()
        assert found["decode"]["skipped"] == pytest.approx(0.5, abs=0.015) and found["prefill"]["skipped"] == 0
        tau = ace.freeze()
        assert found["threshold"]["decode"] == pytest.approx(float(tau[1]))
        run(demo_model, ids, 20)
        assert torch.equal(ace.thresholds, tau)


def test_a_token_stream_gives_the_same_thresholds_each_time(demo_model, demo_plan, demo_windows):
    found = []
    for _ in range(2):
        with ACE(demo_plan, 0.4, policy="share", control="track", restore=True)(demo_model) as ace:
            run(demo_model, demo_windows.ids[:3, :40], 30)
            found.append(ace.thresholds)
    assert torch.equal(*found) and found[0][1] != found[0][0]


@pytest.mark.long
def test_rules_ratio_counts_not_what_was_restored(demo_model, demo_plan, demo_windows):
    with ACE(demo_plan, 0.5, policy="share", control="track", restore=True)(demo_model) as ace:
        run(demo_model, demo_windows.ids[:4, :80], 60)
        ace.reset()
        run(demo_model, demo_windows.ids[:4, 80:160], 60)
        found = ace.report()["decode"]
    assert found["skipped"] == pytest.approx(0.5, abs=0.03) and found["realised"] < found["skipped"] - 0.1


def test_a_pass_aside_leaves_thresholds_alone(demo_model, demo_plan, demo_windows):
    with ACE(demo_plan, 0.5, policy="share", control="track")(demo_model) as ace:
        run(demo_model, demo_windows.ids[:2, :30], 20)
        tau, target = ace.thresholds, ace.deciders.state.target
        with ace.deciders.bypass():
            run(demo_model, demo_windows.ids[:2, :30], 20)
        assert (
            torch.equal(ace.thresholds, tau) and ace.deciders.state.target[row_of("decode")] == target[row_of("decode")]
        )
        run(demo_model, demo_windows.ids[:2, :30], 1)
        assert not torch.equal(ace.thresholds, tau)


def test_a_pass_aside_says_nothing_of_padding(demo_model, demo_plan, demo_windows):
    """Whether padding was counted is said of what was counted."""
    with ACE(demo_plan)(demo_model) as ace:
        with ace.deciders.bypass():
            demo_model(demo_windows.ids[:2, :8])
        assert ace.report()["padding"] == NOT_COUNTED
        demo_model(demo_windows.ids[:2, :8])
        assert ace.report()["padding"] != NOT_COUNTED


def test_restoring_or_not_leaves_thresholds_where_they_are(demo_model, demo_plan, demo_windows):
    with ACE(demo_plan, 0.5, policy="share", control="track", reads=True)(demo_model) as ace:
        start = ace.thresholds
        run(demo_model, demo_windows.ids[:2, :30], 20)
        tau = ace.thresholds
        for on in (True, False):
            ace.set_restore(on)
            assert torch.equal(ace.thresholds, tau) and not torch.equal(tau, start)


@pytest.mark.long
def test_it_lives_in_a_compiled_model():
    model = zoo.build("qwen3_moe", num_hidden_layers=2)
    plan, ids, found = build_plan(model), torch.arange(24).view(2, 12), []
    for compiles in (False, True):
        with ACE(plan, 0.5, policy="share", control="track")(model) as ace, torch.no_grad():
            call = torch.compile(model, backend="aot_eager") if compiles else model
            for _ in range(3):
                call(ids)
            found.append(ace.thresholds)
    torch.testing.assert_close(*found)
    torch._dynamo.reset()


def test_refusals(demo_plan):
    with pytest.raises(OptionError, match="fixed, track"):
        ACE(demo_plan, control="auto")
    with pytest.raises(PolicyError, match="token by token"):
        ACE(demo_plan, policy="oea", control="track")


def test_a_device_has_one_state_whichever_name_it_goes_by():
    """vLLM says `cuda`, tensors say `cuda:0`: two states would let one move while layers read the other."""
    state = State()
    assert state.on(torch.device("cpu", 0)) is state.on(torch.device("cpu"))


def test_thresholds_move_on_with_a_model_that_is_moved():
    """What stays on the device it came from is not asked for where a threshold is."""
    state, layer = State(), SimpleNamespace(counts=torch.zeros(rows_for(1), 3, dtype=torch.int64), top_k=8)
    state.on(torch.device("meta"))
    state.set(torch.full((rows_for(1),), 0.1), torch.full((rows_for(1),), 0.5))
    tracker = Controller({"0": layer}, state)
    tracker.shared.tau[1] = 0.7
    assert float(state.tau[1]) == pytest.approx(0.7)
    layer.counts = layer.counts.to("meta")
    tracker.sync()
    assert tracker.shared.tau.is_meta and tracker.seen.is_meta
    assert float(state.on(torch.device("cpu")).tau[1]) == pytest.approx(0.7)


def test_rows_stay_where_a_graph_found_them():
    """A larger pass makes others: memory that a recorded graph reads may not go back."""
    same, device = Same(row_of("decode")), torch.device("cpu")
    before = {n: same.rows(n, device).data_ptr() for n in (1, 64, 65)}
    assert same.rows(5000, device).tolist() == [row_of("decode")] * 5000
    assert before == {n: same.rows(n, device).data_ptr() for n in before}
