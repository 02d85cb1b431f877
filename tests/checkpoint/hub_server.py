"""A loopback server that speaks the hub's file API, drops connections, and may change a revision midway."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Hub:
    """Serves one folder as `owner/name` at one commit. `drops`: how often a file's body breaks off in the middle."""

    handler: type[Handler]

    def __init__(self, folder: Path, name: str = "owner/tiny"):
        self.folder, self.name, self.commit = folder, name, "a" * 40
        self.answered = self.commit  # the commit that answers name: another one where the revision changed
        self.drops: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (self.handler,), {"hub": self}))
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def info(self) -> dict[str, Any]:
        files = sorted(p for p in self.folder.iterdir() if p.is_file())
        siblings = [{"rfilename": p.name, "size": p.stat().st_size, "blobId": "b", "lfs": _lfs(p)} for p in files]
        about = {"id": self.name, "modelId": self.name, "sha": self.commit, "private": False, "tags": []}
        return {**about, "downloads": 0, "likes": 0, "siblings": siblings}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _lfs(path: Path) -> dict[str, Any] | None:
    data = path.read_bytes()
    return (
        {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
        if path.suffix == ".safetensors"
        else None
    )


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{self.hub.name}"):
            return self._json(200, self.hub.info())
        if path.startswith("/api/"):
            return self._json(404, {"error": "unknown"})
        self._file(body=True)

    def _json(self, code: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, body: bool) -> None:
        file = self.hub.folder / self.path.partition("?")[0].rpartition("/")[2]
        if not file.is_file():
            self.send_response(404)
            for name, value in (
                ("X-Error-Code", "EntryNotFound"),
                ("X-Repo-Commit", self.hub.commit),
                ("Content-Length", "0"),
            ):
                self.send_header(name, value)
            return self.end_headers()
        data = file.read_bytes()
        first, last = self._range(len(data))
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.hub.answered)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(data)}")
        self.send_header("Content-Length", str(last - first))
        self.end_headers()
        if not body:
            return
        if "Range" not in self.headers:
            self.hub.asked[file.name] += 1
        if self.hub.drops[file.name] > 0 and last - first > 2:
            self.hub.drops[file.name] -= 1
            self.wfile.write(data[first : (first + last) // 2])
            self.wfile.flush()
            return self.connection.shutdown(2)
        self.wfile.write(data[first:last])

    def _range(self, size: int) -> tuple[int, int]:
        asked = self.headers.get("Range")
        if not asked:
            return 0, size
        first, _, last = asked.removeprefix("bytes=").partition("-")
        return int(first or 0), min(size, int(last) + 1 if last else size)


Hub.handler = Handler
