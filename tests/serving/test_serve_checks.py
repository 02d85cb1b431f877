"""What is wrong is said before an engine starts: by `ace serve`, or by vLLM's front end for a configuration of one's own."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ace_moe.cli import serving
from ace_moe.demo import MODEL
from ace_moe.engines.vllm import register
from ace_moe.engines.vllm.preflight import check
from ace_moe.errors import AceError
from ace_moe.plan import Plan

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no object": ({"ace": 5}, "must be an object"),
    "no plan": ({"ace": {"plan": "/no/where.safetensors"}}, "There is no plan at"),
    "unknown policy": ({"ace": {"policy": "nonsense"}}, "nonsense"),
    "unknown setting": ({"ace": {"colour": "red"}}, "colour"),
    "policy of batches": ({"ace": {"policy": "xshare"}}, "cannot be served"),
    "budget": ({"ace": {"plan": "PLAN", "skip": 0.5}}, "no threshold"),
    "kernels": ({"ace": {"plan": "PLAN", "kernels": "²"}}, "kernels"),
}


@pytest.fixture
def plan(demo_plan: Plan, tmp_path: Path) -> Path:
    return demo_plan.save(tmp_path / "plan.safetensors")


def given(additional: dict[str, Any], plan: Path) -> dict[str, Any]:
    ace = additional["ace"]
    return {"ace": {k: str(plan) if v == "PLAN" else v for k, v in ace.items()} if isinstance(ace, dict) else ace}


@pytest.mark.parametrize(("additional", "said"), WRONG.values(), ids=WRONG)
def test_configuration_that_means_nothing(additional: dict[str, Any], said: str, plan: Path) -> None:
    with pytest.raises(AceError, match=said):
        check(given(additional, plan))


def test_configurations_that_are_none_of_ours(plan: Path) -> None:
    for additional in (None, {}, {"other": 1}, {"ace": "(configured)"}, {"ace": {"plan": str(plan)}}, {"ace": {}}):
        check(additional)


@pytest.mark.vllm
def test_vllms_front_end_says_it(plan: Path) -> None:
    """In the process that was started, before there is an engine."""
    from vllm.engine.arg_utils import EngineArgs

    register()
    register()
    for additional, said in WRONG.values():
        with pytest.raises(AceError, match=said):
            EngineArgs(model=str(MODEL), additional_config=given(additional, plan)).create_engine_config()


@pytest.mark.vllm
def test_a_vllm_that_cannot_be_hooked_runs_on_unless_it_is_asked_to_skip(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later release may have renamed what we hook: who installed us and does not use us must not notice."""
    from vllm.engine.arg_utils import EngineArgs

    stock = inspect.unwrap(EngineArgs.create_engine_config)
    monkeypatch.setattr(EngineArgs, "create_engine_config", stock)
    monkeypatch.setattr("ace_moe.engines.vllm.controller.listen", lambda: EngineArgs.no_such_method)
    register()
    assert EngineArgs(model=str(MODEL)).create_engine_config().model_config.model == str(MODEL)
    with pytest.raises(AceError, match=r"does not know this vLLM \(0\..*no_such_method.*tried with 0\.32"):
        EngineArgs(model=str(MODEL), additional_config=given({"ace": {"plan": "PLAN"}}, plan)).create_engine_config()


@pytest.mark.vllm
def test_a_build_under_another_name_has_vllms_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    """With every flag of its front end; the module that was used before ignored --headless."""
    command = serving.server("MODEL")
    assert command[-2:] == ["serve", "MODEL"]
    import subprocess

    shown = subprocess.run([*command[:-1], "--help=headless"], capture_output=True, text=True, timeout=300, check=False)
    assert shown.returncode == 0 and "--headless" in shown.stdout, shown.stderr


def test_a_head_that_is_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every token would be as likely as any other, without an error anywhere."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    serving.warn_of_head(str(folder))
    assert capsys.readouterr().err == ""
    for path in folder.glob("*.safetensors"):
        tensors = {name: t.clone() for name, t in load_file(path).items() if "lm_head" not in name}
        save_file(tensors, path, metadata={"format": "pt"})
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    serving.warn_of_head(str(folder))
    assert "no tensor for lm_head.weight" in " ".join(capsys.readouterr().err.split())


def test_thresholds_that_move_need_none_in_the_plan(plan: Path) -> None:
    """Said before workers start as it is after: a budget without a threshold is one only where τ stays."""
    with pytest.raises(AceError, match="no threshold"):
        check({"ace": {"plan": str(plan), "skip": 0.5, "policy": "share"}})
    check({"ace": {"plan": str(plan), "skip": 0.5, "policy": "share", "track": True}})
    with pytest.raises(AceError, match="no threshold"):
        check({"ace": {"plan": str(plan), "policy": "share", "skip_max": 0.5, "target_tpot": 20}})
