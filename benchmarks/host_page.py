"""docs/host.md: experts in host memory, with figures from stored results.

python benchmarks/host_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, STORED = ROOT / "docs" / "host.md", ROOT / "benchmarks" / "results"
TEXT = """# Experts in host memory

A model whose experts do not fit on the GPU can keep them in host memory and read what a token needs over the bus. Next to
the GPU's own memory the bus is so slow that reading experts is all the time there is, and a skipped one costs nothing.

## transformers

```python
from ace_moe import ACE
from ace_moe.decoding import Decoder

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="bfloat16")   # in host memory
decoder = Decoder(model, batch=1, length=4096, experts="host", resident=0.25)
ace = ACE.load("plan.safetensors", skip=0.3)
ace.attach(model)
decoder.settle(ids)             # if you like: the experts that this text uses most are the ones kept on the GPU
tokens = decoder.generate(ids, 256)
```

`experts="host"` moves everything but the experts to the GPU and pins those where they are, to the byte; `resident` is the part
of each layer's experts that also has a copy on the GPU. The kernels look up where an expert is, so `settle` may change the
copies at any time, under a recorded graph too. Prompts of more than {staged} slots an expert copy a layer at a time to the GPU
instead: many tiles would read one expert again and again. Build the decoder first and attach then: kernels are chosen when a
plan is attached. bf16, fp16, fp32 and block FP8 experts that [the kernels](architecture.md) know can be read so; others are
refused by name.

One {device}, {layers} layers of Qwen3-30B-A3B's shape with random weights; milliseconds a step for these layers, and how fast
experts crossed the bus, as a part of a pinned copy's {rate:.1f} GB/s (over the whole step, everything else in it included):

{table}

Copies follow the prompt in front; under uniform routing any choice of them is as good.

## vLLM

    ace serve MODEL --plan plan.safetensors --skip 0.3 --cpu-offload-gb 40

vLLM reads such weights in place as well, but takes layers whole and attention first, which every token needs. `ace serve` names
the experts as what goes to host memory, chooses kernels that read it (Triton for bf16 and FP8, Marlin for 4-bit weights), says
so, and leaves alone what you set yourself. Its prefetching back end copies every expert of a layer before each step, needed or
not; skipping saves nothing there, and it is refused with this advice.
{vllm}"""


def load(name: str) -> dict[str, Any]:
    return json.loads((STORED / name).read_text())


def table(rows: list[dict[str, Any]], rate: float) -> str:
    lines = [
        "| routing, batch | skipped | all on the host | half of them | all on the GPU | × own 0 % |",
        "|---|---|---|---|---|---|",
    ]
    base = {(r["routing"], r["batch"]): r["ms"] for r in rows if r["skip"] == 0}
    for r in rows:
        own = base[r["routing"], r["batch"]]
        cells = [f"{r['routing']}, {r['batch']}", f"{r['skip']:.0%}"]
        cells += [f"{r['ms'][way]:.2f} ({r['rate'][way] / rate:.0%})" for way in ("host", "half")]
        cells += [
            f"{r['ms']['gpu']:.2f}",
            " / ".join(f"{own[way] / r['ms'][way]:.2f}" for way in ("host", "half", "gpu")),
        ]
        lines.append(f"| {' | '.join(cells)} |".replace("%", " %"))
    return "\n".join(lines)


def served() -> str:
    if not (STORED / "offload_vllm_h200.json").exists():
        return "Not timed here yet.\n"
    found = load("offload_vllm_h200.json")
    lines = ["", "| batch | vLLM | with the plugin, 0 % | 60 % | × own 0 % |", "|---|---|---|---|---|"]
    for batch in sorted({row["batch"] for row in found["rows"]}):
        ms = [row["median_ms"] for row in found["rows"] if row["batch"] == batch]
        lines.append(f"| {batch} | {ms[0]:.2f} ms | {ms[1]:.2f} ms | {ms[2]:.2f} ms | {ms[1] / ms[2]:.2f} |")
    return (
        f"\nTPOT in vLLM {found['vllm']} on one {found['device']}, four layers, all experts on the host:\n"
        + "\n".join(lines)
        + "\n"
    )


def page() -> str:
    from ace_moe.kernels.experts import STAGED

    found = load("host_h200.json")
    facts = {"device": found["device"], "rate": found["copy_rate"] / 1e9, "layers": 4, "staged": STAGED}
    return TEXT.format(**facts, table=table(found["rows"], found["copy_rate"]), vllm=served())


if __name__ == "__main__":
    PAGE.write_text(page())
