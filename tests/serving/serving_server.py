"""`ace serve` in a process of its own, and a client of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving_cases import MAX_TOKENS, environment

KEY = "a-key"


class Server:
    def __init__(self, port: int, model: str, pid: int):
        self.port, self.model, self.pid = port, model, pid

    def send(
        self, path: str, body: Any = None, key: str | None = KEY, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json", **(headers or {})}
        )
        if key:
            request.add_header("authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def complete(self, prompt: str, tokens: int = MAX_TOKENS, **more: Any) -> dict[str, Any]:
        return self.reply(prompt, tokens, **more)["choices"][0]

    def reply(self, prompt: str, tokens: int, headers: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        status, text = self.send("/v1/completions", body, headers=headers)
        assert status == 200, text
        return json.loads(text)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_command(
    model: Path, port: int, *options: str, cached: bool = False, length: int = 512
) -> tuple[list[str], dict[str, str]]:
    """`ace serve` and its environment."""
    caching = "--enable-prefix-caching" if cached else "--no-enable-prefix-caching"
    command = [
        str(Path(sys.executable).parent / "ace"), "serve", str(model), *options, "--port", str(port), "--dtype", "float32",
        "--max-model-len", str(length), "--enforce-eager", caching, "--api-key", KEY, "--no-restore",
    ]  # fmt: skip
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return command, {**environment(), **quiet}


@contextmanager
def serving(
    log: Path, model: Path, *options: str, cached: bool = False, length: int = 512, **more: str
) -> Iterator[Server]:
    """`cached`: with vLLM's prefix cache."""
    port = free_port()
    command, env = serve_command(model, port, *options, cached=cached, length=length)
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env={**env, **more}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(port, str(model), process.pid)
    try:
        _wait(process, server, log)
        yield server
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its engine too


def _wait(process: subprocess.Popen[bytes], server: Server, log: Path) -> None:
    for _ in range(900):
        assert process.poll() is None, log.read_text()[-6000:]
        try:
            if server.send("/health")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(1)
    raise AssertionError(log.read_text()[-6000:])
