"""Servers of several engines and of several machines, on one CPU: the text of one rank, and counters that add up."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import serving_collectives
from serving_cases import MAX_TOKENS, PROMPTS, Case, environment
from serving_server import Server, free_port, serve_command, serving, stop

SLOTS = 8  # of a token in each layer


def texts(server: Server, case: Case, **headers: str) -> None:
    """The reference's tokens, request by request."""
    for prompt, expected in zip(PROMPTS, case.reference.tokens, strict=True):
        assert server.complete(prompt, headers=headers, return_token_ids=True)["token_ids"] == expected


def counted(report: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Slots routed and kept in each layer."""
    return {
        key: tuple(sum(phase[name] for phase in layer.values()) for name in ("routed", "kept"))  # type: ignore[misc]
        for key, layer in report["layers"].items()
    }


def metric(server: Server, name: str, phase: str) -> dict[str, float]:
    """The value of each engine, over all layers."""
    found: dict[str, float] = {}
    for line in server.send("/metrics", key=None)[1].splitlines():
        if line.startswith(f"ace:{name}{{") and f'phase="{phase}"' in line:
            engine = line.partition('engine="')[2].partition('"')[0]
            found[engine] = found.get(engine, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


@pytest.mark.vllm
def test_two_engines_say_what_one_says_and_are_counted_together(
    case_of: Callable[[str], Case], mapped: Path, tmp_path: Path
) -> None:
    """Data parallel: every prompt once on each engine, under a budget that one call gave to both."""
    case = case_of("demo")
    path = f"{environment()['PYTHONPATH']}:{serving_collectives.install(tmp_path / 'plugin')}"
    options = ("--plan", str(mapped), "--skip", "0.5", "--data-parallel-size", "2", "--api-server-count", "1")
    alone = {"VLLM_CPU_SIM_MULTI_NUMA": "0"}  # or vLLM 0.33 looks for a memory node for each engine
    with serving(tmp_path / "log", case.model, *options, PYTHONPATH=path, **alone) as server:
        status, text = server.send("/ace", {"threshold": case.reference.threshold, "reset": True})
        assert status == 200 and json.loads(text)["executors"] == {"redirect": 6}
        for rank in ("0", "1", "1"):
            texts(server, case, **{"X-data-parallel-rank": rank})
        report = json.loads(server.send("/ace")[1])
        assert counted(report) == {key: (3 * r, 3 * k) for key, (r, k) in case.reference.counts.items()}
        routed = metric(server, "slots_routed_total", "prefill")
        assert routed["1"] == 2 * routed["0"] and sum(routed.values()) == report["prefill"]["routed"]
        assert set(metric(server, "threshold", "decode").values()) == {case.reference.threshold}
        server.send("/ace", {"skip": 0.2, "reset": True})
        assert metric(server, "budget", "decode") == {"0": 0.2, "1": 0.2}
        assert json.loads(server.send("/ace")[1])["prefill"]["routed"] == 0


@contextmanager
def second_node(log: Path, command: list[str], env: dict[str, str]) -> Iterator[None]:
    with log.open("w") as out:
        process = subprocess.Popen(command, start_new_session=True, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        stop(process)


@pytest.mark.vllm
def test_two_machines_say_what_one_says(case_of: Callable[[str], Case], mapped: Path, tmp_path: Path) -> None:
    """Tensor parallel over two nodes, here two process trees that meet on the loopback; the second has no front end."""
    case = case_of("demo")
    local = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = (
        "--plan", str(mapped), "--skip", "0.5", "--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr",
        "127.0.0.1", "--master-port", str(free_port()), "--distributed-executor-backend", "mp",
    )  # fmt: skip
    command, env = serve_command(case.model, free_port(), *nodes, "--node-rank", "1", "--headless")
    with (
        second_node(tmp_path / "second", command, {**env, **local}),
        serving(tmp_path / "log", case.model, *nodes, "--node-rank", "0", **local) as server,
    ):
        server.send("/ace", {"threshold": case.reference.threshold, "reset": True})
        texts(server, case)
        report = json.loads(server.send("/ace")[1])
        assert counted(report) == case.reference.counts  # both ranks see every token: counted once
        assert set(metric(server, "slots_routed_total", "decode")) == {"0"}
        assert report["decode"]["routed"] == len(PROMPTS) * (MAX_TOKENS - 1) * SLOTS * 6
