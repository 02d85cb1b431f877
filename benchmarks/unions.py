"""How many distinct experts a decode step of trained models reads, by batch, on a text.

A step's tokens are at one place of different sequences, as a server batches them. Beside each union: what uniform routing
would read, and the mean shares of the gates.

    python benchmarks/unions.py demo-moe lab-moe --text wiki.test.raw -o benchmarks/results/unions.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from running import made_here, parser, store
from torch import Tensor

from ace_moe.checkpoint.loading import load_model, load_tokenizer, load_windows
from ace_moe.lab.bench.routers import uniform_union
from ace_moe.lab.policies.calls import sites, watch

BATCHES = (1, 4, 16, 64)
SKIP = 32  # tokens at the start of a sequence that are not looked at: with little behind them they are all alike
DRAWS = 8  # batches drawn at each place


def routed(model: Any, ids: Tensor) -> tuple[Tensor, Tensor, int]:
    """Experts [layers, N, L, k], mean shares of sorted gates [k], and how many experts a layer has."""
    places, found, shares = sites(model), [], []
    for part in ids.split(8):
        seen = watch(model, part, places)
        found.append(torch.stack([seen[site.key].ids.view(*part.shape, -1) for site in places]))
        gates = torch.cat([seen[site.key].gates.float() for site in places]).sort(-1, descending=True).values
        shares.append((gates / gates.sum(-1, keepdim=True)).mean(0))
    return torch.cat(found, 1)[:, :, SKIP:], torch.stack(shares).mean(0), places[0].num_experts


def union(experts: Tensor, count: int, batch: int, generator: torch.Generator) -> float:
    """The mean over layers, places and draws of `batch` sequences."""
    layers, sequences, length, slots = experts.shape
    total = 0.0
    for _ in range(DRAWS):
        chosen = torch.randperm(sequences, generator=generator)[:batch]
        ids = experts[:, chosen].transpose(1, 2).reshape(layers * length, batch * slots)
        total += float(torch.zeros(len(ids), count).scatter_(1, ids, 1).sum(1).mean())
    return total / DRAWS


def measure(path: Path, text: Path, sequences: int, window: int) -> dict[str, Any]:
    model = load_model(path, device="cpu")
    windows = load_windows(model, load_tokenizer(path), text, window, sequences * window)
    experts, shares, count = routed(model, windows.ids)
    slots, generator = experts.shape[-1], torch.Generator().manual_seed(0)
    unions = {batch: union(experts, count, batch, generator) for batch in BATCHES if batch <= len(windows.ids)}
    uniform = {batch: uniform_union(count, slots, batch) for batch in unions}
    facts = {"model": path.name, "experts": count, "top_k": slots, "sequences": len(windows.ids), "window": window}
    return {**facts, "shares": shares.tolist(), "unions": unions, "uniform": uniform}


def main() -> None:
    made = parser(__doc__, sequences=128, window=128)
    made.add_argument("models", nargs="+", type=Path)
    made.add_argument("--text", type=Path, required=True)
    given = made.parse_args()
    rows = []
    for path in given.models:
        rows.append(measure(path, given.text, given.sequences, given.window))
        cells = [f"{b}: {u:.1f} of {rows[-1]['uniform'][b]:.1f}" for b, u in rows[-1]["unions"].items()]
        built = f"{rows[-1]['experts']} experts, top {rows[-1]['top_k']}"
        print(f"{path.name}, {built}: {', '.join(cells)} by chance", flush=True)
        print("  gate shares", " ".join(f"{share:.3f}" for share in rows[-1]["shares"]), flush=True)
    store(given.out, made_here(rows=rows))


if __name__ == "__main__":
    main()
