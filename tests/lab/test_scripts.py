"""Every script finds what it imports: a name that moved is met here, not on a rented GPU. Those that need vLLM are left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
# in a process of its own: some scripts set variables and paths for the engines they start
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("vllm", "triton"):
            raise
    print(name)
"""


def test_every_script_can_be_imported() -> None:
    names = [script.stem for script in SCRIPTS]
    ran = subprocess.run([sys.executable, "-c", IMPORT, *names], cwd=SCRIPTS[0].parent, capture_output=True, text=True)
    assert ran.stdout.split() == names, ran.stderr
