"""SIGKILL at random moments of the commands that write: python tests/fuzz/kills.py --count 200

After each kill the output is the old file or a new one that can be read, inputs are untouched, and after the next run
that ends by itself nothing else is left in the folder. Half of the kills come after a random time, half inside the
write: right before or after a file is opened, flushed or moved.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from ace_moe import Plan, cli  # noqa: E402
from ace_moe.demo import MODEL, TEXT  # noqa: E402
from ace_moe.lab.report.page import is_page  # noqa: E402

torch.set_num_threads(1)  # a process with threads cannot be forked safely
SMALL = ("--tokens", "64", "--window", "32", "--device", "cpu", "--budgets", "0.5")
CALLS = ("open", "fsync", "replace")


def results(path: Path) -> None:
    assert json.loads(path.read_text())["kind"] == "compare"


def page(path: Path) -> None:
    assert is_page(path) and path.read_text().rstrip().endswith("</html>")


def command(name: str, *arguments: str) -> tuple[str, ...]:
    return (name, str(MODEL), "--text", str(TEXT), *arguments, *SMALL)


TUNE = command("tune", "-p", "plan.safetensors", "--no-mean")
# command → (arguments, its output, how the output is read)
COMMANDS: dict[str, tuple[tuple[str, ...], str, Callable[[Path], Any]]] = {
    "tables": (("plan", str(MODEL), "--tables", "-o", "plan.safetensors"), "plan.safetensors", Plan.load),
    "budget": (command("plan", "-p", "plan.safetensors", "--again", "--no-fidelity"), "plan.safetensors", Plan.load),
    "tune": ((*TUNE, "--tokens", "128"), "plan.safetensors", Plan.load),
    "compare": (command("compare", "--methods", "share", "-o", "r.json"), "r.json", results),
    "report": (("report", "kept.json", "-o", "page.html"), "page.html", page),
}


def child(arguments: tuple[str, ...], point: tuple[str, int, bool] | None) -> int:
    """The command in a process of its own that kills itself at a point of its writing, if one is given."""
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    if point is not None:
        _arm(*point)
    sys.argv = ["ace", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        os._exit(int(end.code or 0))
    except BaseException:
        os._exit(99)
    os._exit(0)


def _arm(name: str, call: int, after: bool) -> None:
    real, left = getattr(os, name), [call]

    def dying(*args: Any, **kwargs: Any) -> Any:
        if name == "open" and not str(args[0]).endswith(".part"):
            return real(*args, **kwargs)
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(os, name, dying)


def finish(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def one(name: str, rng: random.Random, seconds: float) -> bool:
    """Whether the kill struck before the command had ended."""
    arguments, output, read = COMMANDS[name]
    old = Path(output).read_bytes() if Path(output).exists() else None
    at_write = rng.random() < 0.5
    pid = child(arguments, (rng.choice(CALLS), rng.choice((1, 1, 2, 3)), rng.random() < 0.5) if at_write else None)
    if not at_write:
        time.sleep(rng.random() * seconds)
        os.kill(pid, signal.SIGKILL)
    struck = finish(pid) == -signal.SIGKILL
    if Path(output).exists():
        if Path(output).read_bytes() != old:
            read(Path(output))
    else:
        assert old is None, f"{name}: {output} is gone"
    return struck


def prepared() -> dict[str, float]:
    """Every command once, undisturbed, with the time it takes."""
    took = {}
    for name, (arguments, output, read) in COMMANDS.items():
        start = time.perf_counter()
        code = finish(child(arguments, None))
        assert code == 0, f"{name} ends with {code}"
        took[name] = time.perf_counter() - start
        read(Path(output))
        if name == "compare":
            shutil.copy(output, "kept.json")
    return took


def run(count: int, seed: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="ace-kills-"))
    os.chdir(folder)
    try:
        took, struck, rng = prepared(), 0, random.Random(seed)
        clean = sorted(os.listdir(folder))
        tries = 0
        while struck < count:
            name = list(COMMANDS)[tries % len(COMMANDS)]
            if name == "compare":
                Path("r.json").unlink(missing_ok=True)  # else there is nothing left to do
            struck, tries = struck + one(name, rng, took[name]), tries + 1
        prepared()
        assert sorted(os.listdir(folder)) == clean, f"left behind: {sorted(set(os.listdir(folder)) - set(clean))}"
    finally:
        os.chdir("/")
        shutil.rmtree(folder)
    return {"killed": struck, "ended before": tries - struck, "seed": seed}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--count", type=int, default=20, help="kills, not counting runs that ended before")
    asked.add_argument("--seed", type=int, default=0)
    given = asked.parse_args()
    print(run(given.count, given.seed))


if __name__ == "__main__":
    main()
