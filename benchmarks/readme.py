"""The README's picture and its list of what is supported, from stored results and from what the tests cover.

python benchmarks/readme.py
"""

from __future__ import annotations

import re
import sys

from pages import DOCS, ROOT, load, panels, save, written
from pages import made_from as hashed

README, PICTURE = ROOT / "README.md", DOCS / "overview.png"
QUALITY, SERVING = "compare_lab_moe.json", "serving_h200.json"
LINES = {
    ("ace", "kept"): ("the paper's rule", "#c0392b"),
    ("ace", "power"): ("its score, gain power", "#1f6f8b"),
    ("share", "power"): ("gate share, the default", "#27ae60"),
}


def made_from() -> str:
    return hashed(__file__, QUALITY, SERVING)


def draw() -> None:
    figure, (quality, speed) = panels(2, 9.5)
    results = load(QUALITY)
    for (method, gain), (label, colour) in LINES.items():
        cells = [c for c in results["cells"] if (c["method"], c["gain"]) == (method, gain)]
        x, y = ([0.0, *(100 * c["realised"] for c in cells)], [0.0, *(100 * c["change"]["value"] for c in cells)])
        quality.plot(x, y, marker="o", markersize=4, color=colour, label=label)
    quality.set_xlabel("expert slots not run (%)")
    quality.set_title("rise of perplexity (%), lab-moe, WikiText-2", loc="left", fontsize=10)
    quality.legend(frameon=False, fontsize=9)
    rows = [r for r in load(SERVING)["rows"] if r["what"] == "TPOT"]
    batches = list(dict.fromkeys(r["batch"] for r in rows))
    ways = {"vLLM": ("vLLM alone", "#b0b7bb"), "τ = 0": ("0 % skipped", "#7fb3c4"), "60%": ("60 % skipped", "#1f6f8b")}
    for number, (way, (label, colour)) in enumerate(ways.items()):
        heights = [next(r["speed"] for r in rows if (r["batch"], r["way"]) == (b, way)) for b in batches]
        bars = speed.bar(
            [i + 0.27 * (number - 1) for i in range(len(batches))], heights, 0.25, color=colour, label=label
        )
        if way == "60%":
            speed.bar_label(bars, [f"{h:.2f}×" for h in heights], fontsize=8, padding=2)
    speed.set_xticks(range(len(batches)), [f"batch {b}" for b in batches])
    speed.set_ylim(0, 2)
    speed.set_title("tokens a second against vLLM alone, H200", loc="left", fontsize=10)
    speed.legend(frameon=False, fontsize=9, ncols=3, loc="upper left", columnspacing=1.0, handlelength=1.2)
    save(figure, PICTURE, made_from())


def supported() -> str:
    """Families that every law is tested on, formats that decoders are tested on, engines."""
    sys.path.insert(0, str(ROOT / "tests"))
    import zoo

    names = sorted({family.module for family in zoo.FAMILIES})
    listed = (DOCS / "formats.md").read_text().split("## Formats")[1].split("\n\n")[1]
    formats = [re.split(r",| of \d", row.split("|")[1].strip())[0] for row in listed.splitlines()[2:]]
    lines = [
        ("families", f"{len(names)} of transformers, each tested on a tiny model: {', '.join(names)}"),
        ("checkpoints", f"bf16, fp16, fp32; {'; '.join(formats)} ([details](docs/formats.md))"),
        ("engines", "transformers, vLLM; SGLang as an experiment; lm-eval and EvalScope for tasks"),
    ]
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {text} |\n" for name, text in lines)


def page() -> str:
    return written(README, supported=supported())


if __name__ == "__main__":
    draw()
    README.write_text(page(), encoding="utf-8")
