"""The tables of docs/choosing.md that say which method, from stored results of `ace compare`.

python benchmarks/choosing_page.py
"""

from __future__ import annotations

from collections.abc import Iterator

from pages import DOCS, RESULTS, percent, wrapped, written
from study_claims import Results, paired, sign
from study_page import MODELS, compared, table

from ace_moe.evaluate.compare import cell_at, kl_of
from ace_moe.evaluate.grid import FIRST

PAGE = DOCS / "choosing.md"
STEPS = (0.25, 0.375, 0.5)  # of `fixed`
BUDGETS = (0.3, 0.5, 0.6)
AGAINST = (
    "top_p", "top_p:squared=true", "share:squared=true", "alloc_t", "aimer", "gsp", "ace", "rcr", "modes", "reap", "naee",
    "expert_sparsity:ace-paper", "sere:ace-paper", "xshare:ace-paper", "diep:ace-paper", "oracle", "oracle:raw",
)  # fmt: skip


def short(name: str) -> str:
    return MODELS[name].split(":")[0]


# ---- against a smaller k for every token ----------------------------------------------------------------------------


def fixed(known: dict[str, Results]) -> str:
    names = {name: short(name) for name in known}
    sizes = {
        f"{r['workload']['windows']} × {r['workload']['window']:,} on {r['environment']['device']}"
        for r in known.values()
    }
    kl = {(m, n, b): kl_of(c) for n, r in known.items() for m in FIRST for b in STEPS if (c := _first(r, m, b))}
    rows = [
        [f"`{m}`", *(" / ".join(f"{kl[m, n, b]:.4f}" if (m, n, b) in kl else "–" for b in STEPS) for n in known)]
        for m in FIRST
    ]
    ahead = [f"{100 * (kl['share', n, 0.5] / kl['fixed', n, 0.5] - 1):+.0f} % on {names[n]}" for n in known]
    behind = [names[n] for n in known if kl["fixed", n, 0.5] < kl["ace", n, 0.5]]
    return (
        "Fixed top-k against the others at its own steps, KL to the unskipped model in nats a token at 25 / 37.5 / 50 %\n"
        f"({next(iter(known.values()))['workload']['name']}, {'; '.join(sorted(sizes))}; gain `power`, `kept` for `paper`):\n\n"
        f"{table(['', *names.values()], rows)}\n"
        f"At 50 % the KL of a plain `share` against that of `fixed` is {', '.join(ahead)}. `fixed` is ahead of `ace` there on\n"
        f"{', '.join(behind) or 'none'}.\n"
    )


def _first(results: Results, method: str, budget: float) -> Results | None:
    """`paper` is `ace` with its gain."""
    return cell_at(results, *(("ace", "kept") if method == "paper" else (method, "power")), budget) or cell_at(
        results, method, "kept", budget
    )


# ---- against the gate share -----------------------------------------------------------------------------------------


def rivals(known: dict[str, Results]) -> str:
    rows = [[f"`{m}`", *(" / ".join(changes(r, m)) for r in known.values())] for m in AGAINST]
    budgets = " / ".join(f"{100 * b:.0f}" for b in BUDGETS)
    head = (
        f"Every rival against `share`: change of KL in per cent at {budgets} %, gain `power` for both, same windows as above; "
        "`=`: the 95 % interval holds 0; `–`: the budget was missed by more than half a point. The oracles run every slot and "
        "save nothing."
    )
    return f"{wrapped(head)}\n\n{table(['', *map(short, known)], rows)}\n{wrapped(' '.join(ahead(known)))}\n"


def changes(results: Results, method: str) -> list[str]:
    found = [paired(results, method, "share", "power", b) for b in BUDGETS]
    return ["–" if c is None else f"{100 * c.value:+.0f}{'' if sign(c) else '='}".replace("-", "−") for c in found]


def ahead(known: dict[str, Results]) -> Iterator[str]:
    """By budget, what is clear of `share`, and on which models."""
    for budget in BUDGETS:
        found: dict[str, list[str]] = {}
        for method in (m for m in AGAINST if not m.startswith("oracle")):
            for name, results in known.items():
                change = paired(results, method, "share", "power", budget)
                if change and sign(change) < 0:
                    found.setdefault(method, []).append(short(name))
        said = [f"`{method}` on {' and '.join(models)}" for method, models in found.items()]
        everywhere = [f"`{m}`" for m, models in found.items() if len(models) == len(known)]
        yield f"Ahead of it at {percent(budget)}: {', '.join(said) or 'none'}; on all models {', '.join(everywhere) or 'none'}."


def page() -> str:
    known = compared(RESULTS)
    return written(PAGE, fixed=fixed(known), rivals=rivals(known))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
