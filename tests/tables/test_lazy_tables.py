"""Tables are made when they are asked for; without them a plan costs router rows and a few rows of a few experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from ace_moe import ACE, build_plan
from ace_moe.checkpoint import MoEModel, shards
from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import OptionError
from ace_moe.tables import PAPER
from ace_moe.tables.build import add_tables

Reads = dict[str, int]


class Counting:
    """A shard that counts the numbers that are read of each tensor."""

    def __init__(self, handle: Any, reads: Reads):
        self.handle, self.reads = handle, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *error: object) -> None:
        self.handle.__exit__(*error)

    def count(self, key: str, values: Tensor) -> Tensor:
        self.reads[key] = self.reads.get(key, 0) + values.numel()
        return values

    def get_tensor(self, key: str) -> Tensor:
        return self.count(key, self.handle.get_tensor(key))

    def get_slice(self, key: str) -> Any:
        part, count = self.handle.get_slice(key), self.count

        class Part:
            get_dtype, get_shape = part.get_dtype, part.get_shape

            def __getitem__(self, index: Any) -> Tensor:
                return count(key, part[index])

        return Part()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """By tensor, the numbers read from checkpoints."""
    found: Reads = {}
    opened = shards.safe_open
    monkeypatch.setattr(shards, "safe_open", lambda *how: Counting(opened(*how), found))
    return found


@pytest.fixture(scope="module", params=["experts apart", "experts stacked"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 128 × 64, of which a sample takes 8 rows of 2 in each matrix."""
    path = tmp_path_factory.mktemp("model")
    name = {"experts apart": "qwen3_moe", "experts stacked": "gpt_oss"}[request.param]
    zoo.build(name, moe_intermediate_size=128, intermediate_size=128).save_pretrained(path)
    return path


def test_a_plan_without_tables_reads_routers_and_samples(folder: Path, reads: Reads) -> None:
    plan = build_plan(folder)
    moe = MoEModel.open(folder)
    assert plan.tables == {site.key: {} for site in moe.sites} and not plan.undefined
    experts = {key: count for key, count in reads.items() if ".experts." in key}
    total = sum(p.numel() for site in moe.sites for p in site.experts.parameters())
    assert 0 < sum(experts.values()) <= 8 * 2 * 2 * 256 * len(moe.sites) < total / 10
    rest = set(reads) - set(experts)
    assert rest and all(".router." in key or ".gate." in key for key in rest), "no norm, no attention, no embedding"
    routers = sum(p.numel() for site in moe.sites for p in site.router.parameters())
    assert sum(reads[key] for key in rest) == routers


def test_tables_read_every_expert_once(folder: Path, reads: Reads) -> None:
    bare = build_plan(folder)
    reads.clear()
    plan = build_plan(folder, PAPER)
    total = sum(p.numel() for site in MoEModel.open(folder).sites for n, p in site.experts.named_parameters())
    sampled = 8 * 2 * 2 * 256 * len(plan.layers)
    assert total <= sum(count for key, count in reads.items() if ".experts." in key) <= total + sampled
    assert add_tables(bare, PAPER, folder) == plan


def test_only_what_is_asked_for_is_made() -> None:
    plan = build_plan(MODEL, ["rcr"])
    assert {name for layer in plan.tables.values() for name in layer} == {"rcr"}
    more = add_tables(plan, ["gsp", "rcr"], MODEL)
    assert more == build_plan(MODEL, PAPER) and add_tables(more, ["gsp"], MODEL) is more
    with pytest.raises(OptionError, match=r"no table 'gps'. From weights alone come: gsp, rcr"):
        build_plan(MODEL, ["gps"])


def test_the_default_policy_makes_none(demo_model: Any) -> None:
    """From the wish to a mapped budget."""
    ace = ACE.from_pretrained(demo_model, skip=0.3, text=TEXT, tokens=1024)
    with ace(demo_model):
        assert ace.plan.thresholds and not any(ace.plan.tables.values())
        assert torch.is_tensor(ace.thresholds) and ace.thresholds[1] > 0


def test_a_policy_that_reads_tables_gets_them(demo_model: Any) -> None:
    with ACE(build_plan(MODEL), policy="ace")(demo_model) as ace:
        assert not ace.plan.lacks(PAPER)
