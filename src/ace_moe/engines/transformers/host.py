"""Experts in host memory: everything else on the GPU, and the kernels read the experts that are needed over the bus.

A skipped expert then costs nothing where it would cost most. Copies of some experts may be kept beside the GPU; which, may
change at any time, also under a recorded graph, because the kernels look it up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoint.structure import is_registered
from ...decider.decider import Observer
from ...errors import IntegrationError, OptionError
from ...policies import Routing
from .attachment import attached_to
from .experts import CHILD, HOST, Hosted, layout_of

PAGE = 4096


def place_experts(model: PreTrainedModel, device: torch.device | str, resident: float = 0.0) -> None:
    """Put the model on `device` but for its experts, of which `resident` (a part of 1) have a copy there."""
    from ...kernels.layout import Near

    if not 0 <= resident < 1:
        raise OptionError(f"resident is the part of experts kept on the GPU: from 0 up to below 1, not {resident!r}.")
    device = torch.device(device)
    with torch.no_grad():
        for module in list(_experts(model)):
            products = {name: _reachable(w, device, module) for name, w in _products(module).items()}
            for name, weight in products.items():
                setattr(module, name, nn.Parameter(weight, requires_grad=False))
            near, experts = None, next(iter(products.values())).shape[0]
            if rows := round(resident * experts):
                copies = (torch.empty(rows, *w.shape[1:], dtype=w.dtype, device=device) for w in products.values())
                near = Near(torch.full((experts,), -1, dtype=torch.int32, device=device), *copies)
            vars(module)[HOST] = Hosted(device, near)
            keep_near(module, torch.zeros(experts))
        _move_others(model, device)


def keep_near(module: nn.Module, used: Tensor) -> None:
    """Keep copies of the experts that were used [E] most, in place of those that are there."""
    near = vars(module)[HOST].near
    if near is None:
        return
    best = used.cpu().sort(descending=True, stable=True).indices[: len(near.w_in)].sort().values
    for there, here in zip((near.w_in, near.w_out), _products(module).values(), strict=True):
        there.copy_(here[best.to(here.device)])
    row = torch.full((len(used),), -1, dtype=torch.int32)
    row[best] = torch.arange(len(best), dtype=torch.int32)
    near.row.copy_(row)


def hosted(model: nn.Module) -> list[nn.Module]:
    """List the experts modules whose weights are in host memory."""
    return [module for module in model.modules() if HOST in vars(module)]


def settle(model: PreTrainedModel, run: Callable[[], object]) -> None:
    """Run, uncounted, and keep copies of the experts that were used most."""
    attachment, used = attached_to(model), dict[nn.Module, Tensor]()
    if attachment is None:
        raise IntegrationError("Attach a plan first: it is what sees which experts are used.")
    pairs = zip(attachment.experts(), attachment.deciders.values(), strict=True)
    ends = [decider.observe(_counting(module, decider.experts, used)) for module, decider in pairs]
    try:
        with attachment.deciders.uncounted():
            run()
    finally:
        for end in ends:
            end()
    for module in hosted(model):
        keep_near(module, used[module])


# ---- parts ----------------------------------------------------------------------------------------------------------


def _counting(module: nn.Module, experts: int, used: dict[nn.Module, Tensor]) -> Observer:
    """Make an observer that adds how often each expert [E] was asked for."""

    def observer(routing: Routing, *_: Any) -> None:
        seen = torch.bincount(routing.ids.flatten(), minlength=experts)
        used[module] = used[module] + seen if module in used else seen

    return observer


def _experts(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield all experts modules; refuse what cannot be read from the host."""
    empty = True
    for path, module in model.named_modules():
        if not (is_registered(module) and hasattr(module, "num_experts") and hasattr(module, "down_proj")):
            continue
        if getattr(module, CHILD, None) is not None:
            raise IntegrationError(
                "This model has a plan attached already. Put its experts into host memory first (build the decoder), then attach."
            )
        layout = layout_of(module)
        if isinstance(layout, str):
            raise IntegrationError(f"{path} cannot be read from host memory: {layout}. The kernels do not know it.")
        empty = False
        yield module
    if empty:
        raise IntegrationError(f"{type(model).__name__} has no experts that could stay in host memory.")


def _products(module: nn.Module) -> dict[str, Tensor]:
    """Return what is large: the weights of the two products, by name."""
    return {name: getattr(module, name) for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")}


def _reachable(weight: Tensor, device: torch.device, module: nn.Module) -> Tensor:
    """Copy a weight to host memory that the GPU can read; one that it can read already stays, or a second decoder would pin
    all again.

    Pinned to the byte: torch's own allocator rounds up to a power of two.
    """
    if device.type != "cuda":
        return weight.detach().cpu()
    if weight.device.type == "cpu" and weight.is_pinned():
        return weight.detach()
    raw = torch.empty(weight.nbytes + 2 * PAGE, dtype=torch.uint8)
    start, size = -raw.data_ptr() % PAGE, -(-weight.nbytes // PAGE) * PAGE
    address, cuda = raw.data_ptr() + start, torch.cuda.cudart()
    failed = int(cuda.cudaHostRegister(address, size, 0))
    if failed:
        raise IntegrationError(
            f"The driver could not pin {size / 2**30:.1f} GiB of host memory (error {failed}); there may be too little of it."
        )
    weakref.finalize(module, _release, cuda, raw, address)
    pinned = raw[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
    return pinned.copy_(weight.detach())


def _release(cuda: Any, raw: Tensor, address: int) -> None:
    """Unpin memory before it goes back: a page that is free and pinned cannot be pinned again."""
    cuda.cudaHostUnregister(address)


def _move_others(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        stays = _products(module) if HOST in vars(module) else {}
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in stays:
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
