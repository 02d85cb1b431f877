"""The README's picture and its list of what is supported, from stored results and from what the tests cover.

python benchmarks/readme.py
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "overview.png"
QUALITY, SERVING = "compare_lab_moe.json", "serving_h200.json"
LINES = {
    ("ace", "kept"): ("the paper's rule", "#c0392b"),
    ("ace", "power"): ("its score, gain power", "#1f6f8b"),
    ("share", "power"): ("gate share, the default", "#27ae60"),
}
BLOCK = re.compile(r"(<!-- supported: written by [^>]*-->\n).*?(<!-- supported: end -->)", re.S)


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def made_from() -> str:
    """What the picture shows goes by this; it is written into the file."""
    read = b"".join((RESULTS / name).read_bytes() for name in (QUALITY, SERVING))
    return hashlib.sha256(read + Path(__file__).read_bytes()).hexdigest()


def draw() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (quality, speed) = plt.subplots(1, 2, figsize=(9.5, 3.7), dpi=150, facecolor="white")
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
    for axes in (quality, speed):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Made from": made_from(), "Software": None})


def supported() -> str:
    """Families that every law is tested on, formats that decoders are tested on, engines."""
    sys.path.insert(0, str(ROOT / "tests"))
    import zoo

    names = sorted({family.module for family in zoo.FAMILIES})
    table = (ROOT / "docs" / "formats.md").read_text().split("## Formats")[1].split("\n\n")[1]
    formats = [re.split(r",| of \d", row.split("|")[1].strip())[0] for row in table.splitlines()[2:]]
    lines = [
        ("families", f"{len(names)} of transformers, each tested on a tiny model: {', '.join(names)}"),
        ("checkpoints", f"bf16, fp16, fp32; {'; '.join(formats)} ([details](docs/formats.md))"),
        ("engines", "transformers, vLLM; SGLang as an experiment; lm-eval and EvalScope for tasks"),
    ]
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {text} |\n" for name, text in lines)


def page() -> str:
    return BLOCK.sub(lambda found: found[1] + supported() + found[2], README.read_text())


if __name__ == "__main__":
    draw()
    README.write_text(page())
