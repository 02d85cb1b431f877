"""What the middleware adds to vLLM's server: the /ace route under vLLM's own rules, a refusal to start, and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from serving_parts import FOUND, reply

from ace_moe.engines.vllm import http
from ace_moe.engines.vllm.control import AceWorker
from ace_moe.engines.vllm.http import FIELDS, LARGEST, AceMiddleware
from edits import JSON

AS_JSON = (b"content-type", b"application/json")
Headers = Sequence[tuple[bytes, bytes]]


class App:
    """An ASGI app with a metrics page, and an engine that answers RPCs."""

    def __init__(self, key: list[str] | None = None):
        args = SimpleNamespace(api_key=key, model="a/b", served_model_name=["served"])
        self.state = SimpleNamespace(engine_client=self, args=args)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        self.calls.append((method, kwargs))
        return [reply(0)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"9")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"vllm:a 1\n"})


def messages(app: App, scope: dict[str, Any], given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the middleware sends when these messages come in."""
    sent: list[dict[str, Any]] = []
    left = iter(given)

    async def receive() -> dict[str, Any]:
        return next(left, {"type": "http.disconnect"})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(AceMiddleware(app)({"app": app, **scope}, receive, send))
    return sent


def request(app: App, path: str, method: str = "GET", body: bytes = b"", headers: Headers = ()) -> tuple[int, bytes]:
    scope = {"type": "http", "path": path, "method": method, "headers": list(headers)}
    sent = messages(app, scope, [{"type": "http.request", "body": body, "more_body": False}])
    length = dict(sent[0]["headers"])[b"content-length"]
    assert int(length) == len(sent[1]["body"])
    return sent[0]["status"], sent[1]["body"]


def post(app: App, body: bytes, headers: Headers = (AS_JSON,)) -> int:
    return request(app, "/ace", "POST", body, headers)[0]


def test_routes_and_keys() -> None:
    assert request(App(), "/other") == (200, b"vllm:a 1\n")
    status, body = request(App(), "/ace")
    report = json.loads(body)
    assert status == 200 and report["threshold"] == {"prefill": 0.1, "decode": 0.2, "verify": 0.2}
    assert report["executors"] == {"native": 2} and report["refused"] == {"kernels": "switched off"}
    assert request(App(), "/ace", "DELETE")[0] == 405
    key = (b"authorization", b"Bearer key")
    assert request(App(["key"]), "/ace")[0] == 401 and request(App(["key"]), "/ace", headers=[key])[0] == 200
    assert post(App(["key"]), b'{"skip": 0.4}') == 401 and post(App(["key"]), b'{"skip": 0.4}', (AS_JSON, key)) == 200


GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    '{"skip": 0.4}': ("ace_set", {"skip": 0.4}),
    '{"skip": 0}': ("ace_set", {"skip": 0}),
    '{"skip": 0.4, "reset": true}': ("ace_set", {"skip": 0.4, "reset": True}),
    '{"skip": 0.4, "reset": false}': ("ace_set", {"skip": 0.4}),
    '{"skip": {"both": 0.4}}': ("ace_set", {"skip": 0.4}),
    '{"skip": {"prefill": 0.5, "decode": 0}}': ("ace_set", {"skip": {"prefill": 0.5, "decode": 0}}),
    '{"threshold": 0}': ("ace_set", {"threshold": 0}),
    '{"threshold": [0.1, 0.2]}': ("ace_set", {"threshold": [0.1, 0.2]}),
    '{"reset": true}': ("ace_reset", {}),
}
BAD = (
    "", "[]", "{}", "5", "null", '"skip"', '{"skp": 1}', "\\xff", '{"reset": true, "skip": "junk"}', '{"reset": false}',
    '{"threshold": true}', '{"reset": "false"}', '{"reset": 1}', '{"skip": {"prefill": 0.5}}', '{"skip": {}}', '{"skip": null}',
    '{"skip": {"prefill": 0.5, "decode": 0.5, "x": 0}}', '{"skip": {"both": 0.5, "decode": 0.5}}', '{"skip": NaN}',
    '{"skip": 1e999}',     '{"skip": true}', '{"skip": -0.1}', '{"skip": 1.5}', '{"skip": [0.5]}',
    '{"threshold": -1}', '{"threshold": [0.1]}',
    '{"threshold": [0.1, true]}', '{"threshold": "0.1"}', '{"skip": 0.4, "threshold": 0.1}', '{"skip": 0.5, "reset": null}',
    "[" * 30_000, '{"skip":' * 5_000, '{"skip": ' + "9" * 5_000 + "}",
)  # fmt: skip


@pytest.mark.parametrize("body", GOOD)
def test_requests_that_are_carried_out(body: str) -> None:
    """In one call, so that a worker does all of it or nothing."""
    app = App()
    assert post(app, body.encode()) == 200 and app.calls == [GOOD[body]]


@pytest.mark.parametrize("body", BAD, ids=lambda b: b[:40] or "nothing")
def test_requests_that_mean_nothing(body: str) -> None:
    """Nothing is asked of the workers, not even the half that would have been fine."""
    app = App()
    status, said = request(app, "/ace", "POST", body.encode(), [AS_JSON])
    assert status == 400 and app.calls == []
    assert "error" in json.loads(said)


OBJECTS = st.one_of(JSON, st.dictionaries(st.sampled_from([*FIELDS, "x"]), JSON))


@given(body=st.one_of(st.binary(), OBJECTS.map(lambda value: json.dumps(value).encode())))
@example(body=b'{"skip": {"prefill": 0.1, "decode": 0.1, "verify": 1}}')
@settings(max_examples=300)
def test_any_body(body: bytes) -> None:
    """An answer of ours whatever comes in, and what reaches a worker is of the right kind."""
    app = App()
    status = post(app, body)
    assert status in (200, 400)
    assert len(app.calls) == (status == 200)
    for _, wanted in app.calls:
        for name, value in wanted.items():
            FIELDS[name](value, name)


def test_a_body_that_is_cut_short() -> None:
    """Nobody is there any more, and what had come by then is not what was meant."""
    scope = {"type": "http", "path": "/ace", "method": "POST", "headers": [AS_JSON]}
    for parts in ([b'{"skip": 0.5}'], [b'{"reset": tr', b"ue}"], []):
        app = App()
        given = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        assert messages(app, scope, given) == [] and app.calls == []
    app = App()
    assert post(app, b'{"skip": 0.5}', (AS_JSON, (b"content-length", b"14"))) == 400 and app.calls == []


def test_a_body_in_parts_and_one_that_is_too_long() -> None:
    scope = {"type": "http", "path": "/ace", "method": "POST", "headers": [AS_JSON]}
    parts = [{"type": "http.request", "body": b, "more_body": bool(b)} for b in (b'{"skip"', b": 0.5}", b"")]
    app = App()
    assert messages(app, scope, parts)[0]["status"] == 200 and app.calls == [("ace_set", {"skip": 0.5})]
    app, endless = App(), [{"type": "http.request", "body": b" " * LARGEST, "more_body": True}] * 3
    assert messages(app, scope, endless)[0]["status"] == 413 and app.calls == []


@pytest.mark.parametrize(
    "kind", [b"text/plain", b"application/x-www-form-urlencoded", b"", b"multipart/form-data", b"text/json"]
)
def test_pages_of_other_origins(kind: bytes) -> None:
    """A browser sends these to strangers without asking; application/json it asks about first."""
    app = App()
    assert post(app, b'{"skip": 0.5}', [(b"content-type", kind), (b"origin", b"https://evil.example")]) == 415
    assert app.calls == []
    assert post(app, b'{"skip": 0.5}', [(b"Content-Type", b"Application/JSON; charset=utf-8")]) == 200


def test_options_needs_no_key_and_preflights_are_vllms() -> None:
    assert request(App(["key"]), "/ace", "OPTIONS") == (200, b'{"allow": "GET, POST, OPTIONS"}')
    asking = [(b"origin", b"https://a.example"), (b"access-control-request-method", b"POST")]
    assert request(App(["key"]), "/ace", "OPTIONS", headers=asking) == (200, b"vllm:a 1\n")


@pytest.mark.parametrize(("error", "status"), [(TimeoutError(), 503), (RuntimeError("engine died"), 500)])
def test_engines_that_give_no_answer(error: Exception, status: int) -> None:
    async def fail(method: str, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        raise error

    app = App()
    app.collective_rpc = fail  # type: ignore[method-assign]
    assert request(app, "/ace")[0] == status


def test_a_worker_resets_only_with_a_budget_that_is_one(configured: Callable[..., Any], mapped: Any) -> None:
    """And says when it is interpolated."""
    worker = AceWorker()
    worker.vllm_config = configured(plan=str(mapped))
    parallel = {"tensor_parallel_size": 1, "rank": 0, "data_parallel_rank": 0}
    worker.vllm_config.parallel_config = SimpleNamespace(**parallel)
    layer = worker.vllm_config.additional_config.skipping.add(0, "model.layers.0", FOUND)
    layer.counts.fill_(5)
    assert "error" in worker.ace_set(skip=0.99, reset=True) and worker.ace_report()["counts"]["0"][1] == [5, 5, 5]
    reply = worker.ace_set(skip=0.5, reset=True)
    assert reply["notices"] == [] and reply["counts"]["0"][1] == [0, 0, 0]
    (notice,) = http.together([worker.ace_set(skip=0.4), worker.ace_set(skip=0.4)])["notices"]
    assert "between measured budgets" in notice


def test_server_without_skipping_does_not_start() -> None:
    async def nothing(method: str, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"error": "Skipping is not configured in this server."}]

    app = App()
    app.collective_rpc = nothing  # type: ignore[method-assign]
    sent = messages(app, {"type": "lifespan"}, [{"type": "lifespan.startup"}])
    assert [m["type"] for m in sent] == ["lifespan.startup.failed"] and "not configured" in sent[0]["message"]


def test_processes_that_read_different_plans_do_not_serve() -> None:
    """Further nodes and further front ends read files of their own."""
    replies = [{**reply(0), "plan": "a"}, {**reply(1), "plan": "a"}]

    async def both(method: str, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        return replies

    app = App()
    app.collective_rpc = both  # type: ignore[method-assign]
    app.vllm_config = SimpleNamespace(additional_config={"ace": {"plan_sha256": "a"}})  # type: ignore[attr-defined]
    assert "startup.failed" not in str(messages(app, {"type": "lifespan"}, [{"type": "lifespan.startup"}]))
    for plan, own in (("b", "a"), ("a", "b")):
        replies[1]["plan"], app.vllm_config.additional_config["ace"]["plan_sha256"] = plan, own  # type: ignore[attr-defined]
        (sent,) = messages(app, {"type": "lifespan"}, [{"type": "lifespan.startup"}])
        assert sent["type"] == "lifespan.startup.failed" and "different plans" in sent["message"]


def test_metrics_are_added_to_vllms_page() -> None:
    """With vLLM's own labels, so that both can be joined."""
    pytest.importorskip("prometheus_client")
    status, body = request(App(), "/metrics", headers=[(b"accept-encoding", b"gzip")])
    lines = body.decode().splitlines()
    assert status == 200 and lines[0] == "vllm:a 1"

    def at(phase: str, layer: str = "") -> str:
        return f'{{engine="0",{layer and f"layer={json.dumps(layer)},"}model_name="served",phase="{phase}"}}'

    assert f"ace:slots_kept_total{at('decode', '2')} 4.0" in lines
    assert f"ace:realised_ratio{at('prefill', '2')} 0.5" in lines
    assert f"ace:threshold{at('decode')} 0.2" in lines and f"ace:budget{at('decode')} 0.5" in lines
    assert f"ace:threshold{at('verify')} 0.2" in lines
    assert not any(line.startswith("ace:slots") and "verify" in line for line in lines)  # nothing was drafted
