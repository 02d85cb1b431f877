"""The kept inputs that mutations start from: one good of each kind, and what once went wrong is kept beside them by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from targets import checkpoint  # noqa: E402

from ace_moe import build_plan  # noqa: E402
from ace_moe.plan import Threshold, Workload  # noqa: E402
from ace_moe.plan.lookup import Curve, shaping  # noqa: E402
from ace_moe.policies import Ace, Share  # noqa: E402
from ace_moe.tables import PAPER  # noqa: E402


def put(target: str, name: str, data: bytes) -> None:
    folder = HERE / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def main() -> None:
    model = checkpoint()
    plain = build_plan(model, PAPER)
    rest = {"realised": 0.5, "corrected": True, "passes": 1, "workload": Workload("text.txt", "0" * 64, 64)}
    mapped = plain.with_thresholds(
        [Threshold(**Ace().settings, budget=b, threshold=b / 2, **rest) for b in (0.25, 0.5)]
    )  # type: ignore[arg-type]
    more = {key: {"factor_a": torch.ones(1), "own": torch.rand(4, 2)} for key in plain.tables}
    full = mapped.with_tables(more, {"params": {}}, shapes={"own": ["experts", "top_k"]}, guarded={"factor_a": ["0"]})
    curve = Curve(
        shaping(Share().settings), Workload("text.txt", "0" * 64, 64), torch.tensor([[0, 0.1, 0.5], [0, 0.4, 0.8]])
    )
    settings = {"settings": Share().settings, "factor": None}
    curved = replace(mapped.with_curve(curve), recommendation=settings, made=({"command": "ace plan"},))
    for name, plan in (
        ("bare", build_plan(model)),
        ("plain", plain),
        ("mapped", mapped),
        ("full", full),
        ("curved", curved),
    ):
        put("plan", name, plan.to_bytes())
    put("header", "whole", (model / "model.safetensors").read_bytes())
    put("config", "qwen3_moe", (model / "config.json").read_bytes())
    for name, text in (
        ("skip", '{"skip": 0.4}'),
        ("phases", '{"skip": {"prefill": 0.5, "decode": 0.3}, "reset": true}'),
        ("tau", '{"threshold": [0.1, 0.2]}'),
    ):
        put("body", name, text.encode())
    for name, text in (
        ("budgets", "0.1:0.6:0.1"),
        ("list", "0.1,0.3"),
        ("method", "share,ace:fusion=min"),
        ("json", '{"a": 1}'),
        ("word", "auto"),
        ("flag", "--enable_lora=1 --x"),
    ):
        put("values", name, text.encode())
    put("results", "compare", json.dumps(compared(), separators=(",", ":")).encode())


def compared() -> dict[str, object]:
    """As `ace compare` writes it, with made-up numbers."""
    bounds = {"value": 0.1, "low": 0.05, "high": 0.2}
    measured = {"perplexity": 9.0, "interval": [8.0, 10.0], "nll": [2.0, 2.1], "targets": 126}
    cell = {
        **measured,
        "gain": "kept",
        "budget": 0.5,
        "change": {**bounds, "p": 0.5},
        "realised": 0.5,
        "layers": {"0": 0.5},
        "threshold": 0.1,
    }
    cell |= {
        "kl": bounds,
        "agreement": bounds,
        "acceptance": bounds,
        "kl_by_window": [0.1, 0.2],
        "experts": {"0": [0.5, 0.5]},
    }
    versions = {"ace_moe": "1", "torch": "1", "transformers": "1", "device": "cpu"}
    facts = {"model": {"name": "m", "architecture": "M"}, "environment": versions, "command": "ace compare"}
    grid = {"methods": ["ace", "share"], "budgets": [0.5], "gains": ["kept"]}
    return {
        **{"schema": 1, "kind": "compare", "identity": {}, **facts, "grid": grid, "references": [], "refused": {}},
        **{
            "workload": {"name": "t", "windows": 2, "window": 64},
            "dense": measured,
            "tables": {"0": {"gsp": [1.0, 1.0]}},
        },
        "cells": [{**cell, "method": method} for method in ("ace", "share")],
    }


if __name__ == "__main__":
    main()
