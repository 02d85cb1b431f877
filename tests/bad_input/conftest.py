"""Good models, a good plan and a good text, for a test to damage; and `refuse`, which most of the tests are made of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bad_input_cases import Refuse, paragraph, save_moe, save_tokenizer, snapshot, tiny_config
from transformers import LlamaConfig, LlamaForCausalLM

from ace_moe import Plan, build_plan
from ace_moe.plan import Threshold, Workload
from ace_moe.policies import Ace
from ace_moe.tables import PAPER
from command import run_ace


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`single`: one file, `sharded`: several, `dense`: no MoE, `other`: same shape, other weights."""
    folder = tmp_path_factory.mktemp("models")
    save_moe(folder / "single")
    save_moe(folder / "sharded", shard="8KB")
    save_moe(folder / "other", seed=1)
    LlamaForCausalLM(tiny_config(LlamaConfig)).save_pretrained(folder / "dense")
    save_tokenizer(folder / "dense")
    return folder


@pytest.fixture(scope="session")
def good_plan(originals: Path) -> Plan:
    """The plan of `single` (and `sharded`, which has the same weights) with a threshold for 50 %."""
    rest = {"realised": 0.5, "corrected": True, "passes": 1, "workload": Workload("text.txt", "0" * 64, 64)}
    entry = Threshold(**Ace().settings, budget=0.5, threshold=0.2, **rest)  # type: ignore[arg-type]
    return build_plan(originals / "single", PAPER).with_thresholds([entry])


@pytest.fixture
def single(originals: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(originals / "single", tmp_path / "single")


@pytest.fixture
def sharded(originals: Path, tmp_path: Path) -> Path:
    return shutil.copytree(originals / "sharded", tmp_path / "sharded")


@pytest.fixture
def plan(good_plan: Plan, tmp_path: Path) -> Path:
    return good_plan.save(tmp_path / "plan.safetensors")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("All that is gold does not glitter, not all those who wander are lost. " * 4)
    return path


@pytest.fixture
def refuse(tmp_path: Path) -> Refuse:
    """`refuse("plan", …, "--tables", says=("cause", "advice"))`: the command fails as it should and tmp_path stays as it was."""

    def check(*arguments: object, says: tuple[str, ...]) -> str:
        before = snapshot(tmp_path)
        message = paragraph(run_ace(*arguments))
        assert [word for word in says if word not in message] == [], message
        assert message.endswith((".", "`")), "a paragraph ends as one"
        assert snapshot(tmp_path) == before
        return message

    return check
