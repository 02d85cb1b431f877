"""From a site and its tensors to a `MoELayer`: layout, activation, norm scale, and router rows or why there are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import StructureError
from . import measure
from .records import MoELayer, Stack
from .structure import Site, is_registered

NEGLIGIBLE = 1e-6  # a norm component this small against the largest carries no routing direction


def assemble(site: Site, tensors: Mapping[str, Tensor | Stack]) -> MoELayer:
    """Build a layer from its tensors, by the site's short names ("experts.down_proj", "norm.weight", "router.weight" …)."""
    module = site.experts
    if not is_registered(module):
        raise StructureError(
            f"{site.path} ({type(module).__name__}) is not served by transformers' experts registry, so its layout is "
            "unknown and no table can be computed."
        )
    parts: dict[str, dict[str, Tensor]] = {"experts": {}, "norm": {}, "router": {}}
    for name, tensor in tensors.items():
        role, _, short = name.partition(".")
        if isinstance(tensor, Tensor):  # norm and router are small, and measured in fp32 on the CPU
            parts[role][short] = tensor if role == "experts" else tensor.float().cpu()
    gated, transposed = bool(module.has_gate), bool(module.is_transposed)
    w_in = tensors["experts.gate_up_proj" if gated else "experts.up_proj"]
    d = w_in.shape[1 if transposed else 2]
    # where the raw residual feeds the experts (post-norm models), Γ is 1
    scale = torch.ones(d) if site.norm is None else measure.norm_scale(site.norm, parts["norm"], d)
    rows, reason = _router_rows(site, parts["router"], d, scale)
    undefined = {}
    if scale is None:
        undefined["gsp"] = (
            f"layer {site.key}: the experts' input comes from {site.norm_path} ({type(site.norm).__name__}), "
            "which does not scale a normalised vector component by component"
        )
    if rows is None:
        name = f"{site.router_path} ({type(site.router).__name__})" if site.router else "the router"
        undefined["rcr"] = f"layer {site.key}: {name} {reason}"
    return MoELayer(
        key=site.key,
        path=site.path,
        top_k=site.top_k,
        w_in=w_in,
        w_out=tensors["experts.down_proj"],
        b_in=parts["experts"].get("gate_up_proj_bias" if gated else "up_proj_bias"),
        b_out=parts["experts"].get("down_proj_bias"),
        gated=gated,
        transposed=transposed,
        interleaved=not module.is_concatenated,
        activate=module._apply_gate if gated else module.act_fn,  # type: ignore[arg-type]
        finish=_finish(module, parts["experts"]),
        norm_scale=None if scale is None else scale.to(w_in.device),
        router_rows=None if rows is None else rows.to(w_in.device),
        undefined=undefined,
    )


def _finish(module: nn.Module, experts: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """Do what the model does to each expert's output before weighing it: nothing, or its own norm."""
    if not getattr(module, "has_post_expert_norm", False):
        return lambda y: y
    norm: nn.Module = module.post_expert_norm  # type: ignore[assignment]
    name = "post_expert_norm."
    weights = {k.removeprefix(name): v.float() for k, v in experts.items() if k.startswith(name)}
    return lambda y: functional_call(norm, weights, (y,))


def _router_rows(site: Site, weights: dict[str, Tensor], d: int, scale: Tensor | None) -> tuple[Tensor | None, str]:
    """Router rows [E, d] in the experts' input space, or why there are none."""
    matrices = [name for name, t in weights.items() if t.dim() == 2 and min(t.shape) > 1]
    if site.router is None or len(matrices) != 1:
        return None, f"is not one linear map ({len(matrices)} matrices)"
    rows = weights[matrices[0]]
    if rows.shape[1] != d or rows.shape[0] < site.num_experts:
        return None, f"has a matrix of shape {tuple(rows.shape)}, not one row of {d} per expert"
    if any(t.shape == (d,) for t in weights.values()):
        own = measure.input_scale(site.router, weights, matrices[0].rpartition(".")[0], d)
        if own is None:
            return None, "transforms its input in a way that is not a scale per component"
        rows = rows * own
    rows = rows[: site.num_experts]  # those past the experts belong to sinks
    if site.router_input == "same":
        return rows, ""
    if site.router_input == "other":
        return None, "does not see the experts' input or the residual in front of it"
    if scale is None:
        return None, "sees the residual, and the norm in front of the experts has no scale"
    # the residual's component j reaches the experts times γ_j, so ∂logit/∂(expert input) is the row divided by γ
    live = scale.abs() >= NEGLIGIBLE * scale.abs().max()
    return torch.where(live, rows / scale.where(live, torch.ones_like(scale)), 0.0), ""
