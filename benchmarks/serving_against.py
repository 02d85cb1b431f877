"""Two versions of this package in vLLM, and vLLM alone, timed in one run: three engines in processes of their own, asked in turn.

    python benchmarks/serving_against.py OTHER --layers 24 --batches 1 4 9 16 64 -o serving_against_h200.json

`OTHER` is a checkout of the version to compare with (`git worktree add OTHER COMMIT`); each version's engine is made by its own
`benchmarks/serving.py`. Engines start at the same time, which takes as long as one; thresholds are found with this version, so
both skip the same slots. Ratios are of medians over the rounds. 9 requests run in a graph captured for 16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
ROUNDS = 7


class Worker:
    """One engine, by the `serving.py` of its version; knows only what both versions have."""

    def __init__(self, ace: bool, options: argparse.Namespace):
        import serving

        sizes = dict(serving.TINY if options.tiny else serving.QWEN3_30B)
        sizes |= {"num_hidden_layers": options.layers} if options.layers else {}
        self.serving, self.options, self.ace = serving, options, ace
        self.vocabulary = int(sizes["vocab_size"])
        self.folder = tempfile.TemporaryDirectory()
        model = serving.write_model(Path(self.folder.name) / "model", sizes)
        plan = serving.write_plan(Path(self.folder.name) / "plan.safetensors", sizes)
        off = {"restore": False} if options.alone else {}  # a version that knows restored slots leaves them out
        given = serving.engine_args(plan, 0.0, allow_other_weights=True, **off) if ace else {}
        self.llm = serving.start(model, options, **given)
        self.time(None, max(options.batches), 8)

    def time(self, tau: float | None, batch: int, tokens: int) -> tuple[float, float]:
        """(milliseconds a token, ratio that was skipped)."""
        if self.ace:
            self.serving.set_threshold(self.llm, tau or 0.0)
            self.serving.reset(self.llm)
        _, seconds = self.serving.generate(self.llm, batch, self.options.prompt, tokens, 1, self.vocabulary)
        return 1e3 * seconds, self.serving.report(self.llm)["decode"]["realised"] if self.ace else 0.0

    def settle(self, ratio: float, batch: int, tokens: int) -> float:
        low, high = 0.0, 0.5
        for _ in range(10):
            middle = (low + high) / 2
            low, high = (middle, high) if self.time(middle, batch, tokens)[1] < ratio else (low, middle)
        return (low + high) / 2


def serve(options: argparse.Namespace) -> None:
    """Answer requests, one JSON line each."""
    worker = Worker(options.serve == "ace", options)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(*arguments)), flush=True)


class Engine:
    """A worker's process, seen from here."""

    def __init__(self, tree: Path, kind: str, options: argparse.Namespace, alone: bool):
        given = [f"--memory={options.memory}", f"--cache={options.cache}", f"--length={options.length}"]
        given += [f"--prompt={options.prompt}", "--batches", *map(str, options.batches)]
        given += [f"--layers={options.layers}"] if options.layers else []
        given += [flag for flag, on in (("--tiny", options.tiny), ("--eager", options.eager), ("--alone", alone)) if on]
        paths = os.pathsep.join([str(tree / "benchmarks"), str(tree / "src")])
        command = [sys.executable, str(Path(__file__).resolve()), f"--serve={kind}", *given]
        environment = {**os.environ, "PYTHONPATH": paths}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, cwd=tree / "benchmarks", **pipes)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # vLLM prints as well
            try:
                return json.loads(line)
            except ValueError:
                print(line, end="", file=sys.stderr)
        raise SystemExit("an engine's process ended")

    def ask(self, *request: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer()


def measure(engines: dict[str, Engine], batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    tokens, rows = options.decode + 1, []
    for ratio in (0.0, options.ratio):
        tau = engines["this"].ask("settle", ratio, batch, tokens) if ratio else 0.0
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(ROUNDS):
            for name, engine in engines.items():
                times[name].append(engine.ask("time", tau, batch, tokens)[0])
        ms = {name: statistics.median(found) for name, found in times.items()}
        ratios = {f"this_over_{name}": ms["this"] / value for name, value in ms.items() if name != "this"}
        rows.append({"batch": batch, "ratio": ratio, "threshold": tau, "ms": ms, **ratios})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--serve", choices=["ace", "stock"], help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, for a CPU")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 9, 16, 64])
    parser.add_argument("--ratio", type=float, default=0.6)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--memory", type=float, default=0.3)
    parser.add_argument("--cache", type=float, default=3.0)
    parser.add_argument("--length", type=int, default=640)
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    if options.serve:
        return serve(options)
    other = options.other.resolve()
    engines = {"this": Engine(HERE, "ace", options, True), "other": Engine(other, "ace", options, False)}
    engines["stock"] = Engine(HERE, "stock", options, False)
    for engine in engines.values():
        engine.answer()
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        rows += measure(engines, batch, options)
        if options.out:
            command = "python benchmarks/serving_against.py OTHER " + " ".join(sys.argv[2:])
            options.out.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
    for engine in engines.values():
        engine.process.kill()


if __name__ == "__main__":
    main()
