"""Random routings of every kind, and tables of every name, for policies that have not seen a model."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ace_moe.lab.policies import LAB_POLICIES
from ace_moe.policies import POLICIES, Policy, Routing, make

EXPERTS, K = 12, 4
KINDS = ("sorted", "unsorted", "unnormalised")
NAMES = sorted({**POLICIES, **LAB_POLICIES})
QUICK = {"diep": {"epochs": 3}, "expert_sparsity": {"tokens": 128}, "lexi": {"samples": 128}}  # calibrations in seconds
REFILLING = [name for name in NAMES if getattr(make(name), "refill", False)]
# beside every cited method: the settings that change what a policy does with a slot
VARIANTS: list[tuple[str, dict]] = [
    *((name, {}) for name in NAMES),
    *((name, {"refill": False}) for name in REFILLING),
    *((name, {"group": 3}) for name in ("sere", "xshare", "oea")),
    *((name, {"group": 1, "refill": False}) for name in ("xshare", "oea")),
    ("sere", {"select": 2, "group": 1}),
    ("halving", {"denominator": 6}),
    ("rcr", {"centred": False}),
    ("ace", {"fusion": "min"}),
    ("random", {"seed": 7}),
    ("share", {"squared": True}),
    ("top_p", {"squared": True}),
]


def label(variant: tuple[str, dict]) -> str:
    return variant[0] + "".join(f"-{k}={v}" for k, v in variant[1].items())


def tables(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    pairs = torch.rand(EXPERTS, EXPERTS, generator=g)
    order = torch.randperm(EXPERTS, generator=g)
    pruned = torch.zeros(EXPERTS, EXPERTS)
    for r in range(1, EXPERTS):
        pruned[r, order[:r]] = 1
    each = ("gsp", "rcr", "rcr_uncentred", "aimer", "reap_saliency")
    slots = torch.tensor([4.0, 4, 3, 3, 2, 2, 1])
    return {
        **{name: torch.rand(EXPERTS, generator=g) + 0.5 for name in each},
        "naee_median": torch.tensor(0.6),
        "modes_alpha": torch.tensor(0.3),
        "oracle_scale": torch.tensor(1.5),
        "sere_similarity": ((pairs + pairs.mT) / 2).fill_diagonal_(1.0),
        "sere_weights": ((pairs + pairs.mT) / 2).fill_diagonal_(1.0),
        "expert_sparsity_pruned": pruned,
        "diep_order": torch.randperm(3 * EXPERTS, generator=g)[:EXPERTS].float() / (3 * EXPERTS),
        "alloc_l_slots": slots,
        "lexi_slots": slots,
    }


def routing(
    kind: str = "sorted",
    threshold: float = 0.0,
    tokens: int = 24,
    seed: int = 0,
    k: int = K,
    dtype: torch.dtype = torch.float32,
    mask: bool = False,
    **changes: object,
) -> Routing:
    """A softmax router's answer: top-k of E, normalised unless `kind` says otherwise."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(tokens, EXPERTS, generator=g)
    gates, ids = logits.softmax(-1).topk(k, dim=-1)
    gates = 2.5 * gates if kind == "unnormalised" else gates / gates.sum(-1, keepdim=True)
    if kind == "unsorted":
        order = torch.rand(tokens, k, generator=g).argsort(-1)
        gates, ids = gates.gather(-1, order), ids.gather(-1, order)
    norms = torch.rand(tokens, k, generator=g) + 0.2
    made = Routing(
        ids,
        gates.to(dtype),
        tables(),
        torch.tensor(threshold),
        torch.randn(tokens, 16, generator=g).to(dtype),
        (torch.rand(tokens, generator=g) > 0.3) if mask else None,
        extras=extras(logits, norms, tokens // 2),
    )
    return made._replace(**changes)


def extras(logits: Tensor, norms: Tensor, length: int) -> SimpleNamespace:
    """What a policy of the lab gathers in a layer, without a model."""
    return SimpleNamespace(
        logits=logits, experts=EXPERTS, length_of=lambda tokens: length or max(tokens, 1), norms=lambda routing: norms
    )


def norms_of(given: Routing) -> Tensor:
    return given.extras.norms(given)


def part(given: Routing, rows: Tensor | slice, order: Tensor | None = None) -> Routing:
    """Some tokens of a routing, their slots in another order if one is given."""

    def slots(x: Tensor) -> Tensor:
        return x[rows] if order is None else x[rows][:, order]

    some = slots(given.ids)
    return given._replace(
        ids=some,
        gates=slots(given.gates),
        hidden=given.hidden[rows],
        extras=extras(given.extras.logits[rows], slots(norms_of(given)), len(some) // 2),
    )


def of(variant: tuple[str, dict], **settings: object) -> Policy:
    return make(variant[0], **{**variant[1], **settings})
