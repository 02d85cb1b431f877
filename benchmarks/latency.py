"""TTFT and TPOT on one GPU for a shape alone.

python benchmarks/latency.py --shape qwen3-30b-a3b [--layers N] [--decode 1 16] [--prefill 1024x1 1024x4] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from ace_moe.bench.run import Bench, Row, result
from ace_moe.bench.shapes import build


def show(row: Row) -> None:
    gpu = "" if row.gpu_ms is None else f"gpu {row.gpu_ms:8.3f} ms, "
    size = f"{row.tokens}x{row.batch}"
    print(f"{row.what} {size:>8} {row.path:>10} {row.realised:6.1%}: {gpu}wall {row.wall_ms:8.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--prefill", nargs="*", default=["1024x1", "1024x4", "1024x16"])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--stock", nargs="*", default=["grouped_mm"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = build(options.shape, options.device, options.layers)
    bench, rows = Bench(model, options.ratios, show), []
    command = "python benchmarks/latency.py " + " ".join(sys.argv[1:])

    def keep(found) -> None:
        for row in found:
            rows.append(row)
            if options.out:
                options.out.write_text(json.dumps(result(command, rows), indent=1) + "\n")

    for size in options.prefill:
        keep(bench.prefill(*map(int, size.split("x")), options.stock))
    for batch in options.decode:
        keep(bench.decode(batch, options.stock))


if __name__ == "__main__":
    main()
