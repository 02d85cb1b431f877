"""The tables of docs/tuning.md from the stored results of benchmarks/tuned.py.

python benchmarks/tuned_page.py
"""

from __future__ import annotations

from pages import DOCS, MODELS, RESULTS, Row, load, percent, table, wrapped, written
from study_claims import over, sign

from ace_moe.statistics import Interval, relative_change

PAGE = DOCS / "tuning.md"
PAPER, ACE, SHARE = "ace, kept", "ace, power", "share, power"
WIKITEXT = "tuned_lab_wikitext.json"
MEAN = ", mean"


def results() -> list[Row]:
    """Of all models on several texts, in the pages' order."""
    found = [load(path.name) for path in RESULTS.glob("tuned_*.json") if path.name != WIKITEXT]
    return sorted(found, key=lambda r: MODELS.index(r["model"]))


# ---- what is read from a result -----------------------------------------------------------------------------------------


def mean(r: Row, name: str, what: str) -> list[float]:
    """By budget, over texts."""
    return [sum(column) / len(r["texts"]) for column in zip(*(t[name][what] for t in r["texts"].values()), strict=True)]


def windows(r: Row, name: str, moved: bool = False) -> list[list[float]]:
    """KL by budget and window of all texts; moved from the realised ratio to the budget as the text's mean is."""
    found: list[list[float]] = [[] for _ in r["budgets"]]
    for text in (t[name] for t in r["texts"].values()):
        for every, kls, kl in zip(found, zip(*text["by_window"], strict=True), text["kl"], strict=True):
            factor = kl * len(kls) / sum(kls) if moved else 1
            every += [factor * one for one in kls]
    return found


def changes(r: Row, name: str, rival: str) -> list[Interval]:
    """Change of KL by budget, on the same windows at the same budget."""
    return [relative_change(*pair) for pair in zip(*(windows(r, n, True) for n in (name, rival)), strict=True)]


def cells(r: Row, name: str) -> list[str]:
    return [
        f"{kl:.4f} ({100 * x:+.1f})"
        for kl, x in zip(mean(r, name, "kl"), mean(r, name, "perplexity_change"), strict=True)
    ]


# ---- all models ---------------------------------------------------------------------------------------------------------


def quality(found: list[Row]) -> str:
    lines = []
    for r in found:
        judged = r["judged"]
        each = [" / ".join(cells(r, name)) for name in (judged["auto"], SHARE, ACE, PAPER)]
        behind = f"{percent(judged['behind'], 1)} ({len(judged['mean_kl'])} measured)"
        lines.append([r["model"], judged["auto"], *each, behind, f"{r['seconds']:.0f} s"])
    columns = [
        "model",
        "chosen",
        "choice",
        "`share`, `power`",
        "`ace`, `power`",
        "paper",
        "behind the best",
        "tuned in",
    ]
    return table(columns, lines)


def told(found: list[Row]) -> str:
    first = found[0]
    budgets = ", ".join(map(percent, first["budgets"]))
    sizes = sorted({(r["windows"], r["window"], r["provenance"]["device"]) for r in found})
    size = "; ".join(f"{n} × {w:,} tokens of each, {device}" for n, w, device in sizes)
    told = (
        f"Tuned on WikiText-103's validation text; KL at {budgets} and in brackets the change of perplexity in per cent, as "
        f"realised, in the mean over {len(first['texts'])} other texts ({', '.join(first['texts'])}; {size}). *Behind the "
        "best*: of the candidates measured there, by KL in the mean over budgets. The last column is the "
        "search alone, on the same machine."
    )
    return f"{wrapped(told)}\n\n"


def sides(found: list[Row]) -> str:
    """Choices against `share` with `power`: the one in transformers, and the one servers get, which do not run the mean."""
    mine, theirs = [], []
    for r in found:
        auto = r["judged"]["auto"]
        served = next(t["label"] for t in r["tried"] if t["settings"] == r["recommendation"]["served"])
        likely = zip(r["budgets"], *(mean(r, name, "perplexity_change") for name in (auto, SHARE)), strict=True)
        higher = [percent(budget) for budget, x, y in likely if x > y]
        mine.append(
            f"{r['model']} {against(r, auto)}" + (f", perplexity higher at {' and '.join(higher)}" if higher else "")
        )
        theirs.append(f"{r['model']} {served}" + (f", {against(r, served)}" if served != SHARE else ""))
    first = f"KL of the choice against `share` with `power`: {'; '.join(mine)}."
    return f"\n{wrapped(first)}\n\n{wrapped('Servers, which do not run the mean, get: ' + '; '.join(theirs) + '.')}\n"


def against(r: Row, name: str) -> str:
    said = [f"{signed(c.value)}{'' if sign(c) else ' (undecided)'}" for c in changes(r, name, SHARE)]
    return f"{' / '.join(said)} %"


def signed(change: float) -> str:
    return f"{100 * change:+.0f}".replace("-", "−")


# ---- one text at length -------------------------------------------------------------------------------------------------


def at_length(r: Row) -> str:
    """The choice, the same without the mean, the default, and what has the best perplexity at each budget."""
    (text,), auto, numbers = r["texts"].values(), r["judged"]["auto"], range(len(r["budgets"]))
    likely = [min(text, key=lambda n: text[n]["perplexity_change"][i]) for i in numbers]
    roles = {auto: "chosen", auto.removesuffix(MEAN): "the same without the mean", SHARE: "the default"}
    for budget, name in zip(r["budgets"], likely, strict=True):
        roles[name] = f"best perplexity at {percent(budget)}"
    lines = []
    for name, role in roles.items():
        ratios = ["" if name == SHARE else over(c) for c in changes(r, name, SHARE)]
        lines.append([f"{name}: {role}", *(x for pair in zip(cells(r, name), ratios, strict=True) for x in pair)])
    columns = [x for b in r["budgets"] for x in (percent(b), f"KL over the default's, {percent(b)}")]
    head = (
        f"{r['model']} on {r['windows']} × {r['window']:,} tokens of {', '.join(r['texts'])} ({len(text)} candidates measured, "
        f"{r['provenance']['device']}, tuned in {r['seconds']:.0f} s), KL and in brackets the change of perplexity in per cent:"
    )
    return f"{wrapped(head)}\n\n{table(['candidate', *columns], lines)}\n    python benchmarks/{r['command']}\n"


# ---- the mean of skipped experts ----------------------------------------------------------------------------------------


def paired(r: Row) -> list[tuple[str, str]]:
    """Candidates that were measured with the mean and without."""
    names = r["judged"]["mean_kl"]
    return [(name, plain) for name in names if name.endswith(MEAN) and (plain := name.removesuffix(MEAN)) in names]


def with_mean(found: list[Row], every: dict[str, list[Interval]]) -> str:
    """The choice with and without it at each budget, and all pairs together."""
    lines = []
    for r in found:
        plain, known = r["judged"]["auto"].removesuffix(MEAN), every[r["model"]]
        likely = zip(*(mean(r, name, "perplexity_change") for name in (plain + MEAN, plain)), strict=True)
        said = [f"{100 * mine:+.1f} / {100 * other:+.1f}" for mine, other in likely]
        kls = [f"{over(c)}; {x}" for c, x in zip(changes(r, plain + MEAN, plain), said, strict=True)]
        less, more = sum(sign(c) < 0 for c in known), sum(sign(c) > 0 for c in known)
        low, high = (bound(c.value for c in known) for bound in (min, max))
        together = f"{signed(low)} to {signed(high)} %: {less} lower, {more} higher of {len(known)}"
        lines.append([f"{r['model']}: {plain}", *kls, together])
    return table(["model: choice", *map(percent, found[0]["budgets"]), "all pairs at all budgets"], lines)


def on_or_off(found: list[Row]) -> str:
    every = {r["model"]: [c for pair in paired(r) for c in changes(r, *pair)] for r in found}
    lower, higher = ([m for m, known in every.items() if all(c.value * way > 0 for c in known)] for way in (-1, 1))
    chosen = [r["model"] for r in found if r["judged"]["auto"].endswith(MEAN)]
    slower = [f"{100 * row['change']:.1f} % at {row['tokens']}" for row in load("mean_h200.json")["mean"]]
    ratios = [(mean(r, x, "realised"), mean(r, y, "realised")) for r in found for x, y in paired(r)]
    apart = max(100 * abs(x - y) for mine, other in ratios for x, y in zip(mine, other, strict=True))
    text = (
        f"It is off unless you ask for it or `ace tune` chooses it, which it did on {', '.join(chosen)}. Of all candidates "
        f"measured with it and without, KL is lower with it on {', '.join(lower)} and higher on {', '.join(higher)}. A layer of "
        f"Qwen3-30B-A3B's shape takes longer by {', '.join(slower)} tokens (60 % skipped, H200, "
        "[stored](../benchmarks/results/mean_h200.json)). Texts and sizes as above. In a cell: KL with it over KL without, both "
        "moved to the budget, over windows in pairs with 95 % intervals; change of perplexity in per cent with it / without, at "
        f"the ratios that were realised, at most {apart:.1f} points apart.{as_realised(found)}"
    )
    return f"{wrapped(text)}\n\n{with_mean(found, every)}"


def as_realised(found: list[Row]) -> str:
    """Models whose choice would look otherwise if KL were not moved to the budget."""
    said = ""
    for r in found:
        plain = r["judged"]["auto"].removesuffix(MEAN)
        raw = [sum(x) / sum(y) - 1 for x, y in zip(*(windows(r, n) for n in (plain + MEAN, plain)), strict=True)]
        if any(x * c.value < 0 for x, c in zip(raw, changes(r, plain + MEAN, plain), strict=True)):
            more = [x - y for x, y in zip(*(mean(r, n, "realised") for n in (plain + MEAN, plain)), strict=True)]
            said += (
                f" On {r['model']} that matters: with it the same thresholds skip {100 * min(more):.1f} to {100 * max(more):.1f} "
                f"points more, and KL as realised changes by {' / '.join(map(signed, raw))} %."
            )
    return said


def page() -> str:
    found, long = results(), load(WIKITEXT)
    parts = {
        "tuned": told(found) + quality(found) + sides(found),
        "wikitext": at_length(long),
        "mean": on_or_off(found),
    }
    return written(PAGE, **parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
