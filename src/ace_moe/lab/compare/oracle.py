"""How well a table knows what it stands for: its correlation with the true norm ‖f_e(x)‖ of the slots' expert outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoint import MoEModel
from ...mapping.passes import read_through
from ...plan import Plan
from ...policies import Tables
from ...scoring.statistics import pearson, spearman
from ...text import Windows
from ..policies.calls import answers

Seen = dict[str, list[tuple[Tensor, Tensor]]]


@contextmanager
def observed(model: PreTrainedModel) -> Iterator[Seen]:
    """While open, every MoE layer's expert ids and output norms of each pass, both [T, k], by layer key."""
    seen: Seen = defaultdict(list)
    with ExitStack() as hooks:
        for site in MoEModel.of(model).sites:
            experts = model.get_submodule(site.path)
            hook = partial(_keep, seen[site.key])
            hooks.enter_context(experts.register_forward_pre_hook(hook, with_kwargs=True))
        yield seen


def _keep(found: list[tuple[Tensor, Tensor]], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden, ids = (*args, *kwargs.values())[:2]
    found.append((ids.cpu(), answers(module, hidden, ids).norm(dim=-1).cpu()))


def by_expert(plan: Plan) -> Tables:
    """The tables with one number per expert; some policies' have other shapes."""
    experts = {key: layer["experts"] for key, layer in plan.fingerprint.structure.items()}
    return {key: {n: t for n, t in layer.items() if t.shape == (experts[key],)} for key, layer in plan.tables.items()}


@torch.inference_mode()
def table_correlation(
    model: PreTrainedModel, tables: Tables, windows: Windows, batch: int = 1
) -> dict[str, dict[str, dict[str, float]]]:
    """By layer and table: Pearson and Spearman over slots, and over experts with their mean norms. One dense pass."""
    with observed(model) as seen:
        read_through(model, windows, batch)
    found = {}
    for key, passes in seen.items():
        ids, norms = (torch.cat(parts).flatten() for parts in zip(*passes, strict=True))
        found[key] = {name: correlation(table, ids, norms) for name, table in tables.get(key, {}).items()}
    return found


def correlation(table: Tensor, ids: Tensor, norms: Tensor) -> dict[str, float]:
    """table [E] against the norms [N] of slots that went to experts ids [N]."""
    mean, routed = expert_means(ids, norms, len(table))
    return {
        "pearson": pearson(table[ids], norms),
        "spearman": spearman(table[ids], norms),
        "expert_pearson": pearson(table[routed], mean[routed]),
        "expert_spearman": spearman(table[routed], mean[routed]),
    }


def expert_means(ids: Tensor, norms: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Mean norm of each expert's slots, and which experts had any, both [E]."""
    count = torch.bincount(ids, minlength=experts)
    total = torch.bincount(ids, weights=norms.double(), minlength=experts)
    return total / count.clamp(min=1), count > 0
