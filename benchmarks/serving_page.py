"""The tables of docs/serving.md on vLLM's kernels and on drafts, from stored results.

python benchmarks/serving_page.py
"""

from __future__ import annotations

import re
from statistics import median
from typing import Any

from pages import DOCS, load, percent, table, written

from ace_moe.bench.shapes import QWEN3_30B

PAGE = DOCS / "serving.md"
NAMES = {
    "fp8": "Qwen3-30B-A3B in FP8 by blocks",
    "mxfp4": "gpt-oss-20b in MXFP4",
    "w4a16": "Qwen3-30B-A3B in 4 bits (GPTQ)",
    "w4a16-marlin": "the same, by its older kernel",
    "gemma-4": "Gemma-4-26B-A4B in bf16",
    "qwen3.6": "Qwen3.6-35B-A3B in bf16",
}
COLUMNS = ["shape", "layers", "kernel", "batch", "vLLM", "0 %", "skipped", "× own 0 %"]
DEEP = 24  # layers from which a step on the device is longer than the host's part of it, so that the clock counts
ABOVE = """\
One {device}, random weights, milliseconds of a decode step on the device (`step_ms`), skipped: with the ratio that was. In every
row the experts that no token keeps were filled with NaN or huge numbers, and the output stayed the same to the last bit. FP8,
four bits and the two models in bf16 run by what the plugin chooses by itself; Marlin is what vLLM takes on Hopper where
humming-kernels are not installed:

"""
FEW = """
In four bits an expert is {mb:.1f} MB. The {spared:.0f} experts that four tokens leave unread at 60 % are {read:.0f} µs of
reading at the memory's rate, in a layer of {layer:.0f} µs: there is little to save.
"""
CLOCK = """
By the clock, where the layers are enough that the host does not decide:

"""
PROMPTS = """
A prompt of 1,024 tokens goes through outside of graphs, where a layer's launches take the host longer than its work takes the
device: skipping saves nothing there. Milliseconds to its first token, the fastest and the median of {repeats}:

"""


def kernel_of(chosen: dict[str, Any], batch: int) -> str:
    """What ran a step of this many tokens, of ours up to a number of them."""
    few = re.search(r"kernels to (\d+) tokens", chosen["executor"])
    ours = chosen["executor"] == "kernels" or (few is not None and batch <= int(few[1]))
    return "ours" if ours else chosen["kernels"][0]


def in_order(found: dict[str, Any], what: str, least: int = 0) -> list[list[str]]:
    """Decode rows of models with at least so many layers, batch by batch: milliseconds by `what`."""
    lines = []
    for model, name in NAMES.items():
        own = found[model]
        for row in sorted(own["rows"], key=lambda row: row["batch"]):
            layers = row.get("layers", own["layers"])
            if row["tokens"] > 1 and layers >= least:
                way = next(way for way in ("native", "auto") if f"{way} 0%" in row[what])
                alone, zero, skipped = (row[what][at] for at in ("vLLM", f"{way} 0%", f"{way} 60%"))
                kernel, ratio = kernel_of(own["executors"][way], row["batch"]), percent(row["realised"][f"{way} 60%"])
                times = [f"{alone:.2f}", f"{zero:.2f}", f"{skipped:.2f} ({ratio})", f"{zero / skipped:.2f}"]
                lines.append([name, str(layers), kernel, str(row["batch"]), *times])
    return lines


def executors() -> str:
    found = load("executors_h200.json")
    for model in NAMES:
        for way, tried in found[model]["poison"].items():
            assert tried["same"] and tried["bites"] and tried["finite"] and tried["tensors"], (model, way)
    device = table(COLUMNS, in_order(found, "step_ms"))
    clock = table(COLUMNS, in_order(found, "ms", DEEP))
    return ABOVE.format(device=found["device"]) + device + few(found["w4a16"]) + CLOCK + clock + prompts(found)


def few(found: dict[str, Any]) -> str:
    """What four bits leave to be saved at four tokens, by the bytes: codes of half a byte and a factor of two for each 128."""
    size = 3 * QWEN3_30B["hidden_size"] * QWEN3_30B["moe_intermediate_size"] * (1 / 2 + 2 / 128)
    layer = next(row["step_ms"]["auto 0%"] for row in found["rows"] if row["batch"] == 4) / found["layers"]
    read = load("layer_h200.json")
    whole, part = (row["union"] for row in read["rows"] if row["tokens"] == 4)
    took = (whole - part) * size / read["ceiling_tb_s"] / 1e6
    return FEW.format(mb=size / 1e6, spared=whole - part, read=took, layer=1e3 * layer)


def prompts(found: dict[str, Any]) -> str:
    """Of one prompt: what was timed of several was at times two passes of the engine, one of the first prompt alone."""
    lines, repeats = [], set()
    for model, name in NAMES.items():
        for row in found[model]["rows"]:
            if (row["tokens"], row["batch"], row["prompt"]) == (1, 1, 1024):
                times = row["all_ms"].values()
                repeats |= {len(ms) for ms in times}
                lines.append([name, *(f"{min(ms):.0f} / {median(ms):.0f}" for ms in times)])
    (number,) = repeats
    return PROMPTS.format(repeats=number) + table(["shape", "vLLM", "0 %", "60 %"], lines)


DRAFTS = """\
An 86 M-parameter model (lab-moe) on a CPU, {prompts} pieces of Python code, {tokens} tokens each, three drafts a step, from the
prompt's own text (`ngram`) or from a 7.6 M-parameter model, no slots restored; "same" is the part of a text in front of its first
token that the unskipped model would not have written:

    {command}

"""


def drafts() -> str:
    found, lines = load("drafts_cpu.json"), []
    for row in found["rows"]:
        if row["drafted"]:
            rate = percent(row["accepted"] / row["drafted"])
            said = [f"`{row['drafter']}`", percent(row["decode"]), percent(row["verify"])]
            lines.append([*said, rate, f"{1 + row['accepted'] / row['steps']:.2f}", percent(row["same"])])
    columns = ["drafts by", "decode", "verify", "drafts accepted", "tokens a step", "same"]
    alone = {row["decode"]: row["same"] for row in found["rows"] if not row["drafted"]}
    both = [row for row in found["rows"] if row["drafted"] and row["decode"] == row["verify"]]
    assert all(row["same"] == alone[row["decode"]] for row in both)  # what the page says
    return DRAFTS.format(**found) + table(columns, lines)


def page() -> str:
    return written(PAGE, executors=executors(), drafts=drafts())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
