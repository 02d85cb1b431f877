"""`ace serve`: the OpenAI server with budgets that change while it runs, metrics, and 200 requests at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
from serving_cases import PROMPTS, Case
from serving_server import Server, serving


@pytest.mark.vllm
def test_server(case_of: Callable[[str], Case], mapped: Path, tmp_path: Path) -> None:
    case = case_of("demo")
    with serving(tmp_path / "log", case.model, "--plan", str(mapped), "--skip", "0.5") as server:
        check_tokens(server, case)
        check_control(server)
        check_metrics(server)
        check_load(server)


@pytest.mark.vllm
def test_requests_with_budgets_of_their_own(case_of: Callable[[str], Case], mapped: Path, tmp_path: Path) -> None:
    """200 at once under five budgets: each as on a server that has that one budget, counted apart; bad ones change nothing."""
    budgets, prompts = (0.0, 0.2, 0.35, 0.5, 0.6), [f"{PROMPTS[n % len(PROMPTS)]} {n}" for n in range(40)]
    with serving(tmp_path / "log", case_of("demo").model, "--plan", str(mapped), cached=True) as server:
        server.send("/ace", {"skip": 0.0, "reset": True})
        asked = [(prompt, budget) for prompt in prompts for budget in budgets]
        with ThreadPoolExecutor(32) as pool:
            jobs = [pool.submit(server.complete, p, 8, vllm_xargs={"ace_skip": b}) for p, b in asked]
        texts = {pair: job.result()["text"] for pair, job in zip(asked, jobs, strict=True)}
        check_bad_budgets(server)
        mixed = json.loads(server.send("/ace")[1])
        assert mixed["decode"]["routed"] == sum(r["decode"]["routed"] for r in mixed["requests"].values())
        for budget in budgets:
            server.send("/ace", {"skip": budget, "reset": True})
            assert {p: server.complete(p, 8)["text"] for p in prompts} == {p: texts[p, budget] for p in prompts}
            alone, own = json.loads(server.send("/ace")[1]), mixed["requests"][f"{budget:.2f}"]
            assert {p: alone[p] for p in ("prefill", "decode")} == {p: own[p] for p in ("prefill", "decode")}


def check_bad_budgets(server: Server) -> None:
    before = json.loads(server.send("/ace")[1])
    body = {"model": server.model, "prompt": PROMPTS[0], "max_tokens": 4}
    for bad in (1.5, -0.1, "half", [0.3], 0.95):
        status, text = server.send("/v1/completions", {**body, "vllm_xargs": {"ace_skip": bad}})
        assert status == 400 and ("fraction" in text or "at most" in text), text
    assert json.loads(server.send("/ace")[1]) == before


@pytest.mark.vllm
def test_a_plan_that_is_mapped_while_it_is_served(case_of: Callable[[str], Case], mapped: Path, tmp_path: Path) -> None:
    """Another command writes thresholds into its file: the server goes on with the plan it was started with."""
    case, plan = case_of("demo"), tmp_path / "plan.safetensors"
    plan.write_bytes(case.plan.read_bytes())
    body = {"model": str(case.model), "prompt": PROMPTS[0], "max_tokens": 4, "vllm_xargs": {"ace_skip": 0.5}}
    with serving(tmp_path / "log", case.model, "--plan", str(plan), "--skip", "0") as server:
        plan.write_bytes(mapped.read_bytes())
        for _ in range(2):
            status, text = server.send("/v1/completions", body)
            assert status == 400 and "no threshold" in text, text
            assert server.complete(PROMPTS[0], vllm_xargs={"ace_skip": 0.0})["text"]
        assert server.send("/ace", {"skip": 0.5})[0] == 400 and server.send("/health")[0] == 200


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["glm4", "qwen2"])
def test_server_of_other_models(name: str, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    case = case_of(name)
    with serving(tmp_path / "log", case.model, "--plan", str(case.plan)) as server:
        check_tokens(server, case)


@pytest.mark.vllm
def test_server_without_the_plugin_in_its_workers_stops(
    case_of: Callable[[str], Case], mapped: Path, tmp_path: Path
) -> None:
    """An allow-list of plugins that leaves ours out would serve without skipping, silently."""
    started = serving(tmp_path / "log", case_of("demo").model, "--plan", str(mapped), VLLM_PLUGINS="another")
    with pytest.raises(AssertionError, match="Skipping is not configured"), started:
        pass


def check_tokens(server: Server, case: Case) -> None:
    """At the reference's threshold the server writes the reference's tokens."""
    server.send("/ace", {"threshold": case.reference.threshold})
    for prompt, expected in zip(PROMPTS, case.reference.tokens, strict=True):
        assert server.complete(prompt, return_token_ids=True)["token_ids"] == expected


def check_control(server: Server) -> None:
    assert server.send("/ace", key=None)[0] == 401
    assert server.send("/ace", {"skip": 0.2}, key="wrong")[0] == 401
    status, text = server.send("/ace", {"skip": 0.2, "reset": True})
    report = json.loads(text)
    assert status == 200 and report["skip"] == 0.2 and report["prefill"]["routed"] == 0
    assert list(report["layers"]) == [str(n) for n in range(6)] and report["executors"] == {"compact": 6}
    assert set(report["refused"]) == {"kernels", "native"} and "CPU" in report["refused"]["native"]
    for body, reason in (
        ({"skip": 0.9}, "at most 87.5% can be skipped"),
        ({"skip": "half"}, "not a number"),
        ({"skip": {"decode": 0.2}}, "names only decode"),
        ({"skip": 0.2, "threshold": 0.1}, "not both"),
        ({"threshold": -1}, "from 0 on"),
        ({"skp": 0.2}, "Send a JSON object"),
        ([], "Send a JSON object"),
    ):
        status, text = server.send("/ace", body)
        assert status == 400 and reason in json.loads(text)["error"]
    assert json.loads(server.send("/ace")[1])["skip"] == 0.2  # none of that changed anything
    status, text = server.send("/ace", {"skip": {"prefill": 0.5, "decode": 0.2}})
    threshold = json.loads(text)["threshold"]
    assert status == 200 and threshold["prefill"] > threshold["decode"] == threshold["verify"] > 0


def check_metrics(server: Server) -> None:
    server.send("/ace", {"skip": 0.5, "reset": True})
    server.complete(PROMPTS[0])
    report = json.loads(server.send("/ace")[1])
    status, text = server.send("/metrics", key=None)
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("ace:"))
    assert status == 200 and "vllm:num_requests_running" in text
    for key, layer in report["layers"].items():
        for phase in ("prefill", "decode"):
            for name, metric in (
                ("routed", "slots_routed_total"),
                ("kept", "slots_kept_total"),
                ("realised", "realised_ratio"),
            ):
                assert float(lines[f"ace:{metric}{labels(server, phase, key)}"]) == layer[phase][name]
    assert float(lines[f"ace:budget{labels(server, 'decode')}"]) == 0.5
    assert 0.3 < report["realised"] < 0.7


def labels(server: Server, phase: str, layer: str = "") -> str:
    of = f'layer="{layer}",' if layer else ""
    return f'{{engine="0",{of}model_name="{server.model}",phase="{phase}"}}'


def check_load(server: Server, requests: int = 200) -> None:
    """The budget changes while 200 requests are under way: none fails, and the ratio follows."""
    expected = [steady_ratio(server, budget) for budget in (0.5, 0.2)][::-1]
    server.send("/ace", {"reset": True})
    with ThreadPoolExecutor(requests) as pool:

        def ask(number: int) -> Future[Any]:
            return pool.submit(server.complete, PROMPTS[number % len(PROMPTS)], 24)

        jobs = [ask(number) for number in range(requests // 2)]
        next(as_completed(jobs))
        found = [realised(server)]
        assert server.send("/ace", {"skip": 0.5})[0] == 200
        server.send("/ace", {"reset": True})
        jobs += [ask(number) for number in range(requests // 2, requests)]
        texts = [job.result() for job in jobs]
    found.append(realised(server))
    print(f"\nload: {requests} requests; realised {found}, steady {expected}")
    assert len(texts) == requests and all(t["text"] for t in texts)
    assert all(abs(a - b) < 0.05 for a, b in zip(found, expected, strict=True))  # the first second is mostly prompts
    assert found[1] > found[0] + 0.15


def steady_ratio(server: Server, budget: float) -> float:
    """What the budget realises on these prompts without a load."""
    server.send("/ace", {"skip": budget})
    server.send("/ace", {"reset": True})
    for prompt in PROMPTS:
        server.complete(prompt, 24)
    return realised(server)


def realised(server: Server) -> float:
    return json.loads(server.send("/ace")[1])["realised"]
