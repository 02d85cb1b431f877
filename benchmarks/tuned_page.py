"""The tables of docs/tuning.md from the stored results of benchmarks/tuned.py.

python benchmarks/tuned_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tuning.md"
BEGIN, END = "<!-- from the stored results -->\n", "<!-- end -->\n"
PAPER, ACE, SHARE = "ace, kept", "ace, power", "share, power"


def results() -> list[dict[str, Any]]:
    found = (ROOT / "benchmarks" / "results").glob("tuned_*.json")
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(found)]


def kls(values: list[float]) -> str:
    return " / ".join(f"{kl:.4f}" for kl in values)


def quality(found: list[dict[str, Any]]) -> str:
    lines = [
        "| model | chosen | its KL | `share`, `power` | `ace`, `power` | paper | behind the best candidate |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in found:
        judged = r["judged"]
        mean = judged["mean_kl"]
        cells = [r["model"], judged["auto"], *(kls(mean[n]) for n in (judged["auto"], SHARE, ACE, PAPER))]
        lines.append(f"| {' | '.join(cells)} | {judged['behind']:.1%} ({len(mean)} measured) |".replace("%", " %"))
    return "\n".join(lines) + "\n"


def told(found: list[dict[str, Any]]) -> str:
    first = found[0]
    budgets = ", ".join(f"{b:.0%}" for b in first["budgets"]).replace("%", " %")
    sizes = sorted({(r["windows"], r["window"], r["provenance"]["device"]) for r in found})
    size = "; ".join(f"{n} × {w:,} tokens of each, {device}" for n, w, device in sizes)
    return (
        f"Tuned on WikiText-103's validation text; KL at {budgets}, in the mean over {len(first['texts'])} other texts "
        f"({', '.join(first['texts'])}; {size}). Last column: how far the choice is behind the best candidate "
        "measured there, in the mean over budgets.\n\n"
    )


def page(text: str) -> str:
    """The page with its tables made again."""
    found = results()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + told(found) + quality(found) + END + tail


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
