"""What the tests of plans share: small plans, and files changed behind their back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ace_moe.plan import Answer, Curve, Fingerprint, Phase, Plan, Routers, Threshold, Workload
from ace_moe.plan.file import seal
from ace_moe.plan.lookup import shaping
from ace_moe.policies import Ace

KEPT = Path(__file__).parents[1] / "data" / "plans"
SETTINGS = Ace().settings
NEWS, CODE = Workload("news.txt", "a" * 64, 1024), Workload("code.txt", "b" * 64, 2048)


def entry(
    budget: float,
    tau: float,
    workload: Workload = NEWS,
    phase: Phase = "both",
    of: dict[str, Any] = SETTINGS,
) -> Threshold:
    return Threshold(
        **of,
        budget=budget,
        threshold=tau,
        realised=budget,
        corrected=True,
        passes=2,
        workload=workload,
        phase=phase,
    )


def curve(
    points: list[list[float]] | Tensor,
    workload: Workload = NEWS,
    of: dict[str, Any] = SETTINGS,
    date: str = "2026-11-16",
) -> Curve:
    return Curve(shaping(of), workload, torch.as_tensor(points, dtype=torch.float32), date)


def facts(experts: int, top_k: int = 4) -> dict[str, Any]:
    """One layer's part of a fingerprint."""
    return {"experts": experts, "top_k": top_k, "hidden": 16, "intermediate": 8, "router": f"same:{experts}x16"}


def plan_of(*thresholds: Threshold, layers: int = 2, experts: int = 8) -> Plan:
    tables = {str(n): {"gsp": torch.rand(experts), "rcr": torch.rand(experts)} for n in range(layers)}
    structure = {key: facts(experts) for key in tables}
    return Plan(tables, Fingerprint(structure, Routers("c" * 64)), "tiny", thresholds=thresholds)


def found(answer: Answer) -> tuple[float, str | None]:
    """τ, and what is said of it."""
    return answer.threshold, answer.notice


def edited(
    plan: Plan, path: Path, meta: Callable[[dict[str, Any]], object], tensors: dict[str, Tensor] | None = None
) -> Path:
    """The plan's file after `meta` changed its metadata, with further tensors, under a checksum that is right."""
    with safe_open(plan.save(path), "pt") as file:
        kept = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        ace = json.loads(file.metadata()["ace"])
    meta(ace)
    path.write_bytes(seal(save({**kept, **(tensors or {})}, metadata={"ace": json.dumps(ace)})))
    return path


def put(*path: str | int, value: Any) -> Callable[[Any], None]:
    """A change of metadata: this value at this place."""

    def change(meta: Any) -> None:
        for step in path[:-1]:
            meta = meta[step]
        meta[path[-1]] = value

    return change
