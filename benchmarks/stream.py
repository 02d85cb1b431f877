"""`ace tables --stream` of a huge synthetic FP8 checkpoint: disk, memory, time, a kill in the middle, one worker against two.

    python benchmarks/stream.py [--layers 64] [--compare 16] [--out FILE]

A loopback server speaks the hub's file API and makes each shard (one layer of Qwen3-MoE's names, 0.3 GB) when it is asked
for, so that the checkpoint is nowhere on disk. Peak disk and memory are polled while the command runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from running import parser, store
from transformers import Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from ace_moe.provenance import provenance
from checkpoint.hub_server import Handler, Hub

EXPERTS, HIDDEN, MIDDLE, BLOCK = 68, 2048, 768, 128
NAME = "synthetic/fp8"
ACE = "import sys; from ace_moe.cli import main; sys.argv[0] = 'ace'; main()"


def config(layers: int) -> dict[str, Any]:
    made = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=MIDDLE, num_experts=EXPERTS, num_experts_per_tok=8, vocab_size=64,
        num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=2, head_dim=16, intermediate_size=64,
    ).to_dict()  # fmt: skip
    method = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    return {**made, "architectures": ["Qwen3MoeForCausalLM"], "quantization_config": method}


def tensors(layer: int) -> dict[str, tuple[str, list[int]]]:
    """Name → (dtype, shape) of what tables of one layer need."""
    at = f"model.layers.{layer}."
    found = {
        f"{at}post_attention_layernorm.weight": ("BF16", [HIDDEN]),
        f"{at}mlp.gate.weight": ("BF16", [EXPERTS, HIDDEN]),
    }
    for expert in range(EXPERTS):
        for part, (n, k) in (("gate", (MIDDLE, HIDDEN)), ("up", (MIDDLE, HIDDEN)), ("down", (HIDDEN, MIDDLE))):
            name = f"{at}mlp.experts.{expert}.{part}_proj.weight"
            found |= {name: ("F8_E4M3", [n, k]), f"{name}_scale_inv": ("F32", [n // BLOCK, k // BLOCK])}
    return found


@functools.cache
def pool(dtype: str) -> bytes:
    """Random numbers of this type, which every tensor begins at the start of."""
    g = torch.Generator().manual_seed(0)
    count = {"F8_E4M3": HIDDEN * MIDDLE, "F32": 4096, "BF16": EXPERTS * HIDDEN}[dtype]
    values = {"F8_E4M3": 30.0, "F32": 1e-4, "BF16": 0.1}[dtype] * torch.randn(count, generator=g)
    kind = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    values = values.abs() + 1e-5 if dtype == "F32" else values
    return values.to(kind).view(torch.uint8).numpy().tobytes()


class Shard:
    """A file that is made while it is read."""

    def __init__(self, layer: int):
        width, at, header = {"F8_E4M3": 1, "F32": 4, "BF16": 2}, 0, {}
        self.parts: list[tuple[str, int]] = []
        for name, (dtype, shape) in tensors(layer).items():
            size = width[dtype] * functools.reduce(int.__mul__, shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            self.parts.append((dtype, size))
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(8, "little") + text
        self.size = len(self.head) + at

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self.head)
        for dtype, size in self.parts:
            yield memoryview(pool(dtype))[:size]

    @functools.cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece)
        return digest.hexdigest()

    def read(self, first: int, last: int) -> Iterator[memoryview]:
        at = 0
        for piece in self.pieces():
            begin, end = max(first - at, 0), min(last - at, len(piece))
            if begin < end:
                yield piece[begin:end]
            at += len(piece)


class Making(Handler):
    hub: Synthetic

    def _file(self, body: bool) -> None:
        shard = self.hub.shards.get(self.path.partition("?")[0].rpartition("/")[2])
        if shard is None:
            return super()._file(body)
        first, last = self._range(shard.size)
        self.send_response(206 if "Range" in self.headers else 200)
        for name, value in {
            "ETag": f'"{shard.sha256}"', "X-Repo-Commit": self.hub.commit, "Accept-Ranges": "bytes",
            "Content-Range": f"bytes {first}-{last - 1}/{shard.size}", "Content-Length": str(last - first),
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        for piece in shard.read(first, last) if body else ():
            self.wfile.write(piece)


class Synthetic(Hub):
    handler = Making

    def __init__(self, folder: Path, layers: int):
        self.shards = {f"model-{n:05}-of-{layers:05}.safetensors": Shard(n) for n in range(layers)}
        (folder / "config.json").write_text(json.dumps(config(layers)))
        super().__init__(folder, NAME)

    def info(self) -> dict[str, Any]:
        found, files = super().info(), []
        for name, s in self.shards.items():
            lfs = {"sha256": s.sha256, "size": s.size, "pointerSize": 1}
            files.append({"rfilename": name, "size": s.size, "blobId": "b", "lfs": lfs})
        return {**found, "siblings": [*found["siblings"], *files]}


# ---- the command and what it takes ------------------------------------------------------------------------------------


class Watched:
    """`ace tables --stream` in a session of its own; peaks of disk and of all its processes' memory together."""

    def __init__(self, hub: Synthetic, home: Path, output: Path, *options: str, stop_after: int | None = None):
        self.home, self.parts, self.stop_after = home, Path(f"{output}.layers"), stop_after
        self.disk = self.memory = 0
        home.mkdir(exist_ok=True)
        settings = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home), "TMPDIR": str(home)}
        settings |= {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", ACE, "tables", NAME, "-o", str(output), "--stream", *options]
        start = time.perf_counter()
        self.process = subprocess.Popen(
            command, env=os.environ | settings, start_new_session=True, stdout=subprocess.DEVNULL
        )
        while self.process.poll() is None:
            self._look()
            time.sleep(0.1)
        self.seconds = time.perf_counter() - start

    def _look(self) -> None:
        self.disk = max(
            self.disk, sum(_size(p) for p in self.home.rglob("*") if p.suffix in (".safetensors", ".incomplete"))
        )
        self.memory = max(self.memory, session_memory(self.process.pid))
        if self.stop_after is not None and len(done(self.parts)) >= self.stop_after:
            os.killpg(self.process.pid, signal.SIGKILL)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def session_memory(session: int) -> int:
    """Private and shared bytes in memory of every process of the session."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                total += int((stat.parent / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            continue
    return total


def done(parts: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in parts.glob("*.safetensors")} if parts.exists() else {}


def facts(run: Watched) -> dict[str, float]:
    return {"seconds": run.seconds, "peak_disk_gb": run.disk / 1e9, "peak_memory_gb": run.memory / 1e9}


def main() -> None:
    made = parser(__doc__, layers=64)
    made.add_argument("--compare", type=int, default=16, help="layers for one worker against two")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "remote").mkdir()
        hub = Synthetic(folder / "remote", options.layers)
        hub.info()  # hashes once, before anything is timed
        size = sum(s.size for s in hub.shards.values())
        result: dict[str, Any] = {"gb": size / 1e9, "layers": options.layers, "shard_gb": size / options.layers / 1e9}
        result |= measure(hub, folder, options.layers, options.compare)
        hub.close()
    result["provenance"] = provenance("cpu")
    print(json.dumps({k: v for k, v in result.items() if k != "provenance"}, indent=1))
    store(options.out, result)


def measure(hub: Synthetic, folder: Path, layers: int, compare: int) -> dict[str, Any]:
    some = ("--layers", f"0:{compare}")
    one = Watched(hub, folder / "one", folder / "one.safetensors", *some)
    two = Watched(hub, folder / "two", folder / "two.safetensors", *some, "--workers", "2")
    found = {"compared_layers": compare, "one_worker": facts(one), "two_workers": facts(two)}
    found["two_over_one"] = one.seconds / two.seconds
    plan = folder / "plan.safetensors"
    killed = Watched(hub, folder / "whole", plan, stop_after=layers // 2)
    before = done(killed.parts)
    seen: dict[str, int] = {}
    threading.Thread(target=_follow, args=(killed.parts, seen, stop := threading.Event()), daemon=True).start()
    resumed = Watched(hub, folder / "whole", plan)
    stop.set()
    again = [name for name, when in before.items() if seen.get(name, when) != when]
    found |= {"killed_after_layers": len(before), "killed": facts(killed), "resumed": facts(resumed)}
    return found | {"layers_made_again": len(again), "plan_written": plan.exists()}


def _follow(parts: Path, seen: dict[str, int], stop: threading.Event) -> None:
    """When each part was last written, while the folder is there: it goes when the plan is written."""
    while not stop.wait(0.2):
        seen.update(done(parts))


if __name__ == "__main__":
    main()
