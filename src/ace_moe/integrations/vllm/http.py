"""`/ace` beside vLLM's own routes, and our lines on its `/metrics`: a middleware, vLLM's way to extend its server.

    GET  /ace                       the report: budget, thresholds, realised ratio in all, by phase and by layer
    POST /ace {"skip": 0.4}         another budget, at once; {"skip": {"prefill": 0.5, "decode": 0.3}} by phase;
                                    {"threshold": 0.12} sets τ itself; {"reset": true} sets the counters to zero

With --api-key (or VLLM_API_KEY) these need the key, as vLLM's /v1 routes do.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from typing import Any

from ...errors import AceError, OptionError, brief
from .control import together
from .metrics import exposition

PATH = "/ace"
KNOWN = {"skip", "threshold", "reset"}
LARGEST = 1 << 16  # bytes of a request
PATIENCE = 30.0  # seconds to wait for the workers


class AceMiddleware:
    """Pure ASGI: everything that is not ours passes through untouched."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", "")).rstrip("/")
        if scope["type"] == "http" and path == PATH:
            await answer(scope, receive, send)
        elif scope["type"] == "http" and path == "/metrics" and scope["method"] == "GET":
            await self._metrics(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._start(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _start(self, scope: Any, receive: Any, send: Any) -> None:
        """A server in whose workers the plugin did not run, or found nothing to skip in, does not start."""
        try:
            await ask(scope, "ace_report")
        except (AceError, TimeoutError) as error:
            await receive()
            return await send(
                {"type": "lifespan.startup.failed", "message": f"ACE: {str(error) or 'no answer from workers'}"}
            )
        await self.app(scope, receive, send)

    async def _metrics(self, scope: Any, receive: Any, send: Any) -> None:
        """vLLM's page, uncompressed, with ours at its end."""
        plain = {
            **scope,
            "headers": [(k, v) for k, v in scope["headers"] if k.lower() not in (b"accept-encoding", b"accept")],
        }
        start: dict[str, Any] = {}
        body = bytearray()

        async def keep(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))

        await self.app(plain, receive, keep)
        if start["status"] == 200:
            body.extend(await _lines(scope))
        headers = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]
        await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": bytes(body)})


async def _lines(scope: Any) -> bytes:
    """Our metrics, or a comment that says why there are none: vLLM's own must not be lost with them."""
    try:
        return exposition(await ask(scope, "ace_report")).encode()
    except Exception as error:
        return f"# ace: no report from the workers: {brief(error)}\n".encode()


async def ask(scope: Any, method: str, **arguments: Any) -> dict[str, Any]:
    """One answer from all workers."""
    client = scope["app"].state.engine_client
    return together(await asyncio.wait_for(client.collective_rpc(method, kwargs=arguments), PATIENCE))


# ---- /ace -------------------------------------------------------------------------------------------------------


async def answer(scope: Any, receive: Any, send: Any) -> None:
    if not allowed(scope):
        return await _reply(send, 401, {"error": "Unauthorized"})
    try:
        if scope["method"] == "GET":
            return await _reply(send, 200, await ask(scope, "ace_report"))
        if scope["method"] == "POST":
            return await _reply(send, 200, await _change(scope, _wanted(await _body(receive))))
    except AceError as error:
        return await _reply(send, 400, {"error": str(error)})
    except TimeoutError:
        return await _reply(send, 503, {"error": f"The workers did not answer within {PATIENCE:.0f} seconds."})
    await _reply(send, 405, {"error": "GET reads the report, POST changes the budget."})


async def _change(scope: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    if wanted.pop("reset", False):
        report = await ask(scope, "ace_reset")
        if not wanted:
            return report
    return await ask(scope, "ace_set", **wanted)


def _wanted(body: bytes) -> dict[str, Any]:
    try:
        wanted = json.loads(body)
    except ValueError:
        wanted = None
    if not isinstance(wanted, dict) or not wanted or set(wanted) - KNOWN:
        raise OptionError('Send a JSON object such as {"skip": 0.4}, {"threshold": 0.12} or {"reset": true}.')
    return wanted


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more and len(body) <= LARGEST:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body[: LARGEST + 1]


def allowed(scope: Any) -> bool:
    """The same keys as for vLLM's /v1 routes."""
    args = getattr(scope["app"].state, "args", None)
    keys = [k for k in (getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]) if k]
    if not keys:
        return True
    header = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    scheme, _, given = header.partition(" ")
    digest = hashlib.sha256(given.encode()).digest()
    matches = [secrets.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)


async def _reply(send: Any, status: int, value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
