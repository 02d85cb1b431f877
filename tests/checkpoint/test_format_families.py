"""Formats × families: tables of a quantised checkpoint are those of a plain one with the numbers its codes mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from format_cases import CASES, encode
from layouts import OTHERS
from quantised import FAMILIES, quantise, small, write
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations import moe

import zoo
from ace_moe import ACE, build_plan
from ace_moe.checkpoint import MoEModel
from ace_moe.checkpoint.loading import load_model
from ace_moe.errors import StructureError
from ace_moe.tables import PAPER

TABLES = 1e-5  # relative


def assert_same_tables(found: Path, wanted: Path) -> None:
    mine, theirs = build_plan(found, PAPER), build_plan(wanted, PAPER)
    assert mine.tables.keys() == theirs.tables.keys()
    for key, layer in theirs.tables.items():
        for name, values in layer.items():
            torch.testing.assert_close(mine.tables[key][name], values, rtol=TABLES, atol=0, msg=f"{key} {name}")
    assert mine.fingerprint.same_routers(theirs.fingerprint), "one plan serves both"


def pairs(families: int) -> list[tuple[str, str]]:
    """Each case with that many families, in turn."""
    return [(case, FAMILIES[(i + j) % len(FAMILIES)]) for i, case in enumerate(CASES) for j in range(families)]


@pytest.mark.parametrize(("case", "family"), pairs(1)[::8])
def test_tables(case: str, family: str, tmp_path: Path) -> None:
    assert_same_tables(*quantise(tmp_path, family, lambda key, number: case))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "family"), pairs(3))
def test_tables_of_three_families(case: str, family: str, tmp_path: Path, tried: Callable[..., None]) -> None:
    tried(family, "tables", stored=case)
    assert_same_tables(*quantise(tmp_path, family, lambda key, number: case))


MIXED = (
    "fp8 channel",
    "plain",
    "nvfp4 of ModelOpt",
    "int4",
    "mxfp4",
    "awq",
    "bitsandbytes nf4 nested",
    "int8",
    "fp8 tensor",
)


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_each_matrix_in_a_format_of_its_own(family: str, tmp_path: Path) -> None:
    folders = quantise(tmp_path, family, lambda key, number: MIXED[number % len(MIXED)], config={})
    assert_same_tables(*folders)
    found = {name for names in MoEModel.open(folders[0]).formats().values() for name in names}
    assert len(found) == len(MIXED)


# ---- real layouts: names, fusion and format as published ----------------------------------------------------------------

PUBLISHED = {  # family → the format its makers or the usual quantisers publish it in
    "deepseek_v3": "fp8 block",
    "deepseek_v32": "fp8 block",
    "deepseek_v4": "fp4 of DeepSeek-V4",
    "glm4_moe": "fp8 channel",
    "glm4_moe_lite": "fp8 channel",
    "minimax_m2": "fp8 block",
    "mixtral": "awq",
    "olmoe": "gptq",
    "qwen3_moe": "fp8 block",
    "qwen3_next": "fp8 block",
    "ernie4_5_moe": "int4",
    "hunyuan_v1_moe": "fp8 tensor",
}


QUICK = ("deepseek_v3", "deepseek_v4", "glm4_moe", "qwen3_next")


@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in PUBLISHED])
def test_published_layouts_from_tables_to_a_running_model(
    family: str, tmp_path: Path, tried: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not zoo.has(family):
        pytest.skip("not in this release of transformers")
    tried(family, "tables", stored=PUBLISHED[family])
    tried(family, "transformers", "prefill", stored=PUBLISHED[family])
    packed, plain = quantise(tmp_path, family, lambda key, number: PUBLISHED[family])
    assert_same_tables(packed, plain)
    assert_runs_as_in_float64(packed, plain, monkeypatch)


def by_expert(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """The grouped product in plain words: rows up to an expert's offset are its own, [n, k] × [E, k, m]."""
    out, start = input.new_zeros(len(input), weight.shape[-1]), 0
    for own, end in zip(weight, offs.tolist(), strict=True):
        out[start:end], start = input[start:end] @ own, end
    return out


def assert_runs_as_in_float64(packed: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The expanded model with the quantised checkpoint's plan, against what its codes mean in float64, under one rule."""
    plan, outputs, kept = build_plan(packed, PAPER), [], []
    for model in (load_model(packed, "cpu", expand=True), load_model(plain, "cpu").double()):
        if model.dtype == torch.float64:
            monkeypatch.setattr(moe, "_grouped_mm", by_expert)  # the stock one takes no float64
        ace = ACE(plan, dispatch="torch")
        ace.set_threshold(0.6)
        with ace(model), torch.no_grad():
            outputs.append(model(torch.arange(5, 17)[None], use_cache=False).logits.double())
        kept.append(ace.report()["prefill"]["kept"])
        assert 0 < ace.realised < 1
    assert kept[0] == kept[1]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-3, atol=1e-3 * float(outputs[1].std()))


def test_the_page_lists_what_is_checked() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    assert dict(re.findall(r"^\| (\w+) \| ([^|]+) \|$", page.rpartition("| family |")[2], flags=re.M)) == PUBLISHED


@pytest.mark.parametrize("published", OTHERS)
def test_other_layouts_from_tables_to_a_running_model(
    published: str, tmp_path: Path, tried: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, stored, make = OTHERS[published]
    if not zoo.has(family):
        pytest.skip("not in this release of transformers")
    tried(family, "tables", stored=stored)
    tried(family, "transformers", "prefill", stored=stored)
    packed, plain = make(tmp_path)
    assert_same_tables(packed, plain)
    assert_runs_as_in_float64(packed, plain, monkeypatch)


def test_llama4_is_refused_with_its_reason(tmp_path: Path) -> None:
    zoo.build("llama4").save_pretrained(tmp_path)
    with pytest.raises(StructureError, match=r"no routed experts|registry"):
        build_plan(tmp_path, PAPER)


def test_quantised_router_rows_are_decoded(tmp_path: Path) -> None:
    model = small("qwen3_moe")
    model.save_pretrained(tmp_path / "original")
    tensors = load_file(tmp_path / "original" / "model.safetensors")
    config = json.loads((tmp_path / "original" / "config.json").read_text())
    packed, plain = dict(tensors), dict(tensors)
    for number, key in enumerate(k for k in tensors if k.endswith("mlp.gate.weight")):
        made, meant = encode("int8", *tensors[key].shape, seed=number)
        packed |= {key.removesuffix("weight") + part: t for part, t in made.items()}
        plain[key] = torch.from_numpy(meant).float()
    assert_same_tables(write(tmp_path / "a", packed, config), write(tmp_path / "b", plain, config))
