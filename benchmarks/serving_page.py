"""The tables of docs/serving.md on vLLM's kernels and on drafts, from stored results.

python benchmarks/serving_page.py
"""

from __future__ import annotations

import re
from typing import Any

from pages import DOCS, load, percent, table, written

PAGE = DOCS / "serving.md"
NAMES = {
    "fp8": "Qwen3-30B-A3B in FP8 by blocks",
    "mxfp4": "gpt-oss-20b in MXFP4",
    "w4a16": "Qwen3-30B-A3B in 4 bits (GPTQ)",
    "gemma-4": "Gemma-4-26B-A4B in bf16",
    "qwen3.6": "Qwen3.6-35B-A3B in bf16",
}
COLUMNS = ["shape", "layers", "kernel", "batch", "vLLM", "0 %", "skipped", "× own 0 %"]
DEEP = 24  # layers from which a step on the device is longer than the host's part of it, so that the clock counts
ABOVE = """\
One {device}, random weights, milliseconds of a decode step on the device (`step_ms`), skipped: with the ratio that was. In every
row the experts that no token keeps were filled with NaN or huge numbers, and the output stayed the same to the last bit. FP8 and
the two models in bf16 run by what the plugin chooses by itself. Four bits ran in Marlin; on Hopper vLLM prefers humming-kernels
where they are installed, which was not tried:

"""
CLOCK = """
By the clock, where the layers are enough that the host does not decide:

"""
PROMPTS = """
Four prompts of 1,024 tokens of that model take {times} ms (vLLM alone, at 0 %, skipped): repeats lie
too far apart to say which is faster.
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
    prompts = next(row["all_ms"] for row in found["gemma-4"]["rows"] if row["tokens"] == 1)
    times = ", ".join(f"{min(ms):.0f} to {max(ms):.0f}" for ms in prompts.values())
    device = table(COLUMNS, in_order(found, "step_ms"))
    clock = table(COLUMNS, in_order(found, "ms", DEEP))
    return ABOVE.format(device=found["device"]) + device + CLOCK + clock + PROMPTS.format(times=times)


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
