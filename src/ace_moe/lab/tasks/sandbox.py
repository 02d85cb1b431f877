"""Running code a model wrote: only when asked, in a process of its own with little time, memory and nothing to inherit.

This stops accidents (endless loops, full memory, a filled disk), not a determined attacker: for code of unknown intent
use a container or a virtual machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from ...errors import OptionError

# Limits are set in the child itself, by its first lines: code between fork and exec is unsafe where threads run.
START = """
import resource, runpy, sys
cpu, memory, file = (int(value) for value in sys.argv[1:4])
for kind, value in ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory << 20), (resource.RLIMIT_FSIZE, file << 20),
                    (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (value, value))
sys.argv = ["program.py"]
runpy.run_path("program.py", run_name="__main__")
"""


@dataclass(frozen=True)
class Limits:
    """CPU seconds, memory and written files in MiB; wall-clock seconds come on top, for code that waits."""

    cpu_seconds: int = 10
    memory: int = 1024
    file: int = 16
    seconds: float = 20.0


def check_allowed(allowed: bool, what: str) -> None:
    if not allowed:
        raise OptionError(
            f"{what} runs code that the model wrote. If that is acceptable on this machine, say so with --run-code."
        )


def passes(program: str, limits: Limits | None = None) -> bool:
    """True if the program ends by itself without an error, inside the limits."""
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="ace-code-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="replace")
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", START, *map(str, astuple(limits)[:3])],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return child.wait(limits.seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):  # what it started may outlive it
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
