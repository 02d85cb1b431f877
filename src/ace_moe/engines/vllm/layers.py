"""Our halves of vLLM's MoE layer, put in place by vLLM's own out-of-tree replacement.

`MoERunner` owns the router and the experts. Ours gives the router the rule, right behind its top-k and in front of expert
load balancing, so that tables are indexed by logical expert; and the experts an executor. A runner built by an engine
without an `ace` configuration takes its original class back before anything else happens: it is vLLM's own, untouched.
"""

from __future__ import annotations

import importlib
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import IntegrationError
from .executor import Experts, refuse_monolithic
from .skipping import Skipping, configure

if TYPE_CHECKING:
    from ...kernels.routing import TopK

RUNNERS = (
    ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner"),
    ("vllm.model_executor.models.transformers.moe", "TransformersMoERunner"),
)  # runners that live in a model's own files (Kimi-K3) are not replaced: to import them here would load half of vLLM


@cache
def register_layers() -> None:
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    _register_operators()
    for module, name in RUNNERS:
        try:
            stock = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):  # not in this build of vLLM
            continue
        if name not in op_registry_oot:
            PluggableLayer.register_oot(name=name)(_runner(stock))
    _route_outside(RoutedExperts)


# ---- classes ----------------------------------------------------------------------------------------------------


def _runner(stock: type) -> type:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        skipping = _current()
        if skipping is None:
            self.__class__ = stock
        stock.__init__(self, *args, **kwargs)  # type: ignore[misc]
        if skipping is not None:
            attach(self, skipping)

    return type(f"Ace{stock.__name__}", (stock,), {"__init__": __init__, "__module__": __name__})


def _route_outside(experts: type) -> None:
    """Say, before vLLM chooses a kernel, that routing stays outside it: kernels that route by themselves step aside.

    In the class all experts derive from: models bring subclasses of their own (gpt-oss, dbrx), and vLLM replaces by name.
    """
    begin = experts.__init__  # type: ignore[misc]

    @wraps(begin)
    def __init__(self: Any, layer_name: str, params_dtype: Any, moe_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if _current() is not None:
            from vllm.model_executor.layers.fused_moe.config import RoutingMethodType

            moe_config.routing_method = RoutingMethodType.Custom
            moe_config.require_decomposed_backend = True  # vLLM's own word for it, from 0.33 on
        begin(self, layer_name, params_dtype, moe_config, *args, **kwargs)

    experts.__init__ = __init__  # type: ignore[misc]


def _current() -> Skipping | None:
    """The skipping of the model that is being built; None without a configuration, and for a draft model."""
    from vllm.config import get_current_vllm_config_or_none

    return None if is_draft() else configure(get_current_vllm_config_or_none())


def is_draft() -> bool:
    """Ask vLLM's tag of what is being built. A layer's number does not tell: a draft's may begin at 0."""
    from vllm.compilation import backends

    tag = getattr(backends, "model_tag", "backbone")
    return tag.endswith("_head") or tag in ("draft_model", "extract_hidden_states")


def attach(runner: Any, skipping: Skipping) -> None:
    """Put the rule into the runner's router and an executor into its experts."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.models.utils import extract_layer_index

    config, experts = runner.moe_config, runner.routed_experts
    refuse(runner)
    sizes = {
        "experts": config.num_logical_experts,
        "top_k": config.experts_per_token,
        "hidden": config.hidden_dim_unpadded or config.hidden_dim,
        "intermediate": config.intermediate_size,
    }
    rank = get_tensor_model_parallel_rank() if config.is_sequence_parallel else None
    decider = skipping.add(extract_layer_index(runner.layer_name), runner.layer_name, sizes, rank)
    if decider is None:
        return
    executor = Experts(runner, decider, skipping.settings)
    skipping.later.append(executor.choose)
    for name, part in (("ace_decider", decider), ("ace_executor", executor)):
        object.__setattr__(runner, name, part)  # not as a child module: vLLM looks through those
    runner.router.__class__ = ruled_router(runner.router.__class__)
    experts.__class__ = sparing_experts(experts.__class__)
    runner.router.ace_top_k = (
        plain_top_k(runner.router) if decider.kernel is not None and skipping.settings.fuses else None
    )
    for part in (runner.router, experts):
        object.__setattr__(part, "ace_runner", runner)  # not as a child module: the runner owns both


def plain_top_k(router: Any) -> TopK | None:
    """Describe the router for our kernel, which can take over vLLM's default one and no other."""
    from ...kernels.routing import TopK

    if type(router).__mro__[1].__name__ != "FusedTopKRouter" or router.scoring_func not in ("softmax", "sigmoid"):
        return None
    return TopK(router.top_k, router.scoring_func == "sigmoid", router.renormalize)


def refuse(runner: Any) -> None:
    """Refuse a layer whose router or experts would not do what the rule says."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter

    refuse_monolithic(runner.routed_experts)
    router, why = runner.router, ""
    if not isinstance(router, BaseRouter) or isinstance(router, ZeroExpertRouter):
        why = f"its router ({type(router).__name__}) is not one of vLLM's common ones"
    elif getattr(runner.routed_experts, "expert_substitution", None) is not None:
        # behind the router such experts turn −1 into expert 0 with gate 0, which is run
        why = "some of its experts were replaced by constants, and vLLM runs a skipped slot there all the same"
    if why:
        raise IntegrationError(f"ACE cannot skip in {runner.layer_name}: {why}. Serve this model without `ace`.")


@cache
def ruled_router(stock: type) -> type:
    """A subclass of the router's own class, so that vLLM's isinstance checks keep working."""

    def _compute_routing(
        self: Any, hidden_states: Tensor, router_logits: Tensor, indices_type: Any, *, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        decider, plain = self.ace_runner.ace_decider, self.ace_top_k
        if plain is not None and not decider.observers:
            ids, gates = decider.route(router_logits, plain, torch.float32, indices_type or torch.int32)
            return gates, ids
        gates, ids = stock._compute_routing(  # type: ignore[attr-defined]
            self, hidden_states, router_logits, indices_type, input_ids=input_ids
        )
        if ids.device.type == "cpu":  # Dynamo traces this; elsewhere it runs inside vLLM's own opaque operator
            return torch.ops.vllm.ace_route(gates, ids, self.ace_runner.layer_name)
        ids, gates = decider.decide(ids, gates)
        return gates, ids

    return type(f"Ruled{stock.__name__}", (stock,), {"_compute_routing": _compute_routing, "__module__": __name__})


@cache
def sparing_experts(stock: type) -> type:
    def forward_modular(
        self: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Any:
        if x.device.type == "cpu":  # shared experts have run before: nothing overlaps on the CPU
            return torch.ops.vllm.ace_experts(x, topk_weights, topk_ids, self.ace_runner.layer_name)
        shared = {"shared_experts": shared_experts, "shared_experts_input": shared_experts_input}
        return self.ace_runner.ace_executor(self.stock_forward, x, topk_weights, topk_ids, **shared)

    def stock_forward(self: Any, **kwargs: Any) -> Any:
        return stock.forward_modular(self, **kwargs)  # type: ignore[attr-defined]

    return type(
        f"Sparing{stock.__name__}",
        (stock,),
        {"forward_modular": forward_modular, "stock_forward": stock_forward, "__module__": __name__},
    )


# ---- operators: opaque to torch.compile on the CPU --------------------------------------------------------------


def _layer(name: str) -> Any:
    from vllm.forward_context import get_forward_context

    return get_forward_context().no_compile_layers[name]


def _route(gates: Tensor, ids: Tensor, name: str) -> tuple[Tensor, Tensor]:
    ids, gates = _layer(name).ace_decider.decide(ids, gates)
    return gates, ids


def _route_shape(gates: Tensor, ids: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gates), torch.empty_like(ids)


def _run(x: Tensor, gates: Tensor, ids: Tensor, name: str) -> Tensor:
    runner = _layer(name)
    out = runner.ace_executor(runner.routed_experts.stock_forward, x, gates, ids)
    return out.clone() if out.data_ptr() == x.data_ptr() else out


def _run_shape(x: Tensor, gates: Tensor, ids: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


def _register_operators() -> None:
    from vllm.utils.torch_utils import direct_register_custom_op

    direct_register_custom_op("ace_route", _route, mutates_args=[], fake_impl=_route_shape)
    direct_register_custom_op("ace_experts", _run, mutates_args=[], fake_impl=_run_shape)
