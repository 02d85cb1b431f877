"""Every kernel compiles for the GPUs we name, on a machine without one, within their shared memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "capability", [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(89, marks=pytest.mark.slow)]
)
def test_kernels_compile(capability, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), str(capability)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(name in done.stdout for name in ("one_down", "many_down", "sort", "place", "decide", "route", "attend"))
