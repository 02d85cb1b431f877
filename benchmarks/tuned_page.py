"""The tables of docs/tuning.md from the stored results of benchmarks/tuned.py.

python benchmarks/tuned_page.py
"""

from __future__ import annotations

from pages import DOCS, RESULTS, Row, load, percent, table, written

PAGE = DOCS / "tuning.md"
PAPER, ACE, SHARE = "ace, kept", "ace, power", "share, power"


def results() -> list[Row]:
    return [load(path.name) for path in sorted(RESULTS.glob("tuned_*.json"))]


def kls(values: list[float]) -> str:
    return " / ".join(f"{kl:.4f}" for kl in values)


def quality(found: list[Row]) -> str:
    lines = []
    for r in found:
        judged, mean = r["judged"], r["judged"]["mean_kl"]
        cells = [r["model"], judged["auto"], *(kls(mean[n]) for n in (judged["auto"], SHARE, ACE, PAPER))]
        lines.append([*cells, f"{percent(judged['behind'], 1)} ({len(mean)} measured)"])
    columns = ["model", "chosen", "its KL", "`share`, `power`", "`ace`, `power`", "paper", "behind the best candidate"]
    return table(columns, lines)


def told(found: list[Row]) -> str:
    first = found[0]
    budgets = ", ".join(map(percent, first["budgets"]))
    sizes = sorted({(r["windows"], r["window"], r["provenance"]["device"]) for r in found})
    size = "; ".join(f"{n} × {w:,} tokens of each, {device}" for n, w, device in sizes)
    return (
        f"Tuned on WikiText-103's validation text; KL at {budgets}, in the mean over {len(first['texts'])} other texts "
        f"({', '.join(first['texts'])}; {size}). Last column: how far the choice is behind the best candidate "
        "measured there, in the mean over budgets.\n\n"
    )


def page() -> str:
    found = results()
    return written(PAGE, tuned=told(found) + quality(found))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
