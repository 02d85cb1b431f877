"""Triton launches on the current device: kernels make their tensors' own the current one."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE

from ace_moe.kernels import attend, decide, experts, gemv, launch, track
from ace_moe.kernels.activation import SILU, Activation
from ace_moe.kernels.config import many_tiles
from ace_moe.kernels.experts import Layout, Weights
from ace_moe.rule import Form


def test_the_device_of_the_tensors_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is more than one; a model that is spread over several has layers on all of them."""
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: seen.append(device) or launch.HERE)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for devices, entered in ((1, []), (2, [torch.device("cuda:1")])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=devices: number)
        launch._alone.cache_clear()
        for device in ("cpu", "cuda:0", "cuda:1"):
            with launch.on(torch.device(device)):
                pass
        assert seen == entered
    launch._alone.cache_clear()


@pytest.mark.parametrize(("bytes_", "wide"), [(232448, True), (101376, False)])
def test_a_gpu_after_hopper_may_have_less_shared_memory(
    bytes_: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blackwell cards for desktops are of a later capability and fit no tile made for Hopper."""
    monkeypatch.setattr(launch, "hopper", lambda device: True)
    given = SimpleNamespace(shared_memory_per_block_optin=bytes_)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: given)
    launch.roomy.cache_clear()
    assert launch.roomy(torch.device("cuda:0")) is wide
    launch.roomy.cache_clear()
    for slots in (1, 9, 30, 1000):
        tiles = many_tiles(slots, 2048, 768, torch.bfloat16, wide)
        up = 2 * tiles.stages_up * (tiles.bm * tiles.bk_up + 2 * tiles.bn_up * tiles.bk_up)
        assert up <= bytes_


def layer(tokens: int) -> tuple[Any, ...]:
    """x, ids, gates and weights of four experts."""
    draw = torch.Generator().manual_seed(0)
    x, w_in, w_out = (
        torch.randn(*size, generator=draw).to(DEVICE) for size in ((tokens, 16), (4, 32, 16), (4, 16, 16))
    )
    ids = torch.arange(4, device=DEVICE).repeat(tokens, 1)[:, :2]
    weights = Weights(w_in, w_out, None, None, Layout(True, False, False, Activation(SILU)))
    return x, ids, torch.full_like(ids, 0.5, dtype=torch.float32), weights


def rule(tokens: int, route: bool) -> None:
    """With restored slots: by as many launches as there can be."""
    form, (_, ids, gates, _) = str(decide.Rule(Form())), layer(tokens)
    rows, tau = torch.full((tokens,), 2, dtype=torch.int8, device=DEVICE), torch.zeros(4, device=DEVICE)
    counts, free = torch.zeros(4, 3, dtype=torch.int64, device=DEVICE), torch.ones(4, dtype=torch.int8, device=DEVICE)
    voting = [free, torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)]
    common = rows, tau, torch.ones(3, device=DEVICE), [], counts, -1, form
    if route:
        logits = torch.randn(tokens, 4, device=DEVICE)
        decide.launch_route(logits, *common, 2, False, True, 1.0, torch.float32, torch.int64, voting)
    else:
        decide.launch_rule(ids, gates, *common, voting, 4)


def attention() -> None:
    q, cache = torch.randn(1, 2, 1, 16, device=DEVICE), torch.randn(1, 1, 80, 16, device=DEVICE)
    attend.attend(q, cache, cache, None, attend.workspace(torch.device(DEVICE)), 1.0)


def tracking() -> None:
    counts, seen = (
        torch.zeros(4, 3, dtype=torch.int64, device=DEVICE),
        torch.zeros(4, 2, dtype=torch.int64, device=DEVICE),
    )
    track.launch_track([counts], torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE), seen, 2, 0.2, 1e-5, 4.0)


LAUNCHES = {
    "few tokens": (experts, lambda: experts.run(*layer(2))),
    "many": (experts, lambda: experts.run(*layer(9))),
    "more than a program sorts": (experts, lambda: experts.run(*layer(600))),
    "rule": (decide, lambda: rule(2, False)),
    "rule in two launches": (decide, lambda: rule(40, False)),
    "route": (decide, lambda: rule(2, True)),
    "route in three launches": (decide, lambda: rule(1100, True)),
    "attention": (attend, attention),
    "product": (gemv, lambda: gemv.gemv(torch.randn(1, 16, device=DEVICE), [torch.randn(8, 16, device=DEVICE)])),
    "thresholds": (track, tracking),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_everything_is_launched_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, run = LAUNCHES[name]
    inside, launched = [False], []

    @contextmanager
    def on(device: torch.device) -> Any:
        assert device.type == DEVICE
        inside[0] = True
        yield
        inside[0] = False

    kind = type(experts.sort_kernel.sort)
    stock = kind.__getitem__

    def launch_of(self: Any, grid: Any) -> Any:
        launched.append(inside[0])
        return stock(self, grid)

    monkeypatch.setattr(kind, "__getitem__", launch_of, raising=False)
    monkeypatch.setattr(module, "on", on)
    run()
    assert launched and all(launched)
