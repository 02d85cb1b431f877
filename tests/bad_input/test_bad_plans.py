"""A plan file with wrong tensors or wrong metadata, or that is no plan at all, is refused by the loader and by the commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input_cases import EXPERTS, Refuse, Tensors, rewrite, run_arguments
from safetensors.torch import save_file
from torch import Tensor

from ace_moe import Plan
from ace_moe.errors import PlanError


def refuse_plan(path: Path, model: Path, refuse: Refuse, *says: str) -> None:
    """By the loader with our type, and by the commands that read a plan."""
    with pytest.raises(PlanError):
        Plan.load(path)
    refuse("inspect", path, says=(path.name, *says))
    refuse(*run_arguments(model, path), says=(path.name, *says))


def put(name: str, values: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: values})


def fill(value: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors["layers.1.rcr"][3:4].fill_(value)


BAD_TENSORS = {
    "NaN": (fill(float("nan")), "layers.1.rcr has NaN, infinite or negative"),
    "infinite": (fill(float("inf")), "layers.1.rcr has NaN, infinite or negative"),
    "negative": (fill(-0.5), "layers.1.rcr has NaN, infinite or negative"),
    "short": (put("layers.1.rcr", torch.ones(EXPERTS - 1)), "float32 [7], not float32 [8]"),
    "matrix": (put("layers.1.rcr", torch.ones(EXPERTS, 1)), "float32 [8, 1], not float32 [8]"),
    "float64": (put("layers.1.rcr", torch.ones(EXPERTS).double()), "float64 [8], not float32 [8]"),
    "integers": (put("layers.1.rcr", torch.ones(EXPERTS).long()), "int64 [8], not float32 [8]"),
    "duplicate layer": (put("layers.00.gsp", torch.ones(EXPERTS)), "layer 0 has two tables gsp"),
    "missing layer": (lambda t: [t.pop(n) for n in ("layers.1.gsp", "layers.1.rcr")], "missing: 1; foreign: none"),
    "missing table": (lambda t: t.pop("layers.1.gsp"), "missing: 1; foreign: none"),
    "foreign layer": (put("layers.7.gsp", torch.ones(EXPERTS)), "missing: none; foreign: 7"),
    "foreign tensor": (put("lm_head.weight", torch.ones(3)), "'lm_head.weight' is not `layers.<n>.<table>`"),
    "no layer name": (put("layers..gsp", torch.ones(3)), "is not `layers.<n>.<table>`"),
    "half the tensors": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith("layers.0")],
        "missing: 0; foreign: none",
    ),
}


@pytest.mark.parametrize(("change", "said"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_plan_with_bad_tensors(
    change: Callable[[Tensors], object], said: str, plan: Path, originals: Path, refuse: Refuse
) -> None:
    rewrite(plan, tensors=change)
    refuse_plan(plan, originals / "single", refuse, said, "ace plan")


def at(*path: str | int, value: Any) -> Callable[[Any], None]:
    """Put a value somewhere into the metadata."""

    def change(meta: Any) -> None:
        for step in path[:-1]:
            meta = meta[step]
        meta[path[-1]] = value

    return change


ENTRY, LAYER = ("thresholds", 0), ("fingerprint", "structure", "1")
BAD_METADATA = {
    "another schema": (at("schema", value=99), "schema 99, this release reads 1, 2, 3"),
    "no schema": (lambda m: m.pop("schema"), "schema None"),
    "threshold NaN": (at(*ENTRY, "threshold", value=float("nan")), "threshold is nan, not a number"),
    "threshold negative": (at(*ENTRY, "threshold", value=-0.1), "threshold is -0.1, not a number from 0 to 2"),
    "threshold text": (at(*ENTRY, "threshold", value="0.1"), "threshold"),
    "budget infinite": (at(*ENTRY, "budget", value=float("inf")), "budget is inf, not a number"),
    "budget above 1": (at(*ENTRY, "budget", value=1.5), "budget is 1.5, not a number from 0 to 1"),
    "threshold above any contribution": (at(*ENTRY, "threshold", value=3.4e38), "not a number from 0 to 2"),
    "threshold too large for a float": (at(*ENTRY, "threshold", value=10**400), "threshold is 1"),
    "params no object": (at(*ENTRY, "params", value=["max"]), "params"),
    "unknown field": (at(*ENTRY, "colour", value="red"), "colour"),
    "workload missing": (lambda m: m["thresholds"][0].pop("workload"), "workload"),
    "workload without name": (at(*ENTRY, "workload", "name", value=None), "workload"),
    "thresholds no list": (at("thresholds", value=5), "damaged"),
    "no fingerprint": (lambda m: m.pop("fingerprint"), "fingerprint"),
    "no routers": (lambda m: m["fingerprint"].pop("routers"), "routers"),
    "no top_k": (lambda m: m["fingerprint"]["structure"]["1"].pop("top_k"), "top_k"),
    "top_k text": (at(*LAYER, "top_k", value="four"), "top_k"),
    "top_k zero": (at(*LAYER, "top_k", value=0), "0 slots"),
    "top_k above experts": (at(*LAYER, "top_k", value=99), "99 slots for 8 experts"),
    "no layers": (at("fingerprint", "structure", value={}), "no layers"),
    "undefined no object": (at("undefined", value=["gsp"]), "damaged"),
    "model no text": (at("model", value=5), "model"),
    "other_weights no list": (at("other_weights", value="abc"), "other_weights"),
}


@pytest.mark.parametrize(("change", "said"), BAD_METADATA.values(), ids=BAD_METADATA)
def test_plan_with_bad_metadata(
    change: Callable[[Any], object], said: str, plan: Path, originals: Path, refuse: Refuse
) -> None:
    rewrite(plan, meta=change)
    refuse_plan(plan, originals / "single", refuse, said, "build it again with `ace plan MODEL -o FILE`")


@pytest.mark.parametrize("meta", ["", "{", "[]", "null", "5", '"ace"', "[" * 100_000], ids=lambda m: m[:6] or "empty")
def test_plan_whose_metadata_is_no_object(meta: str, plan: Path, originals: Path, refuse: Refuse) -> None:
    save_file({"layers.0.gsp": torch.ones(EXPERTS)}, plan, metadata={"ace": meta})
    refuse_plan(plan, originals / "single", refuse, "metadata is damaged", "ace plan")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_safetensors_that_is_no_plan(
    metadata: dict[str, str] | None, plan: Path, originals: Path, refuse: Refuse
) -> None:
    save_file({"weight": torch.ones(3)}, plan, metadata=metadata)
    refuse_plan(plan, originals / "single", refuse, "not a plan", "ace plan")


def test_a_checkpoint_given_as_plan(originals: Path, refuse: Refuse) -> None:
    """MODEL and PLAN swapped, or the wrong .safetensors completed by the shell."""
    path = originals / "single" / "model.safetensors"
    refuse(*run_arguments(originals / "single", path), says=("not a plan", "ace plan MODEL -o FILE"))


@pytest.mark.parametrize("name", ["missing.safetensors", "nowhere/plan.safetensors", "~nobody-here/p.safetensors"])
def test_plan_that_is_not_there(name: str, tmp_path: Path, originals: Path, refuse: Refuse) -> None:
    """Not looked up on the hub, though `nowhere/plan.safetensors` reads like owner/name."""
    model = originals / "single"
    for arguments in (
        ("inspect", name),
        run_arguments(model, Path(name)),
        run_arguments(model, tmp_path),
    ):
        refuse(*arguments, says=("There is no plan at", "ace plan MODEL -o"))
