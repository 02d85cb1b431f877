"""transformers' own model and generation tests, with a plan attached to every MoE model that they build.

    python benchmarks/upstream.py path/to/transformers --out benchmarks/results/upstream.json

The path is a checkout of the installed version's tag: its tests run, against the installed package. Each family runs
without ACE, then at each wanted part of slots skipped. Exit status 1 if a test that passes without ACE does not with it.
Needs what those tests import: `pip install parameterized datasets httpx`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from running import parser, store
from upstream_plugin import STOCK

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v3")
STATES = {"passed": "passed", "failed": "failed", "errors": "error", "skipped": "skipped"}
# asks which of transformers' own implementations was called; with a plan ours is, whatever was set
BY_DESIGN = ("test_eager_matches_batched_and_grouped_inference",)
TRAINS = "of a model in training mode records gradients"  # a refusal of ours
COLUMNS = (*STATES, "with_ace", "realised", "seconds")
Result = dict[str, Any]


def run(checkout: Path, family: str, mode: str, select: str) -> Result:
    """One family in a process of its own, because the plugin changes transformers' classes."""
    path = f"{Path(__file__).resolve().parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        plugin = ["-p", "upstream_plugin", "-p", "no:cacheprovider", "--ace-mode", mode, "--ace-out", str(out)]
        command = [sys.executable, "-m", "pytest", f"tests/models/{family}", "-q", "-k", select, *plugin]
        env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
        found = json.loads(out.read_text()) if out.exists() else {}
    if not found.get("outcomes"):
        raise SystemExit(f"No test of {family} ran:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return found | {"seconds": round(time.perf_counter() - start)}


def summary(found: Result, stock: Result) -> Result:
    """Counts, and under `lost` every test that passed without ACE and did not here."""
    outcomes = found["outcomes"]
    counts = {title: sum(o == state for o in outcomes.values()) for title, state in STATES.items()}
    lost = [n for n, outcome in stock["outcomes"].items() if outcome == "passed" and outcomes.get(n) != "passed"]
    meant = [n for n in lost if any(d in n for d in BY_DESIGN) or TRAINS in found["reasons"].get(n, "")]
    lost = [n for n in lost if n not in meant]
    failures = [f"{name}: {reason}" for name, reason in found["reasons"].items()]
    rest = {key: found[key] for key in ("with_ace", "realised", "seconds")}
    return {**counts, **rest, "lost": lost, "by_design": meant, "failures": failures}


def show(family: str, mode: str, row: Result) -> None:
    """A line of the table; `with_ace` counts tests in which a model with a plan ran."""
    numbers = (f"{row[name]:.1%}" if name == "realised" else row[name] for name in COLUMNS)
    print(f"{family:<12}{mode:<6}" + "".join(f"{n:>9}" for n in numbers), flush=True)
    for name in row["lost"]:
        print(f"    passes without ACE: {name}", flush=True)


def main() -> None:
    made = parser(__doc__, families=list(FAMILIES))
    made.add_argument("checkout", type=Path)
    made.add_argument("--skip", nargs="+", default=["0", "0.5"], help="parts of slots to skip, about")
    made.add_argument("-k", dest="select", default="", help="tests, as for pytest")
    options = made.parse_args()
    print(f"{'family':<12}{'mode':<6}" + "".join(f"{name:>9}" for name in COLUMNS))
    table: dict[str, dict[str, Result]] = {}
    for family in options.families:
        stock = run(options.checkout, family, STOCK, options.select)
        for mode in (STOCK, *options.skip):
            found = stock if mode == STOCK else run(options.checkout, family, mode, options.select)
            row = table.setdefault(family, {})[mode] = summary(found, stock)
            show(family, mode, row)
            store(options.out, table)
    sys.exit(any(row["lost"] for rows in table.values() for row in rows.values()))


if __name__ == "__main__":
    main()
