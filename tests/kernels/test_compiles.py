"""Every kernel compiles for the GPUs we name, on a machine without one, within their shared memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

pytest.importorskip("triton")


@pytest.mark.parametrize("capability", [90, *(pytest.param(c, marks=pytest.mark.slow) for c in (80, 89, 120))])
def test_kernels_compile(capability, tmp_path):
    said = compile_kernels(str(capability), cache=tmp_path)
    assert all(
        name in said
        for name in ("one_down", "many_down", "sort", "place", "decide", "route", "restore", "vote", "attend", "gemv")
    )


def test_no_size_is_compiled_while_serving(tmp_path):
    """What an engine has run before its first request covers every number of tokens after it."""
    said = compile_kernels("90", "builds", cache=tmp_path)
    assert said.endswith("builds, 0 met later") and int(said.split()[0]) < 60


def compile_kernels(*arguments, cache):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    program = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), *arguments]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()
