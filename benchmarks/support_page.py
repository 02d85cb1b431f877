"""The tables of docs/support.md from what tests ran; nothing in them is typed by hand.

    pytest --support benchmarks/results/support.json tests/integrations/test_families.py tests/checkpoint tests/kernels
    pytest --support benchmarks/results/support.json tests/serving/test_engine.py tests/serving/test_copies.py
    python benchmarks/support_page.py

The first two in each environment and on each machine there is: cells of several runs join.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pages import DOCS, Row, load, table, written

PAGE = DOCS / "support.md"
UNTRIED, PLAIN = "not tried", "plain"
ENGINES = ("transformers", "kernels", "vLLM")
COLUMNS = [("tables", "")] + [(e, p) for e in ENGINES for p in ("prefill", "decode")]
KNOWN = {  # families that people ask for by the names of their models
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B", "qwen3_5_moe": "Qwen3.5, Qwen3.6", "qwen3_next": "Qwen3-Next",
    "gpt_oss": "gpt-oss", "deepseek_v3": "DeepSeek-V3, R1, Kimi-K2", "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4", "glm4_moe": "GLM-4.5, 4.6, 4.7", "gemma4": "Gemma-4-26B-A4B", "minimax_m2": "MiniMax-M2",
    "mixtral": "Mixtral", "olmoe": "OLMoE", "ernie4_5_moe": "Ernie-4.5", "hunyuan_v1_moe": "Hunyuan-A13B",
    "llama4": "Llama-4",
}  # fmt: skip
POISONED = (
    ("fp8", "qwen3_moe", "fp8 block"), ("mxfp4", "gpt_oss", "mxfp4"), ("w4a16", "qwen3_moe", "gptq symmetric"),
    ("w4a16-marlin", "qwen3_moe", "gptq symmetric"), ("gemma-4", "gemma4", PLAIN), ("qwen3.6", "qwen3_5_moe", PLAIN),
)  # fmt: skip
DECODED = {
    "qwen3-30b-a3b": "qwen3_moe", "qwen3.6-35b-a3b": "qwen3_5_moe", "gemma-4-26b-a4b": "gemma4", "gpt-oss-20b": "gpt_oss",
    "glm-4.5-air": "glm4_moe",
}  # fmt: skip
Cells = dict[tuple[str, str], dict[tuple[str, str], list[Row]]]


def ran() -> Row:
    """What tests ran, and what stored benchmarks compared and poisoned on a GPU."""
    found = load("support.json")
    return found | {"cells": found["cells"] + agreed() + poisoned() + decoded()}


def agreed() -> list[Row]:
    """vLLM with our kernels said the same tokens as transformers with ours on one GPU, and kept the same slots."""
    rows = [row for row in load("serving_agreement_h200.json").values() if isinstance(row, dict)]
    same = all(row["equal_tokens"] == row["tokens"] and row["kept"] == row["kept_transformers"] for row in rows)
    return [on_gpu("qwen3_moe", PLAIN, engine, phase, bool(rows) and same) for engine, phase in COLUMNS[1:]]


def on_gpu(family: str, stored: str, engine: str, phase: str, passed: bool) -> Row:
    """A cell of a stored benchmark, as tests write theirs."""
    cell = {"family": family, "stored": stored, "engine": engine, "phase": phase, "device": "GPU"}
    return {**cell, "answer": "yes", "why": "", "outcome": "passed" if passed else "failed"}


def poisoned() -> list[Row]:
    """vLLM's kernels, and ours in their place, left alone what no token keeps."""
    found, cells = load("executors_h200.json"), []
    for model, family, stored in POISONED:
        tried = found[model]["poison"].values()
        passed = all(t["same"] and t["bites"] and t["finite"] for t in tried)
        cells.append(on_gpu(family, stored, "vLLM", "decode", passed))
    return cells


def decoded() -> list[Row]:
    """Steps in one CUDA graph, with our kernels, found every token that `generate` wrote, in fp32."""
    cells = []
    for row in load("decoder_h200.json")["rows"]:
        if row["dtype"] == "float32":
            passed = row["graph"] and row["equal"] == row["tokens"]
            cells.append(on_gpu(DECODED[row["family"]], PLAIN, "kernels", "decode", passed))
    return cells


def by_place(cells: Iterable[Row]) -> Cells:
    """(family, format) → (engine, phase) → what ran there."""
    found: Cells = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        found[cell["family"], cell["stored"]][cell["engine"], cell["phase"]].append(cell)
    return found


def said(cells: list[Row], notes: list[str]) -> str:
    """The devices, the number of a refusal's reason, or that nothing ran."""
    if not cells:
        return UNTRIED
    if any(cell["outcome"] != "passed" for cell in cells):
        return "**fails**"
    where = ", ".join(sorted({cell["device"] for cell in cells}, reverse=True))
    partly = next((cell for cell in cells if cell["answer"] != "yes"), None)
    if partly is None:
        return where
    if partly["why"] not in notes:
        notes.append(partly["why"])
    number = f"[{notes.index(partly['why']) + 1}]"
    return f"no {number}" if partly["answer"] == "no" else f"{where}, one table {number}"


def families(cells: Cells, notes: list[str]) -> str:
    lines = []
    for name in sorted({family for family, stored in cells if stored == PLAIN}):
        known = f" ({KNOWN[name]})" if name in KNOWN else ""
        lines.append([f"{name}{known}", *(said(cells[name, PLAIN][column], notes) for column in COLUMNS)])
    return table(["family", *(" ".join(c).strip() for c in COLUMNS)], lines)


def formats(cells: Cells) -> str:
    """A line for each format: which families it was tried in."""
    lines = []
    for stored in sorted({s for _, s in cells} - {PLAIN}):
        row = []
        for engine in ("tables", *ENGINES):
            inside = {
                family: said([c for (e, _), own in places.items() if e == engine for c in own], [])
                for (family, s), places in cells.items()
                if s == stored and any(e == engine and own for (e, _), own in places.items())
            }
            row.append(grouped(inside))
        lines.append([stored, *row])
    return table(["format", "tables, in families", "transformers, in families", "kernels", "vLLM"], lines)


def grouped(inside: dict[str, str]) -> str:
    """Families with where they were tried, each place once."""
    places = sorted(set(inside.values()))
    parts = [f"{', '.join(sorted(f for f, at in inside.items() if at == where))} ({where})" for where in places]
    return "; ".join(parts) or UNTRIED


def runs(results: Row) -> str:
    lines = []
    for number, run in enumerate(results["runs"], 1):
        versions = [run["libraries"].get(name, "–") for name in ("transformers", "vllm")]
        lines.append([str(number), *versions, run["device"], run["date"][:10]])
    return table(["run", "transformers", "vLLM", "device", "date"], lines)


def page() -> str:
    results, notes = ran(), list[str]()
    cells = by_place(results["cells"])
    plain = f"{runs(results)}\n## Families, unquantised\n\n{families(cells, notes)}\nWhy not:\n\n"
    reasons = "".join(f"{number}. {why}\n" for number, why in enumerate(notes, 1))
    commands = "".join(f"    {run['command']}\n" for run in results["runs"])
    return written(PAGE, ran=plain + reasons, formats=f"{formats(cells)}\nThe runs:\n\n{commands}")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
