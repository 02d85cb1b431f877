"""The loopback hub with an account: repositories are made, files come in by commit, large ones through their store."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from checkpoint.hub_server import Handler, Hub

TOKEN = "hf_" + "x" * 30


class Account(Handler):
    """What a push asks for: create, validate the card, how to upload, the store for large files, commit."""

    hub: PlanHub

    def do_GET(self) -> None:  # noqa: N802
        repository = re.match(r"/api/models/([^/?]+/[^/?]+)", self.path)
        if repository and repository[1] != self.hub.name:
            return self._missing()
        super().do_GET()

    def _file(self, body: bool) -> None:
        name, revision = re.match(r"/([^/]+/[^/]+)/resolve/([^/]+)/", self.path).groups()  # type: ignore[union-attr]
        if name != self.hub.name:
            return self._missing()
        if revision not in ("main", self.hub.commit):
            return self._missing("RevisionNotFound")
        super()._file(body)

    def _missing(self, code: str = "RepoNotFound") -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json(401, {"error": "Invalid username or password."})
        answers = {
            r"/api/repos/create": self._create,
            r"/api/validate-yaml": lambda _: {"errors": [], "warnings": []},
            r".*/preupload/main": self._modes,
            r".*\.git/info/lfs/objects/batch": self._store,
            r".*/commit/main": self._commit,
        }
        path = self.path.partition("?")[0]
        answer = next(answer for pattern, answer in answers.items() if re.fullmatch(pattern, path))
        self._json(200, answer(body))

    def do_PUT(self) -> None:  # noqa: N802
        self.hub.store[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._json(200, {})

    def _create(self, body: bytes) -> dict[str, Any]:
        asked = json.loads(body)
        self.hub.name = f"{asked['organization']}/{asked['name']}"
        self.hub.private = asked.get("private") or asked.get("visibility") == "private"  # older and newer clients
        return {"url": f"{self.hub.url}/{self.hub.name}", "name": self.hub.name}

    def _modes(self, body: bytes) -> dict[str, Any]:
        files = [f["path"] for f in json.loads(body)["files"]]
        mode = {True: "lfs", False: "regular"}
        return {
            "files": [{"path": p, "uploadMode": mode[p.endswith(".safetensors")], "shouldIgnore": False} for p in files]
        }

    def _store(self, body: bytes) -> dict[str, Any]:
        objects = json.loads(body)["objects"]
        urls = {o["oid"]: {"upload": {"href": f"{self.hub.url}/store/{o['oid']}"}} for o in objects}
        return {"transfer": "basic", "objects": [{**o, "actions": urls[o["oid"]]} for o in objects]}

    def _commit(self, body: bytes) -> dict[str, Any]:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                (self.hub.folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            if line["key"] == "lfsFile":
                (self.hub.folder / value["path"]).write_bytes(self.hub.store[value["oid"]])
        self.hub.commits += 1
        self.hub.commit = self.hub.answered = f"{self.hub.commits:x}" * 40
        return {"commitUrl": f"{self.hub.url}/{self.hub.name}/commit/{self.hub.commit}", "commitOid": self.hub.commit}


class PlanHub(Hub):
    """Has no repository until one is made."""

    handler = Account

    def __init__(self, folder: Path):
        self.store: dict[str, bytes] = {}
        self.private, self.commits = False, 0
        super().__init__(folder, name="")
