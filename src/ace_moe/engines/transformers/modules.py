"""What is asked of a model and its modules before a plan touches them, and a router that the rule stands behind."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoint import Site
from ...errors import IntegrationError
from .experts import CHILD, HOST


def base_of(model: Any) -> PreTrainedModel:
    """Find the transformers model inside what a user hands over, or say what to do."""
    if isinstance(model, torch._dynamo.OptimizedModule) or getattr(model, "_compiled_call_impl", None) is not None:
        raise IntegrationError(
            "This model is compiled already, and its code would not see a plan. Attach first, then compile."
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise IntegrationError(
            f"Attach the plan to the model inside {type(model).__name__} (`model.module`), one per process."
        )
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise IntegrationError(
            f"A plan is attached to a loaded transformers model, not to {type(model).__name__}. Load it first, for example "
            "with AutoModelForCausalLM.from_pretrained."
        )
    part = next((name for name, m in model.named_modules() if isinstance(m, torch._dynamo.OptimizedModule)), None)
    if part is not None:
        raise IntegrationError(
            f"{part} is compiled already, and its weights go by other names. Attach first, then compile, or compile it in place "
            "(`.compile()`)."
        )
    return model


@cache
def ruled(stock: type) -> type:
    """Put the rule behind a router's top-k, in a subclass of its class; without a decider, as in a copied model, it is the stock one."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        decider = getattr(self, "ace_decider", None)
        if decider is None:
            return stock.forward(self, hidden_states, *args, **kwargs)  # type: ignore[attr-defined]
        if decider.observers:
            logits, gates, ids = stock.forward(self, hidden_states, *args, **kwargs)  # type: ignore[attr-defined]
            ids, gates = decider.decide(ids, gates)
            return logits, gates, ids
        logits = F.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
        ids, gates = decider.route(logits, self.ace_kind, logits.dtype)
        return logits, gates, ids

    return type(f"Ruled{stock.__name__}", (stock,), {"forward": forward, "__module__": __name__})


def stack_of(model: nn.Module, path: str) -> tuple[str, nn.Module]:
    """(path, module) of what owns the list of layers on the way to an experts module; the model where there is no list."""
    module, names = model, path.split(".")
    for number, name in enumerate(names):
        below = module.get_submodule(name)
        if isinstance(below, nn.ModuleList):
            return ".".join(names[:number]), module
        module = below
    return "", model


def device_of(module: nn.Module) -> torch.device:
    """Find where a module runs: its weights may be parked elsewhere."""
    if HOST in vars(module):
        return vars(module)[HOST].device
    hook = getattr(module, "_hf_hook", None)
    parked = getattr(hook, "execution_device", None)
    if parked is None:
        return next(module.parameters()).device
    return torch.device(parked if not isinstance(parked, int) else f"cuda:{parked}")


def run_experts(experts: nn.Module, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    """Run experts as they are, also while a plan is attached: without its decider nothing decides these slots again."""
    decider = experts._modules.pop(CHILD, None)
    try:
        return experts.forward(hidden, ids, gates)  # forward: hooks look at the model's own calls
    finally:
        if decider is not None:
            experts.add_module(CHILD, decider)


def refuse_adapters(model: nn.Module, site: Site) -> None:
    """Refuse a layer with an adapter on its experts or its router."""
    for path in (site.path, site.router_path):
        names = [] if path is None else [name for name, _ in model.get_submodule(path).named_parameters()]
        adapted = [name for name in names if "lora_" in name or "base_layer" in name]
        if adapted:
            raise IntegrationError(
                f"{path} has an adapter ({adapted[0]}), which a plan of the plain model knows nothing of. Merge it "
                "(`merge_and_unload`) and build a plan of the merged model."
            )


@torch.no_grad()
def leaves_sentinels_out(module: nn.Module) -> bool:
    """Try on two tokens whether a slot with id `num_experts` changes nothing and is not computed."""
    from torch.utils.flop_counter import FlopCounterMode

    parameter = next(module.parameters())
    hidden = int(getattr(module, "hidden_size", getattr(module, "hidden_dim", 0)) or parameter.shape[-1])
    x = torch.linspace(-1, 1, 2 * hidden, device=parameter.device, dtype=parameter.dtype).view(2, hidden)
    one = torch.zeros(2, 1, dtype=torch.long, device=parameter.device)
    both = torch.cat([one, torch.full_like(one, int(module.num_experts))], dim=1)  # type: ignore[arg-type]
    gates = torch.ones(2, 1, device=parameter.device, dtype=parameter.dtype)
    decider = module._modules.pop(CHILD, None)  # its own loop, as it stands
    try:
        with FlopCounterMode(display=False) as alone:
            expected = module(x, one, gates)
        with FlopCounterMode(display=False) as padded:
            result = module(x, both, torch.cat([gates, torch.zeros_like(gates)], dim=1))
    except Exception:  # a loop that was not made for sentinels fails in its own way
        return False
    finally:
        if decider is not None:
            module.add_module(CHILD, decider)
    return torch.equal(expected, result) and alone.get_total_flops() == padded.get_total_flops()
