"""How far a simulation on a trace is from the same batches executed, and a fitted time from one that was measured.

    python benchmarks/traffic.py demo-moe lab-olmoe --text wiki.test.raw -o benchmarks/results/traffic.json
    python benchmarks/traffic.py --times benchmarks/results/routing_h200.json -o benchmarks/results/traffic_times.json

The first traces a text unskipped, maps τ on the trace, and decodes the same tokens teacher-forced in batches under that τ:
slots run and experts read are counted in the layers. It then traces under that τ and simulates again: what is left is the
rounding of gates. The second fits time against experts read under uniform routing and predicts the other routings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from running import made_here, parser, store
from torch import Tensor

from ace_moe import ACE, build_plan
from ace_moe.checkpoint.loading import load_model, load_tokenizer, load_windows
from ace_moe.lab.traffic.simulate import Simulation, StepCounts
from ace_moe.lab.traffic.timing import fit
from ace_moe.lab.traffic.tracing import read
from ace_moe.policies import make
from ace_moe.provenance import provenance

PROMPT, LENGTH, WINDOWS = 32, 96, 32
BATCHES, SKIPS = (4, 16), (0.3, 0.6)


@torch.inference_mode()
def decode(model: Any, ids: Tensor) -> None:
    """ids [B, L]: a prompt, then one token of each sequence at a time."""
    out = model(ids[:, :PROMPT], use_cache=True)
    for i in range(PROMPT, ids.shape[1]):
        out = model(ids[:, i : i + 1], past_key_values=out.past_key_values)


def executed(model: Any, ace: ACE, ids: Tensor, batch: int, restore: bool) -> tuple[float, float]:
    """The part of generated tokens' slots that ran, and experts a layer read in a step."""
    ace.set_restore(restore)
    ace.reset()
    for part in ids.split(batch):
        decode(model, part)
    report = ace.report()
    steps = len(ids) // batch * (ids.shape[1] - PROMPT) * len(ace.deciders)
    return 1 - report["decode"]["realised"], report["reads"]["generated"]["read"] / steps


def steps_of(windows: int, length: int, batch: int) -> Tensor:
    """[N, batch]: where the tokens of each decode step are in the trace."""
    places = torch.arange(windows * length).view(windows, length)[:, PROMPT:]
    return places.view(windows // batch, batch, -1).transpose(1, 2).reshape(-1, batch)


def measure(path: Path, text: Path) -> list[dict[str, Any]]:
    model, plan, policy = load_model(path, device="cpu"), build_plan(path), make("share")
    windows = load_windows(model, load_tokenizer(path), text, LENGTH, WINDOWS * LENGTH)
    rows = []
    with ACE(plan, 0.0, policy=policy, restore=True, reads=True)(model) as ace:
        ace.set_restore(False)
        dense = Simulation(read(model, ace.deciders, windows, batch=8), policy, plan)
        for skip in SKIPS:
            tau = dense.threshold(skip)
            ace.set_restore(False)
            ace.set_threshold(tau)
            under = Simulation(read(model, ace.deciders, windows, skip, batch=8), policy, plan)
            for batch in BATCHES:
                ran, reads = executed(model, ace, windows.ids, batch, restore=False)
                restored, _ = executed(model, ace, windows.ids, batch, restore=True)
                found = {"slots": ran, "restored": restored, "reads": reads}
                steps = steps_of(len(windows.ids), windows.ids.shape[1], batch)
                row = {"model": path.name, "skip": skip, "threshold": tau, "batch": batch, "executed": found}
                row |= {n: compared(s.count(tau, steps), found) for n, s in (("unskipped", dense), ("under", under))}
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def compared(simulated: StepCounts, found: dict[str, float]) -> dict[str, float]:
    """Points of slots, and experts read as a part of what was read."""
    return {
        "slots": simulated.slots,
        "reads": simulated.reads,
        "slots_off": simulated.slots - found["slots"],
        "restored_off": simulated.restored - found["restored"],
        "reads_off": simulated.reads / found["reads"] - 1,
    }


def times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fitted on uniform routing unskipped and at 60 %, held against the other routings at 30 and 60 %."""
    steps = [
        {"what": "tpot", "path": "ace", **{n: r[n] for n in ("routing", "batch", "skip")},
         "executed": r["facts"]["restored"]["reads"], "wall_ms": r["ms"]["plain"]}  # the plain rule reads as many
        for r in rows if r["skip"] <= max(SKIPS) and r["batch"] > 1
    ]  # fmt: skip
    cost, found = fit([r for r in steps if r["routing"] == "uniform" and r["skip"] in (0.0, 0.6)]), []
    for row in steps:
        if row["routing"] != "uniform" and row["skip"]:
            said = cost.tpot(row["batch"], row["executed"])
            facts = {**{n: row[n] for n in ("routing", "batch", "skip")}, "reads": row["executed"]}
            found.append({**facts, "ms": row["wall_ms"], "fitted_ms": said, "off": said / row["wall_ms"] - 1})
            print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("models", nargs="*", type=Path)
    made.add_argument("--text", type=Path)
    made.add_argument("--times", type=Path, help="a result of restore.py with several routings")
    given = made.parse_args()
    timed = json.loads(given.times.read_text())["rows"] if given.times else []
    rows = times(timed) or [r for m in given.models for r in measure(m, given.text)]
    store(given.out, made_here(provenance=provenance(), rows=rows))


if __name__ == "__main__":
    main()
