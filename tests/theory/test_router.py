"""Appendix, second and third: softmax routing does not see what all router rows share; a Gaussian tilted by w moves by Σw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tables import ALL, random_layer
from torch import Tensor

from ace_moe.checkpoint import MoELayer
from ace_moe.tables import rcr

# ---- translation ----------------------------------------------------------------------------------------------------------


def moved(layer: MoELayer, seed: int, alike: bool = True) -> MoELayer:
    """The layer with the same vector, or one for each expert, added to its router rows."""
    rows = layer.router_rows
    assert rows is not None
    shape = (1, rows.shape[1]) if alike else rows.shape
    return replace(layer, router_rows=rows + torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def logits(layer: MoELayer, seed: int) -> Tensor:
    """[T, E] on random inputs."""
    assert layer.router_rows is not None
    x = torch.randn(16, layer.hidden, generator=torch.Generator().manual_seed(seed))
    return (x @ layer.router_rows.T).double()


@settings(max_examples=25)
@given(st.integers(2, 8), st.integers(2, 12), st.integers(0, 999))
def test_a_shared_part_of_router_rows_changes_nothing(e: int, d: int, seed: int) -> None:
    layer = random_layer(e, d, 3, seed=seed)[0]
    other = moved(layer, seed + 1)
    torch.testing.assert_close(logits(other, 0).softmax(-1), logits(layer, 0).softmax(-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(rcr.prototypes(other, ALL), rcr.prototypes(layer, ALL), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(rcr.part(other, ALL), rcr.part(layer, ALL), rtol=1e-3, atol=1e-5)


def test_of_trained_rows_too(trained: list[MoELayer]) -> None:
    for layer in trained[:2]:
        torch.testing.assert_close(rcr.part(moved(layer, 1), ALL), rcr.part(layer, ALL), rtol=1e-3, atol=1e-5)


def test_it_needs_one_vector_for_all() -> None:
    layer = random_layer(4, 8, 3)[0]
    other = moved(layer, 1, alike=False)
    assert not torch.allclose(logits(other, 0).softmax(-1), logits(layer, 0).softmax(-1), atol=1e-2)
    assert not torch.allclose(rcr.part(other, ALL), rcr.part(layer, ALL), rtol=1e-2)


def test_it_needs_softmax() -> None:
    """Sigmoid scores see the shared part, before and after they are normalised over the chosen experts."""
    layer = random_layer(4, 8, 3)[0]
    one, two = (logits(each, 0).sigmoid() for each in (layer, moved(layer, 1)))
    assert not torch.allclose(one, two, atol=1e-2)
    assert not torch.allclose(one / one.sum(-1, keepdim=True), two / two.sum(-1, keepdim=True), atol=1e-2)


def test_it_needs_centring() -> None:
    layer = random_layer(4, 8, 3)[0]
    uncentred = [rcr.part(other, ALL, centre=False) for other in (moved(layer, 1), layer)]
    assert not torch.allclose(*uncentred, rtol=1e-2)


# ---- tilting --------------------------------------------------------------------------------------------------------------

POINTS, WEIGHTS = np.polynomial.hermite_e.hermegauss(40)
GRID = np.stack(np.meshgrid(POINTS, POINTS), -1).reshape(-1, 2)  # of two independent standard normal numbers
MASS = np.outer(WEIGHTS, WEIGHTS).ravel() / WEIGHTS.sum() ** 2


def tilted_mean(x: np.ndarray, mass: np.ndarray, w: np.ndarray) -> np.ndarray:
    """E[x e^(w·x)] / E[e^(w·x)] of points with these masses."""
    weights = mass * np.exp(x @ w)
    return (weights[:, None] * x).sum(0) / weights.sum()


vectors = st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=2).map(np.array)


@settings(max_examples=50)
@given(vectors, vectors, st.lists(st.floats(-0.8, 0.8), min_size=4, max_size=4))
def test_a_tilted_gaussian_moves_by_its_covariance_times_the_direction(
    mean: np.ndarray, w: np.ndarray, root: list[float]
) -> None:
    a = np.array(root).reshape(2, 2)
    shift = tilted_mean(mean + GRID @ a.T, MASS, w) - mean
    np.testing.assert_allclose(shift, a @ a.T @ w, atol=1e-6)


def test_it_needs_a_gaussian() -> None:
    """Two points at ±1 have variance 1 and move by tanh w, not by w."""
    x, mass, w = np.array([[-1.0], [1.0]]), np.array([0.5, 0.5]), np.array([1.5])
    assert tilted_mean(x, mass, w)[0] == pytest.approx(np.tanh(1.5)) != pytest.approx(1.5)


def test_it_moves_along_the_direction_itself_only_where_the_covariance_is_round() -> None:
    w = np.array([1.0, 0.0])
    round_, long = np.eye(2) * 0.5, np.array([[0.5, 0.0], [0.7, 0.1]])
    for a, along in ((round_, True), (long, False)):
        shift = tilted_mean(GRID @ a.T, MASS, w)
        cosine = shift @ w / np.linalg.norm(shift)
        assert (cosine > 0.999) == along
