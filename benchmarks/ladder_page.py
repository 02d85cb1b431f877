"""The figures of docs/size.md and its picture from the stored ladder: what skipping costs against size and against training.

python benchmarks/ladder_page.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

import pages
from pages import DOCS, RESULTS, Row, percent, wrapped, written

RESULT, PAGE, PICTURE = RESULTS / "ladder_h200.json", DOCS / "size.md", DOCS / "size.png"
BUDGETS = (0.3, 0.5, 0.6)
COLOURS = ("#c0392b", "#d68910", "#27ae60", "#1f6f8b")
CLEAR = 0.1  # a change of KL by less is not called one
table = partial(pages.table, rule=" --- ")

SIZES = """\
One family (Qwen3-MoE, 32 experts, top-8, normalised gates) in {count} sizes that differ in width and depth alone, trained from
scratch with one recipe on the same text in the same order, {tokens:.1f} M tokens each, then judged on {windows} windows of
{window} tokens that none was trained on. `auto` is the default without a tuned plan (gate share, gain `power`), `paper` the
paper's rule. Budgets are corrected to what is realised. KL is in nats a token against the same model with nothing skipped; where
a size was trained from {seeds} seeds, the mean stands with the least and the most.

{table}"""


def load() -> Row:
    return pages.load(RESULT.name)


# ---- numbers ----------------------------------------------------------------------------------------------------------


def ends(result: Row, size: str) -> list[Row]:
    """The last row of every seed."""
    return [r for r in result["rows"] if r["size"] == size and r["last"]]


def cell(row: Row, policy: str, budget: float) -> Row:
    return next(c for c in row["cells"] if (c["policy"], c["budget"]) == (policy, budget))


def kl(row: Row, policy: str, budget: float) -> float:
    return cell(row, policy, budget)["kl"]["value"]


def risen_by(row: Row, policy: str, budget: float) -> float:
    return cell(row, policy, budget)["perplexity_change"]["value"]


def spread(values: list[float], form: str) -> str:
    """The mean, and its bounds where there is more than one."""
    said = form.format(mean(values))
    return said if len(values) == 1 else f"{said} ({form.format(min(values))}–{form.format(max(values))})"


def sized(result: Row) -> list[str]:
    """Sizes that came to their end, smallest first."""
    return sorted((s for s in result["sizes"] if ends(result, s)), key=lambda s: result["sizes"][s]["parameters"])


def by_training(result: Row, size: str) -> list[Row]:
    return sorted((r for r in result["rows"] if (r["size"], r["seed"]) == (size, 0)), key=lambda r: r["tokens"])


def grown_by_training(result: Row, size: str) -> float:
    """KL of `auto` at 50 % at the end against where it was first judged."""
    rows = by_training(result, size)
    return kl(rows[-1], "auto", 0.5) / kl(rows[0], "auto", 0.5)


def longer() -> float:
    """The same of lab-moe."""
    cells = pages.load("compare_lab_moe.json")["cells"]
    return next(c["kl"]["value"] for c in cells if (c["method"], c["gain"], c["budget"]) == ("share", "power", 0.5))


# ---- words ------------------------------------------------------------------------------------------------------------


def change(factor: float) -> str:
    if abs(factor - 1) < CLEAR:
        return "stays where it is"
    return f"falls to {factor:.2f} of what it was" if factor < 1 else f"rises to {factor:.2f} times what it was"


def millions(result: Row, size: str) -> str:
    return f"{result['sizes'][size]['parameters'] / 1e6:.1f} M"


def answer(result: Row) -> str:
    """Both questions, as the numbers have it."""
    small, large = sized(result)[0], sized(result)[-1]
    factors = [
        mean([kl(r, "auto", b) for r in ends(result, large)]) / mean([kl(r, "auto", b) for r in ends(result, small)])
        for b in BUDGETS
    ]
    grown = ", ".join(f"at {percent(b)} {change(f)}" for f, b in zip(factors, BUDGETS, strict=True))
    first, *_, last = by_training(result, large)
    trained = change(grown_by_training(result, large))
    risen = sum(grown_by_training(result, s) > 1 + CLEAR for s in sized(result))
    sizes = [millions(result, s) for s in (small, large)]
    verdict = "Cheaper" if max(factors) < 1 - CLEAR else "Dearer" if min(factors) > 1 + CLEAR else "Not clearly cheaper"
    return wrapped(
        f"**{verdict} with size, on this ladder.** From {sizes[0]} to {sizes[1]} parameters, KL {grown}. With training: from "
        f"{first['tokens'] / 1e6:.0f} to {last['tokens'] / 1e6:.1f} M tokens KL at 50 % rises on {risen} of "
        f"{len(sized(result))} sizes; that of the largest {trained}, while its perplexity falls from "
        f"{first['perplexity']['value']:.0f} to {last['perplexity']['value']:.0f}."
    )


def sizes_table(result: Row) -> str:
    budgets, lines = " / ".join(map(percent, BUDGETS)), []
    for size in sized(result):
        rows, facts = ends(result, size), result["sizes"][size]
        kls = {p: " / ".join(spread([kl(r, p, b) for r in rows], "{:.4f}") for b in BUDGETS) for p in ("auto", "paper")}
        changes = " / ".join(spread([100 * risen_by(r, "auto", b) for r in rows], "{:+.1f}") for b in BUDGETS)
        same = spread([100 * cell(r, "auto", 0.5)["agreement"]["value"] for r in rows], "{:.1f}")
        perplexity = spread([r["perplexity"]["value"] for r in rows], "{:.1f}")
        built = [millions(result, size), f"{facts['width']} × {facts['layers']}", perplexity]
        lines.append([*built, kls["auto"], f"{changes} %", f"{same} %", kls["paper"]])
    columns = ["parameters", "width × layers", "perplexity", f"KL `auto`, {budgets}", f"rise of perplexity, {budgets}"]
    return table([*columns, "same top token, 50 %", f"KL `paper`, {budgets}"], lines)


def way_table(result: Row) -> str:
    steps, lines = sorted({r["tokens"] for s in sized(result) for r in by_training(result, s)}), []
    for size in sized(result):
        at = {
            r["tokens"]: f"{kl(r, 'auto', 0.5):.4f} ({r['perplexity']['value']:.0f})" for r in by_training(result, size)
        }
        lines.append([millions(result, size), *(at.get(t, "–") for t in steps)])
    return table(["parameters", *(f"{t / 1e6:.1f} M" for t in steps)], lines)


def page() -> str:
    result = load()
    made, seeds = result["provenance"], max(len(ends(result, s)) for s in sized(result))
    where = f"{made['device']}, torch {made['libraries']['torch']}, transformers {made['libraries']['transformers']}."
    counted = {"count": len(sized(result)), "seeds": seeds, "tokens": max(r["tokens"] for r in result["rows"]) / 1e6}
    judged = {"windows": result["judged_windows"], "window": result["window"]}
    parts = {"answer": f"{answer(result)}\n", "way": way_table(result), "longer": f"{longer():.4f}"}
    sizes = SIZES.format(**counted, **judged, table=sizes_table(result))
    return written(PAGE, **parts, sizes=sizes, made=f"{where} Made by\n\n    {made['command']}\n")


# ---- picture ----------------------------------------------------------------------------------------------------------


def made_from() -> str:
    return pages.made_from(__file__, RESULT.name)


def against_size(axes: Any, result: Row, value: Callable[[Row], float], **how: Any) -> None:
    """A line through the sizes' means, and a bar over seeds."""
    x = [result["sizes"][s]["parameters"] / 1e6 for s in sized(result)]
    each = [[value(r) for r in ends(result, s)] for s in sized(result)]
    axes.plot(x, [mean(e) for e in each], marker="o", markersize=4, **how)
    axes.vlines(x, [min(e) for e in each], [max(e) for e in each], color=how["color"])


def draw() -> None:
    result = load()
    figure, (size, risen, training) = pages.panels(3, 12)
    for budget, colour in zip(BUDGETS, COLOURS[1:], strict=False):
        for policy, style in (("auto", "-"), ("paper", ":")):
            label = percent(budget) if policy == "auto" else None
            how = {"linestyle": style, "color": colour, "label": label}
            against_size(size, result, lambda r: kl(r, policy, budget), **how)  # noqa: B023
            against_size(risen, result, lambda r: 100 * risen_by(r, policy, budget), **how)  # noqa: B023
    for name, colour in zip(sized(result), COLOURS, strict=False):
        rows, label = by_training(result, name), millions(result, name)
        x, y = [r["tokens"] / 1e6 for r in rows], [kl(r, "auto", 0.5) for r in rows]
        training.plot(x, y, marker="o", markersize=4, color=colour, label=label)
    titles = ("KL, trained (dotted: paper)", "rise of perplexity (%)", "KL of auto at 50 % on the way")
    for axes, title in zip((size, risen, training), titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("training tokens (M)" if axes is training else "parameters (M)")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.legend(frameon=False, fontsize=8)
    pages.save(figure, PICTURE, made_from())


if __name__ == "__main__":
    draw()
    PAGE.write_text(page(), encoding="utf-8")
