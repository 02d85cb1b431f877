"""Appendix, last: two views skip the intersection of what each would skip, and the output moves by a bounded step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ace_moe import rule
from ace_moe.checkpoint import MoELayer
from ace_moe.policies import Routing, make
from ace_moe.tables import TABLES
from theory import GAINS, outputs, perturbation_bound

EXPERTS, K, D = 12, 6, 5
seeds = st.integers(0, 10_000)


def routing(seed: int, tokens: int = 8) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    gates, ids = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1).topk(K)
    tables = {name: torch.rand(EXPERTS, generator=generator) + 0.1 for name in ("gsp", "rcr")}
    return Routing(ids, gates / gates.sum(-1, keepdim=True), tables, torch.zeros(()))


def skipped(policy: str, given: Routing, tau: float, guarded: bool = False) -> Tensor:
    """[T, k]: candidates under τ; `guarded`: those that are left after the safeguards."""
    made = make(policy)
    return ~rule.kept(made.protected(given) if guarded else made.contribution(given), tau)  # type: ignore[attr-defined]


def mass(given: Routing, slots: Tensor) -> Tensor:
    return torch.where(slots, given.gates, 0.0).sum(-1)


# ---- sets and mass ----------------------------------------------------------------------------------------------------------


@given(seeds, st.floats(0.02, 0.6))
def test_max_skips_the_intersection(seed: int, tau: float) -> None:
    given_ = routing(seed)
    gsp, rcr, both = (skipped(name, given_, tau) for name in ("gsp", "rcr", "ace"))
    assert torch.equal(both, gsp & rcr)
    for floor in (1, 3):
        assert not (skipped(f"ace:min_active={floor}", given_, tau, guarded=True) & ~both).any()


@pytest.mark.parametrize(("fusion", "how"), [("min", torch.logical_or), ("mean", None)])
def test_other_fusions_do_not(fusion: str, how: object) -> None:
    """`min` skips the union instead; `mean` skips slots that one view wants to keep."""
    given_, tau = routing(1, tokens=64), 0.17
    gsp, rcr, found = (skipped(name, given_, tau) for name in ("gsp", "rcr", f"ace:fusion={fusion}"))
    assert not torch.equal(found, gsp & rcr) and (found & ~(gsp & rcr)).any()
    assert how is None or torch.equal(found, gsp | rcr)


@given(seeds, st.floats(0.02, 0.6))
def test_no_more_mass_is_skipped_at_the_same_threshold(seed: int, tau: float) -> None:
    given_ = routing(seed)
    both = mass(given_, skipped("ace", given_, tau, guarded=True))
    for view in ("gsp", "rcr"):
        assert (both <= mass(given_, skipped(view, given_, tau)) + 1e-6).all()


def test_at_the_same_budget_it_may_be_more() -> None:
    """The threshold of a budget is another one for each rule, and then nothing is promised."""
    worse = []
    for seed in range(20):
        given_ = routing(seed, tokens=64)
        at = {n: make(n).contribution(given_).flatten().quantile(0.5) for n in ("gsp", "ace")}  # type: ignore[attr-defined]
        worse.append(
            mass(given_, skipped("ace", given_, at["ace"])).mean()
            > mass(given_, skipped("gsp", given_, at["gsp"])).mean()
        )
    assert any(worse)


def test_mass_needs_gates_that_are_not_negative() -> None:
    given_ = routing(0, tokens=256)
    signed = given_._replace(gates=given_.gates * torch.where(given_.ids % 2 == 0, 1.0, -1.0))
    gsp, both = (skipped(name, signed, 0.16) for name in ("gsp", "ace"))
    assert torch.equal(both, gsp & skipped("rcr", signed, 0.16))
    assert (mass(signed, both) > mass(signed, gsp) + 1e-3).any()


# ---- perturbation -----------------------------------------------------------------------------------------------------------


def slots(seed: int, total: float = 1.0, smallest: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Gates [T, k] that sum to `total`, what is kept (the top slot always), and responses [T, k, d]."""
    generator = torch.Generator().manual_seed(seed)
    gates = torch.rand(8, K, generator=generator).sort(-1, descending=True).values + 0.01
    keep = torch.rand(8, K, generator=generator) < 0.5
    keep = torch.arange(K) < keep.sum(-1, keepdim=True) if smallest else keep
    keep[:, 0] = True
    return total * gates / gates.sum(-1, keepdim=True), keep, torch.randn(8, K, D, generator=generator)


def difference(gates: Tensor, keep: Tensor, found: Tensor, gain: rule.Gain) -> Tensor:
    return (outputs(gates, found) - outputs(rule.rescale(gates, keep, gain), found)).norm(dim=-1)


@given(seeds, st.sampled_from([1.0, 0.37, 1.5]))
def test_renormalised_the_output_moves_by_mass_times_distance(seed: int, total: float) -> None:
    """‖y − ŷ‖ = a ‖μ_S − μ_I‖ with our gain, which keeps the sum of gates whatever it is."""
    gates, keep, found = slots(seed, total)
    kept, lost = (torch.where(m, gates, 0.0) for m in (keep, ~keep))
    a = lost.sum(-1, keepdim=True)
    inside, outside = outputs(kept, found) / kept.sum(-1, keepdim=True), outputs(lost, found) / a.clamp(min=1e-12)
    expected = (a * (outside - inside)).norm(dim=-1)
    torch.testing.assert_close(difference(gates, keep, found, "kept"), expected, rtol=1e-4, atol=1e-5)


def test_dividing_by_the_kept_mass_needs_gates_that_sum_to_one() -> None:
    """As the paper writes it, g / Σ_I g: right for a sum of 1, and far off for OLMoE's or GLM's gates."""
    for total, right in ((1.0, True), (1.5, False)):
        gates, keep, found = slots(0, total)
        kept = torch.where(keep, gates, 0.0)
        theirs = outputs(kept / kept.sum(-1, keepdim=True), found)
        ours = outputs(rule.rescale(gates, keep, "kept"), found)
        assert torch.allclose(theirs, ours, atol=1e-5) == right


@given(seeds, st.sampled_from(GAINS), st.sampled_from([1.0, 0.37, 1.5]))
def test_the_perturbation_is_bounded_for_every_gain(seed: int, gain: rule.Gain, total: float) -> None:
    gates, keep, found = slots(seed, total)
    bound = perturbation_bound(gates, keep, found.norm(dim=-1).amax(-1), gain)
    assert (difference(gates, keep, found, gain) <= bound * (1 + 1e-4) + 1e-6).all()


@given(seeds)
def test_bounds_in_multiples_of_the_skipped_mass(seed: int) -> None:
    """kept: exactly 2a; none: a; power: at most 1.5a where the smallest gates are the skipped ones."""
    gates, keep, _ = slots(seed, smallest=True)
    a, one = torch.where(keep, 0.0, gates).sum(-1), torch.ones(len(gates))
    torch.testing.assert_close(perturbation_bound(gates, keep, one, "kept"), 2 * a, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(perturbation_bound(gates, keep, one, "none"), a, rtol=1e-4, atol=1e-5)
    power = perturbation_bound(gates, keep, one, "power")
    assert (power >= a - 1e-5).all() and (power <= 1.5 * a + 1e-5).all()


def test_power_may_pass_that_where_large_gates_are_skipped() -> None:
    gates, keep = torch.tensor([[0.3, 0.3, 0.3, 0.1]]), torch.tensor([[False, False, False, True]])
    bound = perturbation_bound(gates, keep, torch.ones(1), "power")
    assert float(bound) > 1.02 * 0.9 and float(perturbation_bound(gates, keep, torch.ones(1), "none")) == pytest.approx(
        0.9
    )
    small = perturbation_bound(gates, ~keep, torch.ones(1), "power")
    assert float(small) <= 1.5 * 0.1 + 1e-6


def test_the_bound_needs_gates_that_are_not_negative() -> None:
    gates, keep = torch.tensor([[0.9, 0.6, -0.5]]), torch.tensor([[True, False, False]])
    found = torch.tensor([[[1.0], [1.0], [-1.0]]])
    bound = perturbation_bound(gates, keep, torch.ones(1), "none")
    assert float(difference(gates, keep, found, "none")) > float(bound)


def test_the_bound_needs_the_largest_response() -> None:
    gates, keep, found = slots(1)
    bound = perturbation_bound(gates, keep, found.norm(dim=-1).amin(-1), "kept")
    assert (difference(gates, keep, found, "kept") > bound).any()


@settings(max_examples=30)
@given(seeds)
def test_orthogonal_outputs_lose_least_unscaled_and_keep_their_size_by_power(seed: int) -> None:
    """Why `kept` loses: with outputs at right angles nothing that is kept can stand in for what is skipped."""
    gates, keep, _ = slots(seed)
    found = torch.eye(K).expand(len(gates), -1, -1)
    lost = {gain: difference(gates, keep, found, gain) for gain in GAINS}
    assert (lost["none"] <= lost["power"] + 1e-6).all() and (lost["none"] <= lost["kept"] + 1e-6).all()
    sizes = outputs(rule.rescale(gates, keep, "power"), found).norm(dim=-1)
    torch.testing.assert_close(sizes, outputs(gates, found).norm(dim=-1), rtol=1e-4, atol=1e-5)


def test_parallel_outputs_lose_nothing_renormalised() -> None:
    gates, keep, _ = slots(0)
    found = torch.ones(len(gates), K, D)
    assert float(difference(gates, keep, found, "kept").max()) < 1e-5
    assert float(difference(gates, keep, found, "none").max()) > 0.1


def test_of_trained_experts(trained: list[MoELayer]) -> None:
    """The same identity and bounds with real tables and responses."""
    layer, generator = trained[2], torch.Generator().manual_seed(0)
    assert layer.router_rows is not None
    x = torch.randn(4, layer.hidden, generator=generator)
    gates, ids = (x @ layer.router_rows.T).softmax(-1).topk(8)
    gates = gates / gates.sum(-1, keepdim=True)
    every = torch.stack([layer.respond(row.expand(layer.num_experts, -1), slice(None)) for row in x])
    found = every.gather(1, ids.unsqueeze(-1).expand(-1, -1, layer.hidden))
    tables = {name: TABLES[name].part(layer, slice(None)) for name in ("gsp", "rcr")}
    given_ = Routing(ids, gates, tables, torch.zeros(()))
    keep = ~skipped("ace", given_, 0.12, guarded=True)
    assert not keep.all()
    largest = found.norm(dim=-1).amax(-1)
    for gain in GAINS:
        moved = difference(gates, keep, found, gain)
        assert (moved <= perturbation_bound(gates, keep, largest, gain) * (1 + 1e-4)).all()
        assert not math.isclose(float(moved.max()), 0.0)
