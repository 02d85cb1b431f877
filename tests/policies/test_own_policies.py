"""Policies from outside the package: used as they are, under names that no plan mixes up with ours."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import zoo
from ace_moe import ACE
from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import PolicyError
from ace_moe.plan import Plan
from ace_moe.policies import POLICIES, Routing, Share, TokenPolicy, make, registry
from ace_moe.policies.forms import Gsp
from command import run_ace, start_ace

EXAMPLE = Path(__file__).parents[2] / "examples" / "spread.py"
PASS = ("--tokens", 1024, "--window", 256)


class ReachedError(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class MyShare(Share):
    """A built-in with one step changed, as in an experiment for a paper; it keeps the name by accident."""

    def contribution(self, routing: Routing) -> Tensor:
        raise ReachedError


@dataclass(frozen=True, kw_only=True)
class Least(TokenPolicy):
    name: ClassVar[str] = "least"

    def contribution(self, routing: Routing) -> Tensor:
        return routing.gates.float().abs().clamp(max=1)


def test_a_subclass_of_a_built_in_is_really_called(demo_model: PreTrainedModel, demo_plan: Plan) -> None:
    ace = ACE(demo_plan, policy=MyShare())
    assert type(ace.policy) is MyShare
    with ace(demo_model), pytest.raises(ReachedError):
        zoo.run(demo_model)


@pytest.mark.parametrize("step", ["contribution", "protected", "settle", "route"])
@pytest.mark.parametrize("name", [n for n in POLICIES if make(n).kernel_rule() is not None])
def test_any_changed_step_is_reached(name: str, step: str) -> None:
    """Kernels decide in a policy's place only while nothing of the rule was changed."""
    stock = POLICIES[name]

    def changed(self: TokenPolicy, *_: object) -> Tensor:
        raise ReachedError

    other = type("Other", (stock,), {step: changed})()
    assert make(name).kernel_rule() is not None
    assert make(other) is other and other.kernel_rule() is None
    with pytest.raises(ReachedError):
        other.route(
            Routing(
                torch.tensor([[0, 1]]),
                torch.tensor([[0.6, 0.4]]),
                dict.fromkeys(other.needs, torch.ones(2)),
                torch.zeros(()),
            )
        )


def test_settings_are_added_to_an_instance() -> None:
    assert make(Gsp(min_active=2), gain="none") == Gsp(min_active=2, gain="none")
    assert make(Least(), min_active=3).min_active == 3
    with pytest.raises(PolicyError, match=r"has no setting fusion\. It has: gain"):
        make(Least(), fusion="min")


def test_names_in_plans_tell_classes_apart() -> None:
    """A subclass that kept its parent's name is not its parent to a plan."""
    assert Share().settings["policy"] == "share"
    assert MyShare().settings["policy"] == f"{__name__}:MyShare"
    assert Least().settings["policy"] == f"{__name__}:Least"


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package's name; ours cannot be taken over by one."""
    found = [
        EntryPoint("least", f"{__name__}:Least", registry.GROUP),
        EntryPoint("share", f"{__name__}:Least", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in found if e.group == group])
    assert isinstance(make("least", min_active=2), Least)
    assert type(make("share")) is Share


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shar", r"Did you mean 'share'\?"),
        ("no_such_module:Policy", "no_such_module"),
        ("json:dumps", "is no policy"),
        ("spread:Spread:nonsense=1", r"has no setting nonsense\. It has: .*power"),
    ],
)
def test_names_that_are_none(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    with pytest.raises(PolicyError, match=says):
        make(name)


@pytest.mark.long
def test_a_file_of_ones_own_through_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented example, from the folder the user is in: tables, budget, run, compare, report."""
    shutil.copy(EXAMPLE, tmp_path)
    plan, results = tmp_path / "plan.safetensors", tmp_path / "results.json"
    policy = ("--policy", "spread:Spread:power=2")
    assert run_ace("plan", MODEL, "--tables", "-o", plan).code == 0
    made = start_ace(
        "plan", MODEL, "-p", plan, "--text", TEXT, *PASS, "--budgets", "0.4", *policy, "--json", cwd=tmp_path
    )
    assert made.json["thresholds"][0]["realised"] == pytest.approx(0.4, abs=0.005)
    monkeypatch.chdir(tmp_path)
    ran = run_ace(
        "run", MODEL, "-p", plan, "--skip", 0.4, *policy, "--prompt", "The city", "--max-new-tokens", 4, "--json"
    )
    assert 0.1 < ran.json["realised"] < 0.7
    methods = ("--methods", "share,spread:Spread:power=2", "--budgets", "0.4", "--gains", "power")
    assert run_ace("compare", MODEL, *methods, "--text", TEXT, *PASS, "-o", results, "-p", plan).code == 0
    cells = json.loads(results.read_text())["cells"]
    assert [c["method"] for c in cells] == ["share", "spread:Spread:power=2"]
    assert run_ace("report", results, "-o", tmp_path / "report.html").code == 0
    assert "spread:Spread" in (tmp_path / "report.html").read_text()
