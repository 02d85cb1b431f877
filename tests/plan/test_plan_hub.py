"""Plans on the hub, against a loopback server: pushed, fetched, listed, forgotten; and what is said where that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hub_with_account import TOKEN, PlanHub
from huggingface_hub import ModelCard, close_session, constants

from ace_moe import ACE, Plan
from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import OptionError, OutputError, PlanError
from ace_moe.plan import Threshold, Workload
from ace_moe.plan import hub as plan_hub
from command import run_ace

NAME = "someone/demo-plan"


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does, which the client reads when it is imported."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", url)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlanHub]:
    """A hub, an account on it, and an empty cache."""
    (tmp_path / "remote").mkdir()
    made = PlanHub(tmp_path / "remote")
    point_to(made.url, monkeypatch)
    for name, value in {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    for name, value in {"HF_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1", "ACE_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    close_session()
    yield made
    made.close()
    close_session()


@pytest.fixture
def plan(demo_plan: Plan) -> Plan:
    text = Workload("a | <b>\x1b[2J\n# c.txt", "0" * 64, 4096)
    entry = Threshold("ace", {"fusion": "max"}, "power", 1, 0.0, 0.5, 0.08, 0.499, True, 2, text)
    return demo_plan.with_thresholds([entry, replace(entry, budget=0.3, threshold=0.05, realised=0.3)])


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


# ---- as a user --------------------------------------------------------------------------------------------------------


def test_from_a_checkpoint_to_the_hub_and_back(hub: PlanHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made and pushed here; run, budget and plans with the name there; without a network from the cache."""
    monkeypatch.chdir(tmp_path)
    assert run_ace("plan", MODEL, "--tables", "-o", "made.safetensors").code == 0
    pushed = run_ace("plans", "push", "made.safetensors", NAME).out
    assert f"{hub.url}/{NAME}/commit/" in pushed and hub.commits == 1
    mapped = run_ace("plan", MODEL, "--plan", NAME, "--text", TEXT, "--budgets", "0.5")
    assert mapped.code == 1 and f"ace plans get {NAME} -o plan.safetensors" in mapped.err, "published plans stay"
    assert run_ace("plans", "get", NAME).code == 0
    how = ("--text", TEXT, "--budgets", "0.5", "--tokens", 512, "--window", 256, "--no-fidelity")
    assert run_ace("plan", MODEL, "--plan", "plan.safetensors", *how).code == 0
    assert run_ace("plans", "push", "plan.safetensors", NAME).code == 0
    generated = ("--skip", 0.5, "--prompt", "The", "--max-new-tokens", 2, "--json")
    assert run_ace("run", MODEL, "--plan", NAME, *generated).json["realised"] > 0
    offline(monkeypatch)
    assert run_ace("run", MODEL, "--plan", NAME, *generated).json["realised"] > 0
    listed = run_ace("plans", "--json").json
    assert [k["name"] for k in listed] == [f"{NAME}@11111111", f"{NAME}@22222222"]
    assert NAME in run_ace("plans").out
    assert run_ace("plans", "clear", f"{NAME}@11111111", "--json").json == [f"{NAME}@11111111"]
    assert run_ace("plans", "clear", NAME, "--json").json == [f"{NAME}@22222222"]
    assert run_ace("plans", "--json").json == [] and not any(Path(k["path"]).exists() for k in listed)


def test_what_is_loaded_is_what_was_pushed(hub: PlanHub, plan: Plan) -> None:
    assert plan_hub.push(plan, NAME, private=True).endswith(hub.commit) and hub.private
    assert ACE.load(NAME, skip=0.5).plan == plan
    assert ACE.load(f"{NAME}@{hub.commit}", skip=0.5).plan == plan


def test_a_file_here_wins(hub: PlanHub, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan_hub.push(plan, NAME)
    here = replace(plan, model="another")
    Path(NAME).parent.mkdir()
    here.save(NAME)
    assert plan_hub.load_plan(NAME) == here


def test_the_card_says_what_the_plan_is(plan: Plan) -> None:
    made = ModelCard(plan_hub.card(plan, NAME, "owner/model"))
    about = made.data.to_dict()
    assert about["base_model"] == "owner/model" and about["library_name"] == "ace-moe"
    assert about["ace_moe"]["fingerprint"] == plan.fingerprint.routers.exact
    assert about["ace_moe"]["budgets"] == [0.3, 0.5] and about["ace_moe"]["tables"] == ["gsp", "rcr"]
    rows = [line for line in made.text.splitlines() if line.startswith("| ace ")]
    assert len(rows) == 2 and all(row.count("|") == 7 for row in rows), "a text's name breaks no table"
    assert "a b 2J # c.txt, 4,096 tokens" in rows[0] and "\x1b" not in made.text
    assert (
        f'ACE.load("{NAME}", skip=0.5)' in made.text
        and "base_model" not in ModelCard(plan_hub.card(plan, NAME)).data.to_dict()
    )


# ---- what cannot be ---------------------------------------------------------------------------------------------------


def test_an_unknown_name(hub: PlanHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"no file some/body here, and no repository .* `ace plan"):
        ACE.load("some/body")
    ran = run_ace("run", MODEL, "--plan", "some/body", "--prompt", "x")
    assert ran.code == 1 and "no repository of that name" in ran.err
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match=r"There is no plan at some/file.safetensors"):
        ACE.load("some/file.safetensors")


def test_an_unknown_revision_and_a_model_without_a_plan(hub: PlanHub, plan: Plan) -> None:
    plan_hub.push(plan, NAME)
    with pytest.raises(PlanError, match=r"has no revision 'v9'"):
        ACE.load(f"{NAME}@v9")
    (hub.folder / plan_hub.FILE).unlink()
    with pytest.raises(PlanError, match=r"has no plan.safetensors.*`ace plan"):
        ACE.load(NAME)


def test_offline_says_so(hub: PlanHub, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    with pytest.raises(PlanError, match=r"neither a file nor a plan kept .* HF_HUB_OFFLINE is set"):
        ACE.load(NAME)
    with pytest.raises(OutputError, match="HF_HUB_OFFLINE is set"):
        plan_hub.push(plan, NAME)


def test_a_hub_that_does_not_answer(hub: PlanHub, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fetched before is used; the rest is said."""
    plan_hub.push(plan, NAME)
    ACE.load(NAME)
    point_to("http://127.0.0.1:9", monkeypatch)
    assert plan_hub.load_plan(NAME) == plan
    with pytest.raises(OutputError, match="could not be pushed"):
        plan_hub.push(plan, NAME)


@pytest.mark.parametrize("damage", [b"", b"junk", None], ids=["empty", "junk", "cut"])
def test_nothing_fetched_is_trusted(damage: bytes | None, hub: PlanHub, plan: Plan) -> None:
    plan_hub.push(plan, NAME)
    file = hub.folder / plan_hub.FILE
    file.write_bytes(file.read_bytes()[:-5] if damage is None else damage)
    with pytest.raises(PlanError):
        ACE.load(NAME)


def test_a_file_too_large_to_be_a_plan_is_not_fetched(
    hub: PlanHub, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_hub.push(plan, NAME)
    monkeypatch.setattr(plan_hub, "LARGEST", 100)
    with pytest.raises(PlanError, match="which no plan has"):
        ACE.load(NAME)
    assert hub.asked[plan_hub.FILE] == 0


def test_a_plan_of_another_model_is_refused(hub: PlanHub, plan: Plan) -> None:
    import zoo

    plan_hub.push(plan, NAME)
    with pytest.raises(PlanError, match="another model"), torch.no_grad():
        ACE.load(NAME).attach(zoo.build("qwen3_moe"))


def test_a_models_repository_is_not_written_over(hub: PlanHub, plan: Plan, tmp_path: Path) -> None:
    hub.name = NAME
    (hub.folder / "config.json").write_text("{}")
    for push in (lambda: plan_hub.push(plan, NAME), lambda: plan_hub.check_push(NAME)):
        with pytest.raises(OutputError, match=r"holds config.json and is not a repository of a plan"):
            push()


@pytest.mark.parametrize("name", ["", "one", "a/b/c", "a/b@main", "../b", "a b/c"])
def test_names_that_mean_nothing(name: str, hub: PlanHub, plan: Plan) -> None:
    with pytest.raises(OptionError, match="Give owner/name"):
        plan_hub.push(plan, name)


def test_an_account_is_needed(hub: PlanHub, plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(OutputError, match="your login may write there"):
        plan_hub.push(plan, NAME)
    monkeypatch.setattr(plan_hub, "get_token", lambda: None)
    with pytest.raises(OutputError, match="hf auth login"):
        plan_hub.push(plan, NAME)


def test_clearing_forgets_plans_made_here_too(hub: PlanHub, plan: Plan, tmp_path: Path) -> None:
    plan_hub.push(plan, NAME)
    ACE.load(NAME)
    plan.save(tmp_path / "cache" / "tiny-0123.safetensors")
    assert [k["name"] for k in run_ace("plans", "--json").json] == ["tiny-0123", f"{NAME}@11111111"]
    ran = run_ace("plans", "clear", "other")
    assert ran.code == 1 and "`ace plans` lists" in ran.err
    assert run_ace("plans", "clear").code == 0 and run_ace("plans", "--json").json == []
    assert "No plan is kept" in run_ace("plans").out
