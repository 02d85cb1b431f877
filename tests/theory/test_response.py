"""Appendix, first proposition: ‖f(x)‖ ≤ ‖x̄‖² ‖ΓW_gate‖ ‖ΓW_up‖ ‖W_down‖, because no activation is larger than its input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tables import random_layer
from torch import Tensor

from ace_moe.checkpoint import MoELayer
from theory import reach

LOOSE = 1 + 1e-4  # fp32


def responses(layer: MoELayer, x: Tensor) -> Tensor:
    """‖f_e(x̄Γ)‖ of every expert on the same normalised input x̄ [d]: [E]."""
    assert layer.norm_scale is not None
    return layer.respond((x * layer.norm_scale).expand(layer.num_experts, -1), slice(None)).norm(dim=-1)


def holds(layer: MoELayer, x: Tensor) -> bool:
    return bool((responses(layer, x) <= x.square().sum() * reach(layer) * LOOSE).all())


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 7), st.integers(0, 999), st.floats(0.01, 30))
def test_no_response_is_larger(e: int, d: int, m: int, seed: int, size: float) -> None:
    layer = random_layer(e, d, m, seed=seed)[0]
    assert holds(layer, size * torch.randn(d, generator=torch.Generator().manual_seed(seed + 1)))


def test_no_response_of_trained_experts_is_larger(trained: list[MoELayer]) -> None:
    generator = torch.Generator().manual_seed(0)
    for layer in trained:
        assert holds(layer, torch.randn(layer.hidden, generator=generator))


def narrow() -> tuple[MoELayer, Tensor]:
    """One expert of width one, on the input it answers most: here the bound is all but reached."""
    layer = random_layer(1, 4, 1, seed=3)[0]
    gate = layer.projections(slice(0, 1)).gate
    assert gate is not None and layer.norm_scale is not None
    w_in = torch.cat([gate, gate], 1)  # both branches look the same way
    along = gate[0, 0] * layer.norm_scale
    return replace(layer, w_in=w_in), 50 * along / along.norm()


def test_the_bound_can_be_reached() -> None:
    layer, x = narrow()
    assert float(responses(layer, x) / (x.square().sum() * reach(layer))) > 0.99


def test_it_needs_an_activation_below_its_input() -> None:
    layer, x = narrow()
    louder = replace(layer, activate=lambda z: 1.1 * layer.activate(z))
    assert holds(layer, x) and not holds(louder, x)


def test_it_needs_experts_without_bias() -> None:
    layer = random_layer(2, 4, 3)[0]
    shifted = replace(layer, b_out=torch.ones(2, 4))
    assert holds(layer, torch.zeros(4)) and not holds(shifted, torch.zeros(4))


def test_it_needs_the_scale_of_the_norm() -> None:
    """Without Γ the number is no bound: the norm may stretch what the experts see."""
    layer, x = narrow()
    unscaled = reach(replace(layer, norm_scale=torch.full((4,), 0.5)))
    assert float(responses(layer, x)) > float(x.square().sum() * unscaled)


@pytest.mark.parametrize("width", [2, 64])
def test_width_loosens_it(width: int) -> None:
    """‖a ∘ b‖ ≤ ‖a‖ ‖b‖ is reached where all lies in one component, and loses √m where it is spread."""
    a = torch.ones(width)
    assert float(a.norm() * a.norm() / (a * a).norm()) == pytest.approx(width**0.5)
