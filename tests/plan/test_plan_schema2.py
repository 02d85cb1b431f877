"""What schemas 2 and 3 have beside schema 1: layer factors, guarded layers, tables of other shapes, recommendations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import SETTINGS, edited, entry, plan_of, put
from torch import Tensor

from ace_moe.errors import PlanError
from ace_moe.plan import Plan
from ace_moe.policies import policy_for

E, D, LEVELS = 8, 16, 7  # of `plan_of`: two layers of 8 experts and 4 slots, width 16


def of_layers(name: str, *values: Tensor) -> dict[str, Tensor]:
    return {f"layers.{key}.{name}": value.clone() for key, value in enumerate(values)}


def factors(*values: float) -> dict[str, Tensor]:
    return of_layers("factor_branch", *map(torch.tensor, values))


# ---- what is taken ----------------------------------------------------------------------------------------------


def test_everything_comes_back(tmp_path: Path) -> None:
    scaled = entry(0.5, 0.1, phase="verify", of={**SETTINGS, "factor": "factor_branch"})
    mean = {str(n): {"mean_output": torch.randn(E, D)} for n in range(2)}
    plan = plan_of(scaled).with_tables({"0": {"factor_branch": torch.tensor(1.0)}, "1": {"factor_branch": torch.tensor(0.3)}},
                                       guarded={"factor_branch": ["0"]})  # fmt: skip
    plan = plan.with_tables(mean, shapes={"mean_output": ["experts", "hidden"]})
    plan = replace(plan, recommendation={"settings": {"policy": "share"}, "budgets": [0.5], "evidence": {"p": 0.01}})
    loaded = Plan.load(plan.save(tmp_path / "p.safetensors"))
    assert loaded == plan
    assert loaded.guarded == {"factor_branch": ("0",)}
    assert loaded.shapes == {"mean_output": ("experts", "hidden")}
    assert loaded.thresholds[0].phase == "verify"
    assert loaded.recommendation["settings"] == {"policy": "share"}  # type: ignore[index]
    assert (loaded.tables["0"]["mean_output"] < 0).any()


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        (["experts", "hidden"], (E, D)),
        (["experts", "top_k", "one"], (E, 4, 1)),
        (["intermediate"], (8,)),
        (["levels", "hidden"], (LEVELS, D)),
    ],
)
def test_declared_shapes(dims: list[str], shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = of_layers("mean_output", -torch.ones(shape), torch.ones(shape))
    path = edited(plan_of(), tmp_path / "p.safetensors", put("shapes", value={"mean_output": dims}), tensors)
    assert Plan.load(path).tables["0"]["mean_output"].shape == shape


def test_a_plan_with_settings_that_no_policy_has_still_loads(tmp_path: Path) -> None:
    """Older plans have repairs of skipped sums: their tables and thresholds stay, and asking for them says what to do."""
    repaired = {**SETTINGS, "params": {**SETTINGS["params"], "compensate": "aligned"}}
    plan = plan_of(entry(0.5, 0.1), entry(0.5, 0.2, of=repaired)).with_tables(
        {str(n): {"aligned_shift_0": torch.randn(D)} for n in range(2)}, shapes={"aligned_shift_0": ["hidden"]}
    )
    plan = replace(plan, recommendation={"settings": repaired})
    loaded = Plan.load(plan.save(tmp_path / "p.safetensors"))
    assert loaded == plan and len(loaded.thresholds) == 2
    assert loaded.lookup(policy_for(loaded, "ace").settings, 0.5).threshold == pytest.approx(0.1)
    with pytest.raises(PlanError, match=r"has no setting compensate.*Name the policy you want"):
        policy_for(loaded)
    told = replace(loaded, recommendation={"settings": repaired, "served": SETTINGS})
    assert policy_for(told).settings == SETTINGS


# ---- what is refused --------------------------------------------------------------------------------------------

ENTRY = ("thresholds", 0)
BAD_METADATA = {
    "phase": (put(*ENTRY, "phase", value="warmup"), "phase is 'warmup', not one of both, prefill, decode, verify"),
    "gain no text": (put(*ENTRY, "gain", value=2), "gain is 2, not a text"),
    "min_active": (put(*ENTRY, "min_active", value=-1), "min_active is -1, not a whole number from 0 on"),
    "params": (put(*ENTRY, "params", value="max"), "params is 'max', not an object"),
    "factor no text": (put(*ENTRY, "factor", value=1), "factor is 1, not a text"),
    "factor of no table": (put(*ENTRY, "factor", value="factor_x"), "a threshold names the factor table 'factor_x'"),
    "factor of another table": (put(*ENTRY, "factor", value="gsp"), "names the factor table 'gsp'.*it has none"),
    "unknown setting": (put(*ENTRY, "temperature", value=1), "has 'temperature'"),
    "unknown key": (put("colour", value="red"), "metadata has 'colour', which is not one of"),
    "unknown fact of a layer": (put("fingerprint", "structure", "0", "colour", value=1), "has 'colour'"),
    "unknown fact of the model": (put("fingerprint", "tokenizer", value="x"), "fingerprint has 'tokenizer'"),
    "guarded of no table": (put("guarded", value={"factor_x": ["0"]}), "`guarded` names the factor table 'factor_x'"),
    "guarded layer": (put("guarded", value={"factor_x": ["7"]}), "names layer '7', which the model does not have"),
    "guarded no list": (put("guarded", value={"factor_x": "01"}), "factor_x' is '01', not a list"),
    "guarded no text": (put("guarded", value={"factor_x": [0]}), "is 0, not a text"),
    "guarded no object": (put("guarded", value=["0"]), "guarded is .*not an object"),
    "shapes no object": (put("shapes", value=["experts"]), "shapes is .*not an object"),
    "shapes of unknown size": (put("shapes", value={"mean": ["experts", "vocabulary"]}), "shapes: 'mean'"),
    "shapes of no size": (put("shapes", value={"mean": []}), "shapes: 'mean'"),
    "shapes of many sizes": (put("shapes", value={"mean": ["one"] * 4}), "shapes: 'mean'"),
    "shapes of a core table": (put("shapes", value={"gsp": ["hidden"]}), "gsp has a shape of its own"),
    "shapes of a factor": (put("shapes", value={"factor_x": ["experts"]}), "factor_x has a shape of its own"),
    "recommendation text": (put("recommendation", value="share"), "recommendation is 'share', not an object"),
    "recommendation without settings": (put("recommendation", value={"budgets": []}), "recommendation has no settings"),
    "other_weights": (put("other_weights", value=[5]), "other_weights.0. is 5, not a text"),
    "no exact": (put("fingerprint", "routers", value={"coarse": None}), "exact"),
    "coarse no text": (put("fingerprint", "routers", "coarse", value=5), "coarse is 5, not a text"),
    "experts of another layer": (put("fingerprint", "experts", value={"9": {"rms": [1], "sample": ""}}), "of layer 9"),
    "rms NaN": (put("fingerprint", "experts", value={"0": {"rms": [float("nan")], "sample": ""}}), "rms.0. is nan, not a number"),
    "rms negative": (put("fingerprint", "experts", value={"0": {"rms": [-1], "sample": ""}}), "rms.0. is -1, not a number"),
    "rms text": (put("fingerprint", "experts", value={"0": {"rms": ["1"], "sample": ""}}), "rms.0. is '1', not a number"),
    "no sample": (put("fingerprint", "experts", value={"0": {"rms": [1]}}), "sample"),
    "content of schema 1": (put("fingerprint", value={"structure": {"0": {}}, "content": "c"}), "routers"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), BAD_METADATA.values(), ids=BAD_METADATA)
def test_bad_metadata(change: Callable[[Any], None], said: str, tmp_path: Path) -> None:
    path = edited(plan_of(entry(0.5, 0.2)), tmp_path / "p.safetensors", change)
    with pytest.raises(PlanError, match=rf"p\.safetensors: .*{said}.*build it again with `ace plan MODEL -o FILE`\.$"):
        Plan.load(path)


MEAN = {"mean_output": ["experts", "hidden"]}
BAD_TABLES: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "factor of experts": ({}, of_layers("factor_branch", torch.ones(E), torch.ones(E)), "not float32 with one value"),
    "factor zero": ({}, factors(1.0, 0.0), "factor_branch goes from 0 to 1"),
    "factor negative": ({}, factors(1.0, -0.5), "layers.1.factor_branch has NaN, infinite or negative"),
    "factor above one": ({}, factors(0.5, 2.0), "goes from 0.5 to 2; factors are above 0 and the largest of all"),
    "factor under one": ({}, factors(0.5, 0.25), "the largest of all layers is 1"),
    "factor of one layer": ({}, {"layers.0.factor_branch": torch.tensor(1.0)}, "missing: 1; foreign: none"),
    "factor in half precision": ({}, of_layers("factor_branch", *[torch.ones(()).half()] * 2), "float16"),
    "mean not declared": ({}, of_layers("mean_output", *[torch.ones(E, D)] * 2), r"\[8, 16\].*declared in `shapes`"),
    "mean too wide": (MEAN, of_layers("mean_output", *[torch.ones(E, D + 1)] * 2), r"\[8, 17\], not float32 \[8, 16\]"),
    "mean turned": (MEAN, of_layers("mean_output", *[torch.ones(D, E)] * 2), r"\(experts, hidden\)"),
    "mean NaN": (MEAN, of_layers("mean_output", *[torch.full((E, D), float("nan"))] * 2), "NaN or infinite values"),
    "negative, not declared": ({}, of_layers("aimer", *[-torch.ones(E)] * 2), "NaN, infinite or negative"),
    "five dimensions": ({}, of_layers("aimer", *[torch.ones(4, 4, 4, 4, 4)] * 2), "one for each expert"),
}  # fmt: skip


@pytest.mark.parametrize(("shapes", "tensors", "said"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_bad_tables(shapes: dict[str, Any], tensors: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    path = edited(plan_of(), tmp_path / "p.safetensors", put("shapes", value=shapes), tensors)
    with pytest.raises(PlanError, match=said):
        Plan.load(path)


def test_bad_factors_are_refused_when_they_are_made() -> None:
    """Not when the file is opened next."""
    with pytest.raises(PlanError, match=r"goes from 2 to 3.*Divide them by their largest"):
        plan_of().with_tables({str(n): {"factor_x": torch.tensor(2.0 + n)} for n in range(2)})
