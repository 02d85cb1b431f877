"""What the paper says, held against stored results: each claim with the numbers that decide it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ace_moe.lab.compare.compare import cell_at, kl_of
from ace_moe.scoring.statistics import Interval, relative_change

Results = dict[str, Any]
OFF = 0.005  # a realised ratio further from its budget than this is not compared


def met(cell: Results) -> bool:
    """Whether the cell skips what it was asked to; some rules only know steps of 1/k."""
    return abs(cell["realised"] - cell["budget"]) <= OFF


def paired(results: Results, method: str, rival: str, gain: str, budget: float) -> Interval | None:
    """Change of KL against the rival on the same windows; None where one of them did not meet the budget."""
    mine, other = (cell_at(results, name, gain, budget) for name in (method, rival))
    if mine is None or other is None or method == rival or not (met(mine) and met(other)):
        return None
    return relative_change(mine["kl_by_window"], other["kl_by_window"])


def tally(results: Results, method: str, rival: str, gain: str) -> tuple[int, int, int] | None:
    """At how many budgets the method is better, worse, or not to be told apart (the interval holds 0)."""
    found = [paired(results, method, rival, gain, b) for b in results["grid"]["budgets"]]
    known = [one for one in found if one is not None]
    if not known:
        return None
    better, worse = (sum(sign(one) == way for one in known) for way in (-1, 1))
    return better, worse, len(known) - better - worse


def sign(change: Interval) -> int:
    """−1 or 1 where the interval is clear of 0, else 0; too few windows have no interval."""
    if change.low is None or change.high is None:
        return 0
    return (change.low > 0) - (change.high < 0)


def over(change: Interval) -> str:
    """A relative change as a ratio, with its bounds."""
    assert change.low is not None and change.high is not None
    return f"{1 + change.value:.2f}× ({1 + change.low:.2f}–{1 + change.high:.2f})"


def verdict(better: int, worse: int) -> str:
    if worse == 0 and better:
        return "holds"
    return "does not hold" if worse > better else "holds in part" if better else "cannot be told"


def in_words(counted: tuple[int, int, int]) -> str:
    parts = [f"{word} at {n}" for word, n in zip(("better", "worse", "undecided"), counted, strict=True) if n]
    return ", ".join(parts) + f" of {sum(counted)} budgets"


def claims(results: Results, thresholds: Results | None) -> Iterator[str]:
    """One line a claim; a claim that was not measured is left out."""
    yield from consistently(results)
    yield from versus(results, "Both views together are better than GSP alone", "ace", ("gsp",))
    yield from versus(results, "… and better than RCR alone", "ace", ("rcr",))
    yield from versus(results, "Max is the best fusion", "ace", ("ace:fusion=min", "ace:fusion=mean"))
    yield from versus(results, "Router rows should be centred for RCR", "rcr", ("rcr:centred=false",))
    yield from renormalisation(results)
    yield from best(results)
    yield from norms(results)
    if thresholds is not None:
        yield from travel(thresholds)
        yield from price(thresholds)


def versus(results: Results, claim: str, method: str, rivals: tuple[str, ...], gain: str = "kept") -> Iterator[str]:
    counted = {rival: made for rival in rivals if (made := tally(results, method, rival, gain))}
    if counted:
        better, worse, _ = (sum(column) for column in zip(*counted.values(), strict=True))
        said = "; ".join(f"against `{rival}` {in_words(made)}" for rival, made in counted.items())
        yield f"*{claim}*: **{verdict(better, worse)}** (gain `{gain}`: {said})."


def consistently(results: Results) -> Iterator[str]:
    """The paper's headline: ACE before every baseline, more so at high ratios."""
    others = [
        m
        for m in results["grid"]["methods"]
        if m not in results["references"] and m.split(":")[0] not in ("ace", "gsp", "rcr", "paper")
    ]
    for gain in (g for g in ("kept", "power") if g in results["grid"]["gains"]):
        counted = {m: made for m in others if (made := tally(results, "ace", m, gain))}
        if not counted:
            continue
        ahead = [m for m, (better, worse, _) in counted.items() if better > worse]
        behind = [m for m, (better, worse, _) in counted.items() if worse > better]
        word = "does not hold" if behind else "holds" if ahead else "cannot be told"
        named = (
            f" Ahead of ACE at more budgets than behind it: {', '.join(f'`{m}`' for m in behind)}." if behind else ""
        )
        yield (
            f"*ACE consistently outperforms the baselines* (gain `{gain}` for all): **{word}**. ACE is ahead of "
            f"{len(ahead)} of {len(counted)} rules.{named}"
        )
        if "share" in counted:
            yield f"Against the plain gate share, which needs no table, ACE is {in_words(counted['share'])} (gain `{gain}`)."


def renormalisation(results: Results) -> Iterator[str]:
    """Not a claim of the paper but its rule: kept gates are scaled up to their old sum."""
    cells = {g: cell_at(results, "ace", g, 0.5) for g in ("kept", "power", "none")}
    if cells["kept"] and (rest := {g: c for g, c in cells.items() if c and g != "kept"}):
        best = min(rest, key=lambda g: kl_of(rest[g]))
        change = relative_change(rest[best]["kl_by_window"], cells["kept"]["kl_by_window"])
        told = ", ".join(f"`{g}` {kl_of(c):.4f} ({100 * c['change']['value']:+.1f} %)" for g, c in cells.items() if c)
        word = {-1: "no", 0: "undecided", 1: "yes"}[sign(change)]
        yield (
            f"*Kept gates should be renormalised to their old sum*: **{word}**. KL of ACE at 50 %, and its change of perplexity: "
            f"{told}; `{best}` changes KL by {in_per_cent(change)} %."
        )


def in_per_cent(change: Interval, digits: int = 0) -> str:
    """ "-20 (-25…-14)"; without bounds where there are too few windows."""
    numbers = [f"{100 * x:+.{digits}f}" for x in (change.value, change.low, change.high) if x is not None]
    return numbers[0] if len(numbers) == 1 else f"{numbers[0]} ({numbers[1]}…{numbers[2]})"


def best(results: Results) -> Iterator[str]:
    """Who wins here: of all methods that meet the budget, oracles aside."""
    found = []
    for budget in (0.3, 0.5, 0.6):
        cells = [
            c for c in results["cells"] if c["budget"] == budget and c["method"] not in results["references"] and met(c)
        ]
        if cells:
            winner = min(cells, key=kl_of)
            found.append(
                f"{100 * budget:.0f} % `{winner['method']}` with gain `{winner['gain']}` ({kl_of(winner):.4f})"
            )
    if found:
        yield f"Lowest KL of all: {', '.join(found)}."


def norms(results: Results) -> Iterator[str]:
    for name in ("gsp", "rcr"):
        by_layer = [layer[name]["spearman"] for layer in results["oracle"].values() if name in layer]
        if by_layer:
            yield (
                f"*{name.upper()} estimates how much an expert answers*: its rank correlation with the true output norm of slots "
                f"is {min(by_layer):.2f} to {max(by_layer):.2f} by layer."
            )


def travel(thresholds: Results) -> Iterator[str]:
    missed = [abs(r["realised"] - r["budget"]) for r in thresholds["transfers"]]
    if missed:
        by_budget: dict[float, list[float]] = {}
        for r in thresholds["workloads"]:
            by_budget.setdefault(r["budget"], []).append(r["threshold"])
        spread = max(max(v) / min(v) - 1 for v in by_budget.values() if min(v) > 0)
        yield (
            f"*Thresholds of one workload can be used on another*: carried thresholds miss their budget by "
            f"{100 * sum(missed) / len(missed):.1f} points on average and {100 * max(missed):.1f} at worst; thresholds of one "
            f"budget differ by up to {100 * spread:.0f} % between workloads."
        )


def price(thresholds: Results) -> Iterator[str]:
    ways = {r["way"]: r for r in thresholds["cost"]}
    if {"quantile", "binary search", "frontier walk"} <= set(ways):
        one, corrected = ways["quantile"], ways["quantile, corrected"]
        yield (
            f"*Quantile mapping is 9–10 times cheaper than searching*: for all budgets together it takes {one['passes']} pass "
            f"where binary search takes {ways['binary search']['passes']} and the frontier walk "
            f"{ways['frontier walk']['passes']}, because "
            f"one pass serves every budget. It misses by up to {100 * one['worst']:.2f} points; corrected it takes "
            f"{corrected['passes']} passes and misses by {100 * corrected['worst']:.2f}."
        )
