"""The tables of docs/budgets.md, and a figure of docs/choosing.md, from the stored results; nothing in them is typed by hand.

python benchmarks/budgets_page.py
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from pages import DOCS, Row, load, percent, table, written

PAGE, CHOOSING = DOCS / "budgets.md", DOCS / "choosing.md"
RESTORED = """What it is worth: decode batches of {batch} different sequences, {skip} of the slots skipped by the rule, KL
against the unskipped model, the same threshold with and without (small models; CPU, teacher-forced, 95 % over sequences).
{policies}

{quality}
What it costs: a recorded decode step of Qwen3-30B-A3B shapes (48 layers, bf16, random weights, one {device}), the same
threshold with and without, timed in turn. `own 0 %` is the plain rule with nothing skipped. Skewed routing is made so that 16
tokens read about 49 of 128 experts, an assumption ([speed](speed.md#routing)); uniform routing reads 82. Layers were compiled as
they are, not [rewritten](speed.md#layers-rewritten), which is the default since.

{speed}"""
TRACKED = """Moving the thresholds of 48 layers takes {moving} µs a step (one {device}).

Teacher-forced decoding over Wikipedia, code, books and documentation one after the other, policy `{policy}`, no pass before
({sizes}):

{kept}"""


def quality(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        plain, restored, (low, high) = r["plain"], r["restored"], r["kl_ratio_95"]
        ratio, ran = f"{r['kl_ratio']:.2f} ({low:.2f}–{high:.2f})", percent(1 - restored["realised"])
        cells = [f"{r['model']}, {Path(r['text']).stem}", *(f"{one['kl']:.4f}" for one in (plain, restored))]
        lines.append([*cells, ratio, ran, f"{restored['reads']['ratio']:.2f}"])
    return table(["model, text", "KL", "restored", "ratio", "slots run", "experts read"], lines)


def speed(rows: list[Row]) -> str:
    base, lines = {(r["routing"], r["batch"]): r["ms"]["plain"] for r in rows if r["skip"] == 0}, []
    for r in rows:
        plain, restored, facts = r["ms"]["plain"], r["ms"]["restored"], r["facts"]["restored"]
        change = f"{restored / plain - 1:+.1%}".replace("%", " %")
        cells = [f"{r['routing']}, {r['batch']}", percent(r["skip"]), f"{plain:.2f} ms", f"{restored:.2f} ms", change]
        faster, read = base[r["routing"], r["batch"]] / restored, facts["reads"] / facts["asked"]
        lines.append([*cells, f"{faster:.2f}", percent(facts["ran"]), f"{read:.2f}"])
    columns = ["routing, batch", "skipped", "TPOT", "restored", "change", "× own 0 %", "slots run", "experts read"]
    return table(columns, lines)


def tracked(rows: list[Row]) -> str:
    columns = ["model", "sequences a step", "asked", "mean", "worst over any 20,000 tokens behind the first 4,000"]
    lines = []
    for r in rows:
        cells = [percent(r["asked"]), percent(r["mean"], 2), f"{r['worst_points']:.2f} points"]
        lines.append([r["model"], str(r["batch"]), *cells])
    return table(columns, lines)


def sizes(rows: list[Row]) -> str:
    found = sorted({(r["batch"], r["tokens"], r.get("device", "unknown device")) for r in rows})
    return "; ".join(f"batch {batch}: {tokens:,} tokens, {device}" for batch, tokens, device in found)


def worst(rows: list[Row]) -> str:
    """What docs/choosing.md says of it."""
    most = {r["batch"]: max(x["worst_points"] for x in rows if x["batch"] == r["batch"]) for r in rows}
    said = " and ".join(f"{most[batch]:.2f} at batch {batch}" for batch in sorted(most))
    return f"points off at worst over any 20,000 tokens: {said}"


def valve() -> str:
    """Few, many and few requests again, in words."""
    found = load("valve_h200.json")
    fixed, rows = found["fixed_ms"], found["rows"]
    few, many = sorted({int(name.split()[0]) for name in fixed})
    held = [row for row in rows if row["phase"] == "many"]
    worst = max(abs(row["ms"] / found["target_ms"] - 1) for row in held[len(held) // 2 :])
    after = [row["budget"] for row in rows if row["phase"] == "few again"][-1]
    text = (
        f"Tried in vLLM on one {found['device']} (24 layers of Qwen3-30B-A3B's shape, random weights, bounds 30 and 70 %): "
        f"{few} requests at 30 % take {fixed[f'{few} at 30%']:.2f} ms a step, {many} take {fixed[f'{many} at 30%']:.2f}. With a "
        f"target of {found['target_ms']:.2f} ms and {many - few} more requests arriving, the budget rose to "
        f"{percent(held[-1]['budget'])}, and in the second half of that time steps were within {percent(worst)} of the target; "
        f"when they had left, it fell back to {percent(after)}, where steps are as slow as it lets them be. All "
        f"{found['finished']} of {found['sent']} requests were answered."
    )
    return fill(text, 128) + "\n"


def policies(rows: list[Row]) -> str:
    """Which policy skipped on which models."""
    models: dict[str, list[str]] = {}
    for row in rows:
        names = models.setdefault(row["policy"], [])
        names += [row["model"]] * (row["model"] not in names)
    return "Policy " + ", ".join(f"`{policy}` on {' and '.join(names)}" for policy, names in models.items()) + "."


def page() -> str:
    timed, kept, streams = (
        load("restore_h200.json"),
        *(load(n)["rows"] for n in ("restore_quality.json", "tracking.json")),
    )
    skip, device = percent(kept[0]["skip"]), timed["device"]
    tables = {"quality": quality(kept), "policies": policies(kept), "speed": speed(timed["rows"])}
    restored = RESTORED.format(batch=kept[0]["batch"], skip=skip, device=device, **tables)
    moving = {"moving": timed["moving_thresholds_us"], "device": device, "policy": streams[0]["policy"]}
    followed = TRACKED.format(**moving, sizes=sizes(streams), kept=tracked(streams))
    return written(PAGE, restored=restored, tracked=followed, valve=valve())


def choosing() -> str:
    return written(CHOOSING, tracked=worst(load("tracking.json")["rows"]))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    CHOOSING.write_text(choosing(), encoding="utf-8")
