"""Processes that hold one version of this package each, asked in turn by JSON lines: two versions timed in one run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]


class Version:
    """A process that runs `script --serve` on a version's source; a call is a request, its result the answer."""

    def __init__(self, script: str, root: Path, flags: list[str], **environment: str):
        paths = os.pathsep.join([str(root / "src"), str(root / "benchmarks")])
        command = [sys.executable, "-P", str(Path(script).resolve()), "--serve", *flags]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths, **environment},
        )  # fmt: skip

    def wait(self) -> Any:
        """The next answer; the first says that the process is ready."""
        assert self.process.stdout is not None
        for line in self.process.stdout:  # libraries may print as well
            try:
                return json.loads(line)
            except ValueError:
                print(line, end="", file=sys.stderr)
        raise SystemExit("a version's process ended")

    def end(self) -> None:
        """With whatever it started: an engine's workers would outlive it."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self.process.stdin.flush()
            return self.wait()

        return ask


def serve(worker: Any) -> None:
    """In the process: answer requests, one JSON line each."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(*arguments)), flush=True)
