"""What a user hands over as a model, and the plans that are attached to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...decider import Decider
from ...errors import IntegrationError
from .attachment import HOLDER, MINE, Attachment


def base_of(model: Any) -> PreTrainedModel:
    """The transformers model inside what a user hands over, or an error that says what to do."""
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


def attached_to(model: nn.Module) -> Attachment | None:
    """The attachment a model has."""
    return getattr(model, MINE, None)


def attachments_in(model: Any) -> list[Attachment]:
    """Those whose parts are in a model: attached to itself, to what it is a part of, to a part of it, or inside a wrapper."""
    if not isinstance(model, nn.Module):
        base_of(model)  # says what a model is
    held = (vars(m).get(HOLDER) for m in model.modules() if isinstance(m, Decider))
    return list(dict.fromkeys(a for a in held if a is not None))
