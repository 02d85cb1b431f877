"""`/ace` beside vLLM's own routes, and our lines on its `/metrics`: a middleware, vLLM's way to extend its server.

    GET  /ace                       the report: budget, thresholds, realised ratio in all, by phase and by layer
    POST /ace {"skip": 0.4}         another budget, at once; {"skip": {"prefill": 0.5, "decode": 0.3}} by phase;
                                    {"skip": 0.4, "workload": "code.txt"} by the thresholds of that text;
                                    {"threshold": 0.12} sets τ itself; {"restore": false} leaves slots skipped whose
                                    expert is read anyway; {"reset": true} sets the counters to zero

The rules are those of vLLM's /v1 routes: with --api-key (or VLLM_API_KEY) they need the key, a body is
`application/json`, and OPTIONS is open. A request is carried out whole or not at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from typing import Any

from ...budget import Budget
from ...errors import AceError, OptionError, brief
from ...schema import Schema, flag, items, number, record, text
from .control import by_engine, check_start, together
from .metrics import exposition
from .settings import settings_of

PATH = "/ace"
METHODS = "GET, POST, OPTIONS"
LARGEST = 1 << 16  # bytes of a request
PATIENCE = 30.0  # seconds to wait for the workers

TAU = number(0)


def _thresholds(value: Any, where: str) -> None:
    (items(TAU, 2, 3) if isinstance(value, list) else TAU)(value, where)


# what a POST may hold; each name is an argument of the workers' `ace_set`
FIELDS: dict[str, Schema] = {
    "skip": lambda value, where: None,  # `Budget.parse` says what it may be
    "threshold": _thresholds,
    "workload": text,
    "restore": flag,
    "reset": flag,
}
BODY = record({}, FIELDS, closed=True)
EXAMPLES = '{"skip": 0.4}, {"threshold": 0.12} or {"reset": true}'


class RequestError(OptionError):
    """A request that is not carried out, with its status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class AceMiddleware:
    """Pure ASGI: everything that is not ours passes through untouched."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", "")).rstrip("/")
        if scope["type"] == "http" and path == PATH and not _is_preflight(scope):
            await answer(scope, receive, send)
        elif scope["type"] == "http" and path == "/metrics" and scope["method"] == "GET":
            await self._metrics(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._start(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _start(self, scope: Any, receive: Any, send: Any) -> None:
        """Do not start a server in whose workers the plugin did not run or found nothing to skip in, or reads another plan."""
        settings = settings_of(getattr(scope["app"].state.engine_client, "vllm_config", None))
        try:
            check_start(await _replies(scope, "ace_report"), None if settings is None else settings.plan_sha256)
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
        if not start:  # whoever asked has gone
            return
        if start["status"] == 200:
            body.extend(await _lines(scope))
        headers = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]
        await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": bytes(body)})


async def _lines(scope: Any) -> bytes:
    """Our metrics, or a comment that says why there are none: vLLM's own must not be lost with them."""
    try:
        return exposition(by_engine(await _replies(scope, "ace_report")), _served_name(scope)).encode()
    except Exception as error:
        return f"# ace: no report from the workers: {brief(error)}\n".encode()


def _served_name(scope: Any) -> str:
    """The model's name as vLLM labels its own metrics."""
    args = getattr(scope["app"].state, "args", None)
    served = getattr(args, "served_model_name", None) or getattr(args, "model", "")
    return str(served[0] if isinstance(served, list) else served)


async def _replies(scope: Any, method: str, **arguments: Any) -> list[Any]:
    """Of every worker of every engine: the client's own `collective_rpc` sends to all and answers with the first's."""
    client = scope["app"].state.engine_client
    if (every := _utility(client)) is None:
        return await asyncio.wait_for(client.collective_rpc(method, kwargs=arguments), PATIENCE)
    lists = await asyncio.wait_for(every("collective_rpc", method, None, (), arguments), PATIENCE)
    return [reply for engine in lists for reply in engine]


def _utility(client: Any) -> Any:
    """A call to every engine core, where the client has one."""
    return getattr(getattr(client, "engine_core", None), "call_utility_all_async", None)


async def ask(scope: Any, method: str, **arguments: Any) -> dict[str, Any]:
    """One answer from all workers."""
    return together(await _replies(scope, method, **arguments))


# ---- /ace -------------------------------------------------------------------------------------------------------


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Every way a request can go ends here in one reply, or in none if nobody is there to read it."""
    try:
        found = await _handled(scope, receive)
    except RequestError as error:
        return await _reply(send, error.status, {"error": str(error)})
    except AceError as error:
        return await _reply(send, 400, {"error": str(error)})
    except TimeoutError:
        return await _reply(send, 503, {"error": f"The workers did not answer within {PATIENCE:.0f} seconds."})
    except ConnectionError:
        return
    except Exception as error:  # an engine that died raises what it likes
        return await _reply(send, 500, {"error": f"The engine gave no answer ({brief(error)})."})
    await _reply(send, 200, found)


async def _handled(scope: Any, receive: Any) -> dict[str, Any]:
    method = scope["method"]
    if method == "OPTIONS":
        return {"allow": METHODS}
    if not allowed(scope):
        raise RequestError(401, "Unauthorized")
    if method == "GET":
        return await ask(scope, "ace_report")
    if method != "POST":
        raise RequestError(405, "GET reads the report, POST changes the budget.")
    if _header(scope, b"content-type").lower().partition(";")[0].strip() != "application/json":
        raise RequestError(415, "Send the body as application/json.")  # browsers send nothing else to strangers unasked
    wanted = _wanted(await _body(scope, receive))
    if set(wanted) == {"reset"}:
        return await ask(scope, "ace_reset")
    return await ask(scope, "ace_set", **wanted)


def _wanted(body: bytes) -> dict[str, Any]:
    """The body as arguments, checked whole before anything is done about it; what asks for nothing is left out."""
    try:
        wanted = json.loads(body)
        BODY(wanted, "the body")
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"Send a JSON object such as {EXAMPLES}: {brief(error)}.") from None
    if wanted.get("reset") is False:
        del wanted["reset"]
    if not wanted:
        raise RequestError(400, f"The body asks for nothing. Send a JSON object such as {EXAMPLES}.")
    if "skip" in wanted:
        wanted["skip"] = Budget.parse(wanted["skip"]).to_json()
    if "skip" in wanted and "threshold" in wanted:
        raise RequestError(400, "Give either a budget (skip) or a threshold, not both.")
    if "workload" in wanted and "skip" not in wanted:
        raise RequestError(400, "workload says which text's thresholds a budget takes: give skip with it.")
    return wanted


async def _body(scope: Any, receive: Any) -> bytes:
    """The whole body; one that was cut short by a disconnect is none."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > LARGEST:
            raise RequestError(413, f"A request has at most {LARGEST >> 10} KiB.")
    declared = _header(scope, b"content-length")
    if declared.isascii() and declared.isdigit() and int(declared) != len(body):
        raise RequestError(400, f"The body has {len(body)} of the {declared} bytes it should have.")
    return body


def _header(scope: Any, name: bytes) -> str:
    return next((v.decode("latin-1") for k, v in scope["headers"] if k.lower() == name), "")


def _is_preflight(scope: Any) -> bool:
    """A browser that asks whether a page of another origin may: answered by vLLM's own rules (--allowed-origins)."""
    return scope["method"] == "OPTIONS" and bool(_header(scope, b"access-control-request-method"))


def allowed(scope: Any) -> bool:
    """The same keys as for vLLM's /v1 routes."""
    args = getattr(scope["app"].state, "args", None)
    keys = [k for k in (getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]) if k]
    if not keys:
        return True
    scheme, _, given = _header(scope, b"authorization").partition(" ")
    digest = hashlib.sha256(given.encode()).digest()
    matches = [secrets.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)


async def _reply(send: Any, status: int, value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"allow", METHODS.encode())] if status == 405 or "allow" in value else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
