"""Tables on a GPU against the time it takes to bring the same experts there, with the checkpoint in memory (page cache).

    python benchmarks/tables_gpu.py [--layers 4] [--of 48] [--out benchmarks/results/tables_h200.json]

Layers of Qwen3-30B-A3B (128 experts, 2048 × 768), bf16 and block FP8, one format at a time. A layer is timed in turn by
`copy`: safetensors' own reading of its file onto the GPU, packed; `load`: our reader, decoded, every chunk of experts once,
nothing else; `tables`: GSP and RCR of the layer. All three open the file anew. A plan of `--of` layers takes as many times
`tables` and the layer's share of the fingerprint; `over_load` is its ratio to as many `load`: at most 1.5 is the aim. Opening
the checkpoint (structure and headers), which both need, is told apart.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from running import parser, store
from safetensors.torch import load_file
from tables_memory import write_checkpoint

from ace_moe.checkpoint import MoEModel, Site
from ace_moe.provenance import provenance
from ace_moe.tables import PAPER, tables_of

REPEATS = 5


def timed(work: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def load(moe: MoEModel, site: Site, device: str) -> None:
    layer = moe.layer(site).to(device)
    for chunk in layer.chunks():
        layer.projections(chunk)


def layer_times(moe: MoEModel, folder: Path, device: str) -> dict[str, float]:
    """Seconds a layer, the middle of all; the first layer warms up."""
    shards = sorted(folder.glob("*.safetensors"))
    found: dict[str, list[float]] = {"copy": [], "load": [], "tables": []}
    for repeat in range(REPEATS):
        for number, site in enumerate(moe.sites):
            ways = {
                "copy": lambda n=number: load_file(shards[n], device=device),
                "load": lambda s=site: load(moe, s, device),
                "tables": lambda s=site: tables_of(moe.layer(s).to(device), PAPER),
            }
            for name, work in ways.items():
                seconds = timed(work, device)
                if repeat or number:
                    found[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def measured(layers: int, of: int, fp8: bool, device: str, memory: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        write_checkpoint(folder, layers, fp8)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / layers
        MoEModel.open(folder)  # transformers' imports
        opening = timed(lambda: MoEModel.open(folder), device)
        moe = MoEModel.open(folder)
        fingerprint = timed(moe.fingerprint, device) / layers
        each = layer_times(moe, folder, device)
    each["plan"] = each["tables"] + fingerprint
    whole = {name: of * seconds for name, seconds in each.items()}
    facts = {"gb_a_layer": size / 1e9, "seconds_to_open": opening, "seconds_a_layer": each}
    return {**facts, f"seconds_of_{of}_layers": whole, "over_load": each["plan"] / each["load"]}


def main() -> None:
    options = parser(__doc__, layers=4, of=48, device="cuda").parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    result: dict[str, Any] = {"layers": options.layers, "repeats": REPEATS, "provenance": provenance(options.device)}
    for name in ("bf16", "fp8"):
        result[name] = measured(options.layers, options.of, name == "fp8", options.device, memory)
        print(name, json.dumps(result[name], indent=1), flush=True)
        store(options.out, result)


if __name__ == "__main__":
    main()
