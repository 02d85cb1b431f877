"""A long run of one target by command: python tests/fuzz/run.py plan --count 1000000

Stops at the first input that raises anything but an error of ours, takes over a second of this process's own time or
brings it over 1 GiB, and keeps that input under tests/fuzz/corpus. Prints what was run. With `--atheris` (if it is
installed) inputs are found by coverage instead.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

from mutate import mutated  # noqa: E402
from targets import TARGETS, Target  # noqa: E402

from ace_moe import AceError  # noqa: E402

SLOWEST, LARGEST = 1.0, 1 << 30  # seconds of CPU, bytes


def corpus(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((HERE / "corpus" / name).iterdir())]


def tried(target: Target, data: bytes) -> tuple[bool, float]:
    """(whether it was taken, seconds of CPU); anything but an error of ours goes on up."""
    start = time.process_time()
    try:
        target(data)
        taken = True
    except AceError:
        taken = False
    return taken, time.process_time() - start


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def keep(name: str, data: bytes) -> Path:
    path = HERE / "corpus" / name / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def run(name: str, count: int, seed: int) -> dict[str, Any]:
    target, seeds, slowest, taken = TARGETS[name], corpus(name), 0.0, 0
    for data in seeds:
        tried(target, data)  # what is read once is read before memory is looked at
    start, before = time.perf_counter(), memory()
    for number in range(count):
        rng = random.Random(seed + number)
        data = mutated(rng.choice(seeds), rng)
        try:
            fine, seconds = tried(target, data)
            assert seconds < SLOWEST, f"{seconds:.2f} s"
            assert memory() < LARGEST or memory() - before < LARGEST // 4, f"{memory() >> 20} MiB"
        except BaseException:
            print(f"input {number} of {name}: kept as {keep(name, data)}", file=sys.stderr)
            raise
        slowest, taken = max(slowest, seconds), taken + fine
    done = {"target": name, "inputs": count, "seed": seed, "taken": taken, "refused": count - taken}
    return {
        **done,
        "slowest_s": round(slowest, 4),
        "peak_MiB": memory() >> 20,
        "minutes": round((time.perf_counter() - start) / 60, 1),
    }


def guided(name: str, count: int) -> None:
    import atheris

    def once(data: bytes) -> None:
        tried(TARGETS[name], data)

    atheris.Setup([sys.argv[0], f"-runs={count}", str(HERE / "corpus" / name)], atheris.instrument_func(once))
    atheris.Fuzz()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("target", choices=TARGETS)
    asked.add_argument("--count", type=int, default=10_000)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--atheris", action="store_true")
    given = asked.parse_args()
    if given.atheris:
        return guided(given.target, given.count)
    print(run(given.target, given.count, given.seed))


if __name__ == "__main__":
    main()
