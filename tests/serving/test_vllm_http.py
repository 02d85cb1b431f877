"""What the middleware adds to vLLM's server: the /ace route behind the server's key, a refusal to start, and metrics."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from serving_parts import reply

from ace_moe.integrations.vllm.http import AceMiddleware


class App:
    """An ASGI app with a metrics page, and an engine that answers RPCs."""

    def __init__(self, key: list[str] | None = None):
        self.state = SimpleNamespace(engine_client=self, args=SimpleNamespace(api_key=key))
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        self.calls.append((method, kwargs))
        return [reply(0)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"9")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"vllm:a 1\n"})


def request(app: App, path: str, method: str = "GET", body: bytes = b"", headers: Any = ()) -> tuple[int, bytes]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method, "headers": list(headers), "app": app}
    asyncio.run(AceMiddleware(app)(scope, receive, send))
    length = dict(sent[0]["headers"])[b"content-length"]
    assert int(length) == len(sent[1]["body"])
    return sent[0]["status"], sent[1]["body"]


def test_routes_and_keys() -> None:
    assert request(App(), "/other") == (200, b"vllm:a 1\n")
    status, body = request(App(), "/ace")
    report = json.loads(body)
    assert status == 200 and report["threshold"] == {"prefill": 0.1, "decode": 0.2, "verify": 0.2}
    assert report["executors"] == {"native": 2} and report["refused"] == {"kernels": "switched off"}
    app = App()
    assert request(app, "/ace", "POST", b'{"skip": 0.4, "reset": true}')[0] == 200
    assert app.calls == [("ace_reset", {}), ("ace_set", {"skip": 0.4})]
    for bad in (b"", b"[]", b"{}", b'{"skp": 1}', b"\xff"):
        assert request(App(), "/ace", "POST", bad)[0] == 400
    assert request(App(), "/ace", "DELETE")[0] == 405
    assert request(App(["key"]), "/ace")[0] == 401
    assert request(App(["key"]), "/ace", headers=[(b"authorization", b"Bearer key")])[0] == 200


def test_server_without_skipping_does_not_start() -> None:
    async def nothing(method: str, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"error": "Skipping is not configured in this server."}]

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    app, sent = App(), []  # type: ignore[var-annotated]
    app.collective_rpc = nothing  # type: ignore[method-assign]
    asyncio.run(AceMiddleware(app)({"type": "lifespan", "app": app}, receive, send))
    assert [m["type"] for m in sent] == ["lifespan.startup.failed"] and "not configured" in sent[0]["message"]


def test_metrics_are_added_to_vllms_page() -> None:
    pytest.importorskip("prometheus_client")
    status, body = request(App(), "/metrics", headers=[(b"accept-encoding", b"gzip")])
    lines = body.decode().splitlines()
    assert status == 200 and lines[0] == "vllm:a 1"
    assert 'ace:slots_kept_total{layer="2",phase="decode"} 4.0' in lines
    assert 'ace:realised_ratio{layer="2",phase="prefill"} 0.5' in lines
    assert 'ace:threshold{phase="decode"} 0.2' in lines and 'ace:budget{phase="decode"} 0.5' in lines
    assert 'ace:threshold{phase="verify"} 0.2' in lines
    assert not any(line.startswith("ace:slots") and "verify" in line for line in lines)  # nothing was drafted
