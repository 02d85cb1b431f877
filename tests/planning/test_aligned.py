"""`aligned`: what its statistics do to sums, the way from a text through a plan to a model, and where it is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from ace_moe import ACE, build_plan, rule
from ace_moe.engines.vllm.settings import check_policy
from ace_moe.errors import BudgetError, IntegrationError, PolicyError
from ace_moe.lab.compare.cells import compare
from ace_moe.lab.compare.grid import Grid, parse_gains
from ace_moe.lab.compare.subject import Subject, facts
from ace_moe.mapping import map_budgets
from ace_moe.mapping.aligned import statistics
from ace_moe.mapping.passes import attached, read_through
from ace_moe.plan import Plan
from ace_moe.policies import make
from ace_moe.text import Windows, windows_of

TAU = 0.24


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("qwen3_moe", num_hidden_layers=1)


@pytest.fixture(scope="module")
def text(model: Any) -> Windows:
    g = torch.Generator().manual_seed(0)
    return windows_of(torch.randint(0, model.config.vocab_size, (8, 64), generator=g), "random")


def sums(model: Any, ids: Tensor) -> Tensor:
    """What the experts of the one layer add, [T, d]."""
    (path,) = (name for name, module in model.named_modules() if name.endswith("mlp.experts"))
    seen: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    return seen[0].double()


@pytest.mark.parametrize("gain", ["kept", "power"])
def test_skipped_sums_get_the_mean_and_spread_of_whole_ones(model: Any, text: Windows, gain: str) -> None:
    """Of tokens that lost a slot, in every component; the others' sums stay as they are to the bit."""
    plan, policy, whole = build_plan(model), make("share", gain=gain, compensate="aligned"), sums(model, text.ids)
    with attached(model, plan, policy) as runtime:
        found = statistics(runtime, TAU, lambda: read_through(model, text, batch=3))
        runtime.set(torch.full((3,), TAU))
        plain = sums(model, text.ids)
        kept: list[Tensor] = []
        runtime.align(found)
        with runtime.observed(lambda key: lambda routing, protected, decision: kept.append(decision.keep.all(-1))):
            aligned = sums(model, text.ids)
    lost = ~kept[0]
    assert 0.3 < lost.double().mean() < 1 and torch.equal(aligned[~lost], plain[~lost])
    mean, spread = whole[lost].mean(0), whole[lost].std(0, unbiased=False)
    for values, close in ((aligned, True), (plain, False)):
        off = [(values[lost].mean(0) - mean) / spread, values[lost].std(0, unbiased=False) / spread - 1]
        assert all((float(part.abs().max()) < 1e-4) is close for part in off), "without it they differ"


def test_nothing_lost_means_nothing_changed(model: Any, text: Windows) -> None:
    """At τ 0 the model answers to the bit what it answers without, whatever the statistics are."""
    ids, plan = text.ids[:1], build_plan(model)
    with attached(model, plan, make("share")), torch.no_grad():
        expected = model(ids).logits
    with attached(model, plan, make("share", gain="aligned")) as runtime, torch.no_grad():
        runtime.align({key: torch.full_like(layer.statistics, 7.0) for key, layer in runtime.layers.items()})
        assert torch.equal(model(ids).logits, expected)


def test_a_layer_that_skips_nothing_is_left_alone(model: Any, text: Windows) -> None:
    with attached(model, build_plan(model), make("share", gain="aligned")) as runtime:
        found = statistics(runtime, 1e-9, lambda: read_through(model, text))
    for scale, shift in found.values():
        assert (scale == 1).all() and (shift == 0).all()


def test_a_sum_in_low_precision_is_aligned_in_high() -> None:
    y = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    found = rule.align(y, torch.tensor([True, False]), torch.tensor([[2.0, 1.0], [0.5, -1.0]]))
    assert found.dtype == torch.bfloat16 and found.tolist() == [[2.5, 1.0], [3.0, 4.0]]


# ---- from a text to a model -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(demo_windows: Windows) -> Windows:
    return windows_of(demo_windows.ids[:2], "short")


@pytest.fixture(scope="module")
def mapped(demo_model: Any, demo_plan: Plan, short: Windows) -> Plan:
    return map_budgets(demo_model, demo_plan, make("share", gain="aligned"), short, [0.3, 0.5], judged=True).plan


def test_a_plan_carries_the_statistics(mapped: Plan, demo_model: Any, short: Windows, tmp_path: Path) -> None:
    """Two tables a budget; read back, the model skips and answers as the one that was judged."""
    path = mapped.save(tmp_path / "plan.safetensors")
    assert Plan.load(path) == mapped and sorted(mapped.shapes.values()) == [("hidden",)] * 4
    entry = next(t for t in mapped.thresholds if t.budget == 0.5)
    assert entry.settings["gain"] == "power" and entry.params["compensate"] == "aligned"
    with ACE.load(path, 0.5, policy="share", gain="aligned")(demo_model) as ace, torch.no_grad():
        first = demo_model(short.ids).logits
        assert ace.realised == pytest.approx(entry.realised, abs=2e-3)
        ace.set_skip(0.1 + 0.2)
        with pytest.warns(UserWarning, match="differ by phase"):
            ace.set_skip({"prefill": 0.5, "decode": 0.0})  # nothing lost, nothing aligned
        assert torch.equal(demo_model(short.ids).logits, first)
        before = ace.runtime.alignment
        for budget, says in ((0.4, r"0\.4 has none on this text; mapped are 0\.3, 0\.5"), ("much", "is no number")):
            with pytest.raises(BudgetError, match=says):
                ace.set_skip(budget)
        assert ace.runtime.alignment is before and ace.skip == {"prefill": 0.5, "decode": 0.0}


def test_a_trained_model_comes_nearer(mapped: Plan, demo_model: Any, demo_plan: Plan, short: Windows) -> None:
    """Statistics and KL of one short text: not the figure to quote, and yet a repair must show here."""
    plain = map_budgets(demo_model, demo_plan, make("share"), short, [0.5], judged=True).plan
    kl = [t.fidelity["kl"]["value"] for p in (mapped, plain) for t in p.thresholds if t.budget == 0.5 and t.fidelity]
    assert kl[0] < 0.97 * kl[1]


def test_compare_learns_from_its_other_text(
    demo_model: Any, demo_plan: Plan, demo_windows: Windows, tmp_path: Path
) -> None:
    measured, learned = (windows_of(demo_windows.ids[part], "") for part in (slice(0, 2), slice(2, 4)))
    grid = Grid(("share",), (0.5,), parse_gains("aligned"), {}, correct=False)
    found = []
    for text in (learned, measured):
        subject = Subject(demo_model, demo_plan, measured, calibration=text)
        results = compare(subject, grid, tmp_path / f"{len(found)}.json", facts(subject, "demo"))
        found.append(results["cells"][0]["kl"]["value"])
    assert found[1] < found[0] < 0.3 and grid.calibrated


def test_the_page_is_what_is_stored() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import aligned

    text = aligned.PAGE.read_text(encoding="utf-8")
    assert aligned.page() == text and "| over `kept` | over `power` |" in text


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"restore": True}, {"control": "track"}])
def test_what_moves_slots_or_thresholds_is_refused(mapped: Plan, options: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="aligned"):
        ACE(mapped, policy="share", gain="aligned", **options)


def test_other_thresholds_are_refused(mapped: Plan, demo_model: Any) -> None:
    ace = ACE(mapped, 0.5, policy="share", gain="aligned", reads=True)
    for ask in (lambda: ace.set_threshold(0.1), lambda: ace.set_skip({"prefill": 0.3, "decode": 0.5})):
        with pytest.raises(BudgetError, match="aligned"):
            ask()
    with pytest.raises(PolicyError, match="restored under `aligned`"):
        ace.set_restore(True)
    with ace(demo_model), pytest.raises(BudgetError, match="one budget"), ace.rows([0.3]):
        pass
    assert ace.skip == 0.5


def test_kernels_and_servers_refuse_it(mapped: Plan, demo_model: Any) -> None:
    with pytest.raises(IntegrationError, match="torch path"):
        ACE(mapped, 0.5, policy="share", gain="aligned", dispatch="kernels").attach(demo_model)
    with pytest.raises(PolicyError, match="cannot be served"):
        check_policy(make("share", gain="aligned"))


@pytest.mark.parametrize(("policy", "settings"), [("oea", {}), ("share", {"compensate": "mean"})])
def test_it_is_a_setting_of_token_policies_by_itself(policy: str, settings: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="aligned for a policy that decides token by token"):
        make(policy, gain="aligned", **settings)
    assert make("share", gain="aligned") == make("share", gain="power", compensate="aligned")
