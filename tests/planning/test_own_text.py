"""No text at all: the model writes its own, and everything that maps budgets works on that."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from ace_moe import ACE
from ace_moe.checkpoint.loading import load_model, load_tokenizer
from ace_moe.cli.mapped import mapped_plan
from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import BudgetError, TextError
from ace_moe.mapping import TextSource, own_windows
from ace_moe.mapping.texts import LONGEST_TURN, Turns, Writer, first_token
from ace_moe.plan import OWN as NAME
from ace_moe.plan import Plan
from ace_moe.policies import policy_for
from ace_moe.text import Text
from command import run_ace

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


def test_samples_are_the_models_own(demo_model: PreTrainedModel, tokenizer: Any) -> None:
    """Seeded; each begins with the first token; likely under the model that wrote them, unlike random tokens."""
    made = own_windows(demo_model, tokenizer, samples=4, length=24)
    assert made.ids.shape == (4, 24) and made.workload.name == NAME and made.workload.tokens == 96
    assert made.workload == own_windows(demo_model, tokenizer, samples=4, length=24).workload
    assert made.workload.sha256 != own_windows(demo_model, tokenizer, samples=4, length=24, seed=1).workload.sha256
    assert (made.ids[:, 0] == first_token(demo_model, tokenizer)).all() and len({*map(tuple, made.ids.tolist())}) == 4
    chance = torch.randint(0, 8192, made.ids.shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        own, random = (demo_model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (made.ids, chance))
    assert own < random - 2


def test_sampling_follows_the_models_probabilities(demo_model: PreTrainedModel) -> None:
    """At temperature 1 the text is as surprising as the model expects: its mean NLL is its mean entropy."""
    ids = own_windows(demo_model, samples=32, length=24).ids
    with torch.inference_mode():
        logp = demo_model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    nll = -logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    spread = (nll - entropy).std() / nll.numel() ** 0.5
    assert abs(float(nll.mean() - entropy.mean())) < 4 * float(spread)


@given(choices=st.lists(st.integers(10, 14), min_size=1, max_size=300), length=st.integers(1, 300))
def test_a_conversation_has_its_form(choices: list[int], length: int) -> None:
    """Whatever the model chooses: what stands around turns comes whole, and a user's turn ends in time."""
    turns = Turns(before=[1, 2], between=[14, 3, 4], ends=frozenset([14]))
    writer = Writer(turns)
    made = [writer.take(choices[i % len(choices)]) for i in range(length)]
    text = " " + " ".join(map(str, made)) + " "
    assert made[:2] == [1, 2][:length]
    for asked in text.split(" 1 2 ")[1:]:
        user, *answer = asked.split(" 14 3 4 ")
        assert len(user.split()) <= LONGEST_TURN + len(turns.between) and len(answer) <= 1
        assert "14" not in user.split()[:-1] or not answer


def test_the_chat_template_is_used(demo_model: PreTrainedModel, tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT
    turns = Turns.of(demo_model, tokenizer)
    assert (
        tokenizer.decode(turns.before) == "<|user|>" and tokenizer.decode(turns.between) == "<|endoftext|><|assistant|>"
    )
    assert 0 in turns.ends
    made = own_windows(demo_model, tokenizer, samples=2, length=90)
    for text in tokenizer.batch_decode(made.ids):
        assert text.startswith("<|user|>") and "<|endoftext|><|assistant|>" in text
    for broken in ("{{ raise_exception('no') }}", "nothing of the user", "{{ messages[0]['content'] }}"):
        tokenizer.chat_template = broken
        assert Turns.of(demo_model, tokenizer) == Turns([0], [], frozenset())


def test_what_begins_a_text(demo_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token, else what ends the text before; lists are taken by their first; else said."""
    config, generation = demo_model.config, demo_model.generation_config
    for bos, eos, expected in ((5, 7, 5), (None, [7, 8], 7), (None, 0, 0)):
        for facts in (config, generation):
            monkeypatch.setattr(facts, "bos_token_id", bos)
            monkeypatch.setattr(facts, "eos_token_id", eos)
        assert first_token(demo_model) == expected
    for facts in (config, generation):
        monkeypatch.setattr(facts, "eos_token_id", None)
    with pytest.raises(TextError, match="--text FILE"):
        own_windows(demo_model)


def test_a_model_without_a_head_is_told(demo_model: PreTrainedModel) -> None:
    with pytest.raises(TextError, match="predicts no tokens"):
        own_windows(demo_model.model)


def test_a_model_without_a_tokenizer(demo_model: PreTrainedModel, tmp_path: Path, shorter: None) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(MODEL / name, tmp_path / name)
    assert TextSource(tmp_path).windows(demo_model).workload == TextSource(MODEL).windows(demo_model).workload


@pytest.fixture
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that are written in a second."""
    stock = own_windows
    monkeypatch.setattr(
        "ace_moe.mapping.texts.own_windows", lambda model, tokenizer: stock(model, tokenizer, samples=4, length=16)
    )


def test_a_model_that_was_made_asks_for_its_tokenizer(demo_model: PreTrainedModel) -> None:
    """Its config names no folder; a text then needs a tokenizer that is given."""
    for nowhere in ("", Path()):
        with pytest.raises(TextError, match="tokenizer="):
            TextSource(nowhere, Text.of(TEXT)).windows(demo_model)


def test_from_pretrained_alone(demo_model: PreTrainedModel, shorter: None) -> None:
    """`ACE.from_pretrained(MODEL, skip=0.5)` and nothing else."""
    ace, windows = ACE.from_pretrained(MODEL, skip=0.5, policy="share"), TextSource(MODEL).windows(demo_model)
    with ace(demo_model):
        for ids in windows.ids:
            demo_model(input_ids=ids[None], use_cache=False)
        assert ace.realised == pytest.approx(0.5, abs=0.02)
    (entry,) = ace.plan.thresholds
    assert entry.workload == windows.workload and entry.corrected
    with pytest.raises(BudgetError, match="cannot be met"):
        ACE.from_pretrained(MODEL, skip=0.95)


def test_the_command_without_a_text(demo_plan: Plan, tmp_path: Path, shorter: None) -> None:
    path = replace(demo_plan).save(tmp_path / "plan.safetensors")
    done = run_ace("plan", MODEL, "-p", path, "--budgets", "0.3,0.5", "--no-fidelity", "--policy", "share")
    assert done.code == 0, done.err
    made = Plan.load(path).thresholds
    assert [t.budget for t in made] == [0.3, 0.5] and {t.workload.name for t in made} == {NAME}
    assert ACE.load(path, 0.5, policy="share").thresholds[0] == pytest.approx(made[1].threshold)


def mapped(path: Path, budget: float = 0.5, **options: Any) -> tuple[Path, str | None]:
    """As `ace serve` makes what is missing."""
    policy_of = partial(policy_for, policy="share")
    return mapped_plan(str(MODEL), path, policy_of, [budget], load=partial(load_model, device="cpu"), **options)


def test_serving_maps_what_is_missing_before_vllm_starts(demo_plan: Plan, tmp_path: Path, shorter: None) -> None:
    """Into the plan that was given, once; a named workload is not replaced, and no budget is mapped that cannot be met."""
    path = demo_plan.save(tmp_path / "plan.safetensors")
    assert mapped(path) == (path, None)
    (entry,) = Plan.load(path).thresholds
    assert (entry.budget, entry.workload.name) == (0.5, NAME)
    before = path.read_bytes()
    mapped(path)
    mapped(path, 0.3, workload="other.txt")
    with pytest.raises(BudgetError, match="cannot be met"):
        mapped(path, 0.95)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_serving_takes_the_text_that_was_given(demo_plan: Plan, tmp_path: Path, shorter: None) -> None:
    """Own text is in the plan already: a given text is mapped all the same, once, and its thresholds are what is served."""
    path, text = demo_plan.save(tmp_path / "plan.safetensors"), tmp_path / "sample.txt"
    mapped(path)
    text.write_text(TEXT.read_text(encoding="utf-8")[:6000], encoding="utf-8")
    assert mapped(path, text=text) == (path, "sample.txt")
    before = path.read_bytes()
    assert [t.workload.name for t in Plan.load(path).thresholds] == [NAME, "sample.txt"]
    assert mapped(path, text=text) == (path, "sample.txt") and path.read_bytes() == before
