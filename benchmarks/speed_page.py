"""docs/speed.md from the stored results; nothing in its tables is typed by hand.

python benchmarks/speed_page.py
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "speed.md"

HEAD = """# Speed

What skipping saves, where, and how to measure it on your model. Tables are written by `python benchmarks/speed_page.py`
from `benchmarks/results/`; each says how it was made.

## Which path a layer takes

`ace inspect MODEL` says it. On an NVIDIA GPU with Triton all 55 families of transformers 5.19's experts registry run on our
kernels, bf16, fp16 or block FP8; policies without a kernel, post-expert norms and other weight types take the torch path,
which is stock grouped GEMM with skipped slots behind its last group. On a CPU the kept slots alone go through the stock
function. `ACE(…, dispatch="torch")` keeps the torch path, `dispatch="kernels"` makes the reason against the kernels an
error.

## Fast decoding

```python
from ace_moe.decoding import Decoder

ace.attach(model)
decoder = Decoder(model, batch=1, length=4096)
tokens = decoder.generate(ids, 256)  # greedy; decoder.prefill(ids) and decoder.step(token) for anything else
```

The first step compiles one layer of each build, not every layer, and records one CUDA graph; `ace.set_skip(…)` takes
effect at the next step without another. It decodes a batch without padding over a static cache; models with sliding
windows, linear attention or soft caps are refused with advice or keep transformers' attention. With `generate`, use
`cache_implementation="static"`: the kernels are the same, every layer is compiled, and attention copies the cache for
every query head.

## Measuring

    ace bench MODEL --plan plan.safetensors --skip 0,0.6              # one prompt, batch 1
    ace bench --shape qwen3-30b-a3b --rows full -o latency.json       # random weights, prompts to 16 × 1,024, batches to 64
    ace bench --shape qwen3-30b-a3b --rows paper --stock eager        # the paper's five rows against its kind of baseline

Stock and ours go through the same compiled loop and are timed in turn. `ace_unruled` is our kernels behind the stock router:
what the rule itself costs. Each row says how many distinct experts a layer read before and after skipping; a run whose
routing is more than 5 % from uniform is marked, because a random model that reads fewer experts than a trained one would
flatter the result.
"""

PAPER = """The paper reports 1.72–2.25× to the first token and 1.31–1.41× per token on A100s. Eager experts loop on the host, so
the ratios against them say more about kernels and graphs than about skipping; what skipping gives is the column against
our own 0 %.
"""


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def layer_section() -> str:
    result = load("layer_h200.json")
    by_tokens: dict[int, list[dict]] = {}
    for row in result["rows"]:
        by_tokens.setdefault(row["tokens"], []).append(row)
    rows = []
    for tokens, (whole, part) in by_tokens.items():
        share = [f"{r['tb_s'] / result['ceiling_tb_s']:.0%}".replace("%", " %") for r in (whole, part)]
        vllm = f"{whole['vllm_us']:.1f}" if whole.get("vllm_us") else "–"
        times = [f"{whole['stock_us']:.1f}", vllm, f"{whole['ours_us']:.1f}", f"{part['ours_us']:.1f}"]
        bytes_left = part["union"] / whole["union"]
        rows.append(
            [f"{tokens:,}", f"{whole['union']:.1f} → {part['union']:.1f}", *times, " / ".join(share),
             f"{part['ours_us'] / whole['ours_us']:.2f} / {bytes_left:.2f}"]
        )  # fmt: skip
    columns = ["tokens", "experts read", "stock grouped_mm", "vLLM", "ours", "ours, 60 % skipped",
               "of read bandwidth", "time left / bytes left"]  # fmt: skip
    skipped = [100 * (1 - row["kept"]) for row in result["rows"] if row["kept"] < 1]
    share = f"{min(skipped):.0f}–{max(skipped):.0f}"
    decisions = [
        [f"{int(r['tokens']):,}", *(f"{r[n]:.1f}" for n in ("rule_us", "route_and_rule_us", "stock_route_us"))]
        for r in result["deciding"]
    ]
    return f"""## The experts of one layer

{result["device"]}, Qwen3-30B-A3B shapes, bf16, uniform routing, µs; each time is a CUDA graph over eight layers' distinct
weights. Read ceiling {result["ceiling_tb_s"]:.2f} TB/s. `–`: not measured.

    {result["command"]}

{table(columns, rows)}

Skipped are {share} % of the slots: a token runs whole slots. Up to two tokens some five microseconds are left that the
bytes at the read ceiling do not explain. From 1,024 tokens on every expert is needed and products count instead of bytes.

Deciding which slots run, µs: the rule alone, routing and rule in one kernel, and stock's softmax and top-k for comparison.

{table(["tokens", "rule", "routing and rule", "stock routing"], decisions)}
"""


def model_section(name: str, title: str) -> str:
    result = load(name)
    sizes = list(dict.fromkeys((r["what"], r["tokens"], r["batch"]) for r in result["rows"]))
    rows = []
    for what, tokens, batch in sizes:
        group = [r for r in result["rows"] if (r["what"], r["tokens"], r["batch"]) == (what, tokens, batch)]
        time = "gpu_ms" if group[0]["gpu_ms"] is not None else "wall_ms"
        stock = min((r[time] for r in group if not r["path"].startswith("ace")), default=None)
        dense = next((r[time] for r in group if r["path"] == "ace" and r["requested"] == 0), None)
        for r in group:
            ours = r["path"] == "ace"
            experts = f"{r['executed']:.1f} of {r['experts']:.1f}" if r.get("experts") is not None else ""
            ratios = [f"{other / r[time]:.2f}×" if ours and other else "" for other in (stock, dense)]
            realised = f"{r['realised']:.1%}".replace("%", " %")
            size = f"{batch} × {tokens:,}"
            rows.append([what.upper(), size, f"`{r['path']}`", realised, f"{r[time]:.2f}", *ratios, experts])
    columns = ["", "batch × tokens", "path", "skipped", "ms", "against best stock", "against own 0 %", "experts read"]
    facts = f"{result['device']}, torch {result['torch']}. {result.get('note', '')}".strip()
    return f"## {title}\n\n{facts}\n\n    {result['command']}\n\n{table(columns, rows)}\n"


def page() -> str:
    models = [
        ("latency_h200.json", "Whole models: Qwen3-30B-A3B shapes"),
        ("latency_generate_h200.json", "Against stock as `generate` compiles it"),
        ("latency_paper_h200.json", "The paper's five rows against stock's eager experts"),
        ("latency_cpu.json", "On a CPU: an 86 M-parameter model, two cores"),
    ]
    sections = [model_section(*model) for model in models]
    return "\n".join([HEAD, layer_section(), *sections[:3], PAPER, *sections[3:]])


if __name__ == "__main__":
    PAGE.write_text(page())
