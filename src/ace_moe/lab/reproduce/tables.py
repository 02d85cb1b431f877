"""The paper's tables: the commands that measure each with the paper's settings, and where its cells are found."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import OptionError
from . import paper

BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
# the paper's rows, as its release ran them, with the gain it gave them
METHODS = {
    "Score": "score:ace-paper", "NAEE": "naee:ace-paper", "MoDES": "modes:ace-paper", "DiEP": "diep:ace-paper",
    "AIMER": "aimer:gain=kept", "Top-P": "top_p:gain=kept", "SERE": "sere:ace-paper", "XShare": "xshare:ace-paper",
    "ExpertSparsity": "expert_sparsity:ace-paper", "GSP": "gsp:gain=kept", "RCR": "rcr:gain=kept", "ACE": "paper",
}  # fmt: skip
FUSIONS = {"Min": "ace:fusion=min:gain=kept", "Mean": "ace:fusion=mean:gain=kept", "Max": "paper"}
WAYS = {"Quantile mapping": "quantile", "Binary search": "binary search", "MoDES frontier search": "frontier walk"}
SIZES = tuple(paper.LATENCY)
PLAN = "plan.safetensors"
NO_BUDGET = "none of this table's budgets was asked for: name some of 0.1, 0.3 and 0.5 with --budgets"


@dataclass(frozen=True)
class Setup:
    """The user's settings. Files are passed on to the commands; results go into `folder`."""

    model: str
    name: str  # of the model, without its folder
    folder: Path
    text: Path
    workloads: tuple[Path, ...] = ()
    data: Path | None = None
    tasks: str = "paper"
    harness: str = "lm-eval"
    limit: int | None = None
    run_code: bool = False
    tokens: int = 1 << 18
    window: int = 2048
    batch: int = 1
    device: str | None = None
    budgets: tuple[float, ...] = BUDGETS

    def at(self, file: str) -> str:
        return str(self.folder / file)

    def sizes(self) -> list[str]:
        return flags(tokens=self.tokens, window=self.window, batch=self.batch, device=self.device)


def flags(**given: object) -> list[str]:
    """Options as they are typed: of what is true the name alone, of what is not given nothing."""
    named = {f"--{name.replace('_', '-')}": value for name, value in given.items() if value not in (None, False)}
    return [part for name, value in named.items() for part in ([name] if value is True else [name, str(value)])]


@dataclass(frozen=True)
class CommandStep:
    """One command. `passes` over the text, about; `lacks` says why it cannot run here."""

    name: str
    argv: tuple[str, ...]
    file: str
    passes: int
    needs: str = ""
    lacks: str = ""
    whole: Callable[[Any], bool] = field(default=lambda found: True, compare=False)  # whether the file needs no more


@dataclass(frozen=True)
class PaperCell:
    """`place` is where the step's file has the number; `paper` what the paper printed there."""

    row: str
    column: str
    step: str
    place: tuple[Any, ...]
    paper: float | None = None


@dataclass(frozen=True)
class PaperTable:
    name: str
    title: str
    steps: tuple[CommandStep, ...]
    cells: tuple[PaperCell, ...]


def tables(setup: Setup, wanted: str) -> list[PaperTable]:
    """The tables of a name; `all` has every one."""
    names = list(TABLES) if wanted == "all" else [wanted]
    if not set(names) <= set(TABLES):
        raise OptionError(f"There is no table {wanted!r}. Choose one of: {', '.join(TABLES)}, all.")
    return [TABLES[name](setup) for name in names]


# ---- quality ------------------------------------------------------------------------------------------------------------


def main(setup: Setup) -> PaperTable:
    title = f"{setup.name}: every method at every budget, perplexity and mean accuracy"
    return _quality(setup, "main", title, METHODS, setup.budgets)


def components(setup: Setup) -> PaperTable:
    methods = {name: METHODS[name] for name in ("GSP", "RCR", "ACE")}
    budgets = [b for b in (0.1, 0.3, 0.5) if b in setup.budgets]
    return _quality(setup, "components", f"{setup.name}: the two views and both together", methods, budgets)


def fusion(setup: Setup) -> PaperTable:
    budgets = [b for b in (0.3, 0.5) if b in setup.budgets]
    return _quality(setup, "fusion", f"{setup.name}: how the views are fused", FUSIONS, budgets)


def _quality(setup: Setup, name: str, title: str, methods: dict[str, str], budgets: Sequence[float]) -> PaperTable:
    steps = [_plan(setup), _compare(setup, name, tuple(methods.values()), budgets)]
    steps += [step for method in methods.values() for step in _accuracy(setup, name, method, budgets)]
    cells = []
    for row, method in {"BF16": next(iter(methods.values())), **methods}.items():
        for budget in budgets if row != "BF16" else (0.0,):
            place: tuple[Any, ...] = (method, "cited", budget) if budget else ("dense",)
            column, printed = f"{budget:.0%} " if budget else "", paper.quality(setup.name, row, budget)
            cells.append(PaperCell(row, f"{column}PPL", steps[1].name, place, printed[0]))
            cells.append(PaperCell(row, f"{column}Acc.", f"{name}: accuracy of {method}", (budget,), printed[1]))
    return PaperTable(name, title, tuple(steps), tuple(cells))


def _plan(setup: Setup) -> CommandStep:
    return CommandStep("plan", ("plan", setup.model, "--tables", "-o", setup.at(PLAN)), PLAN, 0)


def _compare(setup: Setup, table: str, methods: Sequence[str], budgets: Sequence[float]) -> CommandStep:
    """Without correction: the paper maps with one pass and reports what it realised."""
    given = flags(text=setup.text, methods=",".join(methods), gains="cited", budgets=_listed(budgets))
    given += [*flags(plan=setup.at(PLAN), no_correct=True), *setup.sizes(), "-o", setup.at("compare.json")]
    asked = {(method, budget) for method in methods for budget in budgets}
    return CommandStep(
        f"{table}: perplexity", ("compare", setup.model, *given), "compare.json", 1 + 2 * len(asked),
        lacks="" if budgets else NO_BUDGET, whole=lambda found: asked <= _measured(found),
    )  # fmt: skip


def _measured(found: Any) -> set[tuple[str, float]]:
    cells = {(c["method"], c["budget"]) for c in found["cells"]}
    return cells | {(m, b) for m, refused in found["refused"].items() for b in refused["budgets"]}


def _accuracy(setup: Setup, table: str, method: str, budgets: Sequence[float]) -> list[CommandStep]:
    """Thresholds of the method into the plan, then the tasks. The paper maps on each task's own prompts, this on the text."""
    policy = {"preset": "paper"} if method == "paper" else {"policy": method}
    lacks = _lacking(setup) if budgets else NO_BUDGET
    given = flags(plan=setup.at(PLAN), text=setup.text, budgets=_listed(budgets), **policy)
    given += [*flags(no_correct=True, no_fidelity=True), *setup.sizes()]
    mapped = CommandStep(f"{table}: thresholds of {method}", ("plan", setup.model, *given), PLAN, 1, lacks=lacks)
    file = f"eval_{method.replace(':', '_').replace('=', '_')}.json"
    asked = flags(plan=setup.at(PLAN), tasks=setup.tasks, skip=f"0,{_listed(budgets)}", **policy, harness=setup.harness)
    asked += flags(device=setup.device, data=setup.data, limit=setup.limit, run_code=setup.run_code)
    argv = ("eval", setup.model, *asked, "-o", setup.at(file))
    return [mapped, CommandStep(f"{table}: accuracy of {method}", argv, file, 0, "" if setup.data else "hub", lacks)]


def _lacking(setup: Setup) -> str:
    module = setup.harness.replace("-", "_")
    if importlib.util.find_spec(module) is None:
        return f"{setup.harness} is not installed: pip install 'ace-moe[eval]'"
    return ""


def _listed(budgets: Sequence[float]) -> str:
    return ",".join(f"{b:g}" for b in budgets)


# ---- thresholds ---------------------------------------------------------------------------------------------------------


def stability(setup: Setup) -> PaperTable:
    step = _thresholds(setup, "stability: thresholds", setup.budgets)
    cells = [
        PaperCell(path.name, f"{b:.0%}", step.name, ("own", path.name, b), paper.threshold(setup.name, path.stem, b))
        for path in setup.workloads
        for b in setup.budgets
    ]
    return PaperTable(
        "stability", f"{setup.name}: thresholds of each workload", (*cost(setup).steps, step), tuple(cells)
    )


def cost(setup: Setup) -> PaperTable:
    """Cost of the first budget alone, as in the paper; the study of all budgets goes on in the same file and finds it there."""
    step = _thresholds(setup, "cost: ways to map", setup.budgets[:1])
    printed = paper.COST if paper.known(setup.name) == "qwen3" else {}
    cells = [PaperCell(row, "minutes", step.name, ("cost", way), printed.get(way)) for row, way in WAYS.items()]
    title = f"{setup.name}: what finding a threshold for {setup.budgets[0]:.0%} costs"
    return PaperTable("cost", title, (_plan(setup), step), tuple(cells))


def _thresholds(setup: Setup, name: str, budgets: Sequence[float]) -> CommandStep:
    texts = [part for path in setup.workloads for part in ("--text", str(path))]
    given = flags(policy="ace", gain="kept", plan=setup.at(PLAN), budgets=_listed(budgets), no_measured=True)
    argv = ("study", "thresholds", setup.model, *texts, *given, *setup.sizes())
    lacks = "" if len(setup.workloads) > 1 else "two workloads or more are needed: repeat --workload for each"
    asked = {(path.name, budget) for path in setup.workloads for budget in budgets}
    return CommandStep(
        name, (*argv, "-o", setup.at("thresholds.json")), "thresholds.json", 30 + 3 * len(asked), lacks=lacks,
        whole=lambda found: bool(found["cost"]) and asked <= {(w["workload"], w["budget"]) for w in found["workloads"]},
    )  # fmt: skip


# ---- time ---------------------------------------------------------------------------------------------------------------


def latency(setup: Setup) -> PaperTable:
    """The paper's BF16 is transformers' eager experts; without a GPU the times are of whatever there is."""
    given = flags(plan=setup.at(PLAN), rows="paper", skip="0,0.6", stock="eager", device=setup.device)
    step = CommandStep(
        "latency", ("bench", setup.model, *given, "-o", setup.at("latency.json")), "latency.json", 0, needs="GPU",
        whole=lambda found: all(_timed(found, what, size) for what in ("ttft", "tpot") for size in SIZES),
    )  # fmt: skip
    cells = []
    for size in SIZES:
        printed = paper.LATENCY[size] if paper.known(setup.name) == "qwen3" else (None,) * 4
        columns = [(what, path) for what in ("ttft", "tpot") for path in (("eager", 0.0), ("ace", 0.6))]
        for (what, path), value in zip(columns, printed, strict=True):
            named = f"{what.upper()} {'BF16' if path[0] == 'eager' else 'ACE'} ms"
            cells.append(PaperCell(f"{size[0]} × {size[1]}", named, step.name, (what, *size, *path), value))
    return PaperTable("latency", f"{setup.name}: latency at 60 % skipped", (_plan(setup), step), tuple(cells))


def _timed(found: Any, what: str, size: tuple[int, int]) -> bool:
    asked = {("eager", 0.0), ("ace", 0.6)}
    rows = [r for r in found["rows"] if (r["what"], r["tokens"], r["batch"]) == (what, *size)]
    return asked <= {(r["path"], r["requested"]) for r in rows}


TABLES: dict[str, Callable[[Setup], PaperTable]] = {
    "main": main,
    "components": components,
    "fusion": fusion,
    "stability": stability,
    "cost": cost,
    "latency": latency,
}
