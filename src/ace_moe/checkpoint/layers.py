"""From a site and its tensors to a `MoELayer`: layout, activation, norm scale, router rows, or why not."""

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


def assemble(site: Site, given: Mapping[str, Tensor | Stack]) -> MoELayer:
    """`given` by the site's short names ("experts.down_proj", "norm.weight", "router.weight" …)."""
    module = site.experts
    if not is_registered(module):
        raise StructureError(
            f"{site.path} ({type(module).__name__}) is not served by transformers' experts registry, so its layout is "
            "unknown and no table can be computed."
        )
    experts, norm, router = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in given.items():
        role, _, short = name.partition(".")
        if role == "experts" and isinstance(tensor, Tensor):
            experts[short] = tensor
        elif isinstance(tensor, Tensor):  # what is measured is small: fp32 on the CPU
            {"norm": norm, "router": router}[role][short] = tensor.float().cpu()
    gated, transposed = bool(module.has_gate), bool(module.is_transposed)
    w_in = given["experts.gate_up_proj" if gated else "experts.up_proj"]
    d = w_in.shape[1 if transposed else 2]
    undefined: dict[str, str] = {}
    scale = _scale(site, norm, d, undefined)
    rows = _rows(site, router, d, scale, undefined)
    return MoELayer(
        key=site.key,
        path=site.path,
        top_k=site.top_k,
        w_in=w_in,
        w_out=given["experts.down_proj"],
        b_in=experts.get("gate_up_proj_bias" if gated else "up_proj_bias"),
        b_out=experts.get("down_proj_bias"),
        gated=gated,
        transposed=transposed,
        interleaved=not module.is_concatenated,
        activate=module._apply_gate if gated else module.act_fn,  # type: ignore[arg-type]
        finish=_finish(module, experts),
        norm_scale=None if scale is None else scale.to(w_in.device),
        router_rows=None if rows is None else rows.to(w_in.device),
        undefined=undefined,
    )


def _finish(module: nn.Module, experts: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """What the model does to each expert's output before weighing it: nothing, or its own norm."""
    if not getattr(module, "has_post_expert_norm", False):
        return lambda y: y
    norm: nn.Module = module.post_expert_norm  # type: ignore[assignment]
    name = "post_expert_norm."
    weights = {k.removeprefix(name): v.float() for k, v in experts.items() if k.startswith(name)}
    return lambda y: functional_call(norm, weights, (y,))


def _scale(site: Site, weights: dict[str, Tensor], d: int, undefined: dict[str, str]) -> Tensor | None:
    """Γ; ones where the raw residual feeds the experts (post-norm models)."""
    if site.norm is None:
        return torch.ones(d, dtype=torch.float32)
    scale = measure.norm_scale(site.norm, weights, d)
    if scale is None:
        undefined["gsp"] = (
            f"layer {site.key}: the experts' input comes from {site.norm_path} ({type(site.norm).__name__}), "
            "which does not scale a normalised vector component by component"
        )
    return scale


def _rows(
    site: Site, weights: dict[str, Tensor], d: int, scale: Tensor | None, undefined: dict[str, str]
) -> Tensor | None:
    """Router rows [E, d] in the experts' input space."""
    rows, reason = _own_rows(site, weights, d)
    if rows is not None and site.router_input == "residual":
        rows, reason = _through_norm(rows, scale)
    elif rows is not None and site.router_input == "other":
        rows, reason = None, "does not see the experts' input or the residual in front of it"
    if rows is None:
        name = f"{site.router_path} ({type(site.router).__name__})" if site.router else "the router"
        undefined["rcr"] = f"layer {site.key}: {name} {reason}"
    return rows


def _own_rows(site: Site, weights: dict[str, Tensor], d: int) -> tuple[Tensor | None, str]:
    """Rows in the router's input space. Rows past the experts belong to sinks and are left out."""
    matrices = [name for name, t in weights.items() if t.dim() == 2 and min(t.shape) > 1]
    if site.router is None or len(matrices) != 1:
        return None, f"is not one linear map ({len(matrices)} matrices)"
    rows = weights[matrices[0]]
    if rows.shape[1] != d or rows.shape[0] < site.num_experts:
        return None, f"has a matrix of shape {tuple(rows.shape)}, not one row of {d} per expert"
    if any(t.shape == (d,) for t in weights.values()):
        scale = measure.input_scale(site.router, weights, matrices[0].rpartition(".")[0], d)
        if scale is None:
            return None, "transforms its input in a way that is not a scale per component"
        rows = rows * scale
    return rows[: site.num_experts], ""


def _through_norm(rows: Tensor, scale: Tensor | None) -> tuple[Tensor | None, str]:
    """∂logit/∂(expert input): the residual's component j reaches the experts times γ_j, so a row is divided by γ."""
    if scale is None:
        return None, "sees the residual, and the norm in front of the experts has no scale"
    live = scale.abs() >= NEGLIGIBLE * scale.abs().max()
    return torch.where(live, rows / scale.where(live, torch.ones_like(scale)), 0.0), ""
