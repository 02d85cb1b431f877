"""The Python surface: what an ACE and a plan say of themselves, texts in any form, counters by budget, progress."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ace_moe import ACE, AceError, build_plan
from ace_moe.checkpoint.loading import load_model, load_tokenizer
from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import TextError
from ace_moe.text import Text

IDS = torch.arange(5, 37)[None]


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(MODEL, device="cpu", dtype="float32")


def test_they_say_what_they_are(model: Any) -> None:
    plan = build_plan(MODEL)
    assert repr(plan) == "Plan(demo-moe: 6 layers, tables none, no thresholds on no text)"
    ace = ACE.from_pretrained(MODEL, skip=0.3, policy="share", text=TEXT, tokens=1024)
    assert repr(ace) == "ACE(demo-moe: policy='share', skip=0.3, gain='power', not attached)"
    with ace(model):
        model(IDS)
        assert repr(ace).endswith(f"attached, {ace.realised:.1%} skipped)")
        assert repr(ace.plan).endswith("thresholds for 30% to 30% on wikitext-2-slice.txt)")
        ace.set_threshold(0.05)
        assert "threshold 0.05" in repr(ace)


def test_counters_are_of_one_budget(model: Any) -> None:
    """A change of budget starts new ones: what is realised belongs to what was asked last."""
    ace = ACE(build_plan(MODEL), policy="share")
    with ace(model):
        ace.set_threshold(0.1)
        model(IDS)
        assert ace.realised > 0
        ace.set_skip(0)
        assert ace.report()["prefill"]["routed"] == 0
        model(IDS)
        assert ace.realised == 0 and ace.report()["prefill"]["routed"] == 6 * 8 * IDS.numel()


def test_texts_in_any_form_give_the_same_thresholds(model: Any, tmp_path: Path) -> None:
    """A path, its name, what it says, or a list of documents; from a checkpoint or a loaded model."""
    found, path = TEXT.read_text(encoding="utf-8"), tmp_path / "two.txt"
    parts = [found[:9000], found[9000:20000]]
    content = "\n\n".join(parts)
    path.write_text(content, encoding="utf-8")
    forms: list[Any] = [path, str(path), content, parts]
    assert {Text.of(form).content for form in forms} == {content}
    taus = []
    for source, form in ((MODEL, forms[0]), (model, forms[3])):
        ace = ACE.from_pretrained(source, skip=0.5, policy="share", text=form, tokens=1024)
        with ace(model):
            taus.append(float(ace.thresholds[0]))
    assert taus[0] == taus[1] > 0


@pytest.mark.parametrize("text", ["missing.txt", Path("missing"), "", [], ["", " "], [1]])
def test_bad_texts_are_refused_at_once(text: Any) -> None:
    """Not when a model is attached, minutes later."""
    with pytest.raises(TextError):
        ACE.from_pretrained(MODEL, skip=0.5, text=text)


def test_a_loaded_model_brings_its_tokenizer_or_is_given_one(model: Any) -> None:
    model.config._name_or_path, before = "", model.config._name_or_path
    try:
        given = {"skip": 0.5, "policy": "share", "text": TEXT, "tokens": 1024}
        with pytest.raises(AceError, match=r"checkpoint folder|tokenizer"), ACE.from_pretrained(model, **given)(model):
            pass
        with ACE.from_pretrained(model, tokenizer=load_tokenizer(MODEL), **given)(model) as ace:
            assert ace.thresholds[0] > 0
    finally:
        model.config._name_or_path = before


def test_progress_reaches_the_caller(model: Any) -> None:
    heard: list[tuple[str, int, int | None]] = []
    ace = ACE.from_pretrained(
        MODEL, skip=0.5, policy="share", text=TEXT, tokens=1024, progress=lambda *told: heard.append(told)
    )
    assert not heard  # nothing is computed before a model is there
    with ace(model):
        assert any(done == total for _, done, total in heard)
        heard.clear()
        model(IDS)
    assert heard == []


CONSUMER = """
from ace_moe import ACE, Plan, Policy, build_plan, detach, __version__
plan: Plan = build_plan("model")
ace: ACE = ACE.load("plan.safetensors", skip={"prefill": 0.5, "decode": 0.3})
ratio: float = ace.realised
name: str = __version__
reveal_type(ace.report())
reveal_type(Plan.load("x").thresholds)
wrong: int = ace.realised
"""


@pytest.mark.slow
def test_a_consumers_type_checker_sees_our_types(tmp_path: Path) -> None:
    """`py.typed`: a user's mypy knows the lazy names, and finds the one line that is wrong."""
    pytest.importorskip("mypy")
    (tmp_path / "consumer.py").write_text(CONSUMER)
    skipped = (
        "[mypy]\n[mypy-torch.*,transformers.*,safetensors.*]\nfollow_imports = skip\nignore_missing_imports = true\n"
    )
    (tmp_path / "mypy.ini").write_text(skipped)  # the checker reads ours, not all of torch
    options = ["--cache-dir", str(tmp_path / "cache"), "--follow-imports", "silent", "--ignore-missing-imports"]
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "consumer.py"], cwd=tmp_path, capture_output=True, text=True
    )
    lines = ran.stdout.splitlines()
    assert [line for line in lines if "error" in line and "consumer.py" in line] == [
        'consumer.py:9: error: Incompatible types in assignment (expression has type "float", variable has type "int")'
        "  [assignment]"
    ], ran.stdout
    assert any("dict[str, Any]" in line for line in lines) and any("Threshold" in line for line in lines)


def test_the_command_line_knows_the_default_policy_without_importing_it() -> None:
    from ace_moe.cli.common import AUTO
    from ace_moe.policies import AUTO as THEIRS

    assert AUTO == THEIRS
