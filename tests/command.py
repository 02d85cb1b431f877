"""The command `ace` as tests call it: in this process, or as the installed script."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import typer.main

from ace_moe import cli

ACE = Path(sys.executable).with_name("ace")
COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


class Ran(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


def run_ace(*arguments: object) -> Ran:
    """`ace …` in this process, through the entry point the script calls."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["ace", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as stop,
    ):
        cli.main()
    return Ran(int(stop.value.code or 0), out.getvalue(), err.getvalue())


def start_ace(*arguments: object, **options: Any) -> Ran:
    """`ace …` as a process of its own, the installed script."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **options.pop("env", {})}
    done = subprocess.run([ACE, *map(str, arguments)], capture_output=True, text=True, env=environment, **options)
    return Ran(done.returncode, done.stdout, done.stderr)
