"""The settings that suit a model: candidates in stages, judged by KL on a part of a text and checked on the rest.

No theory picks a score, a gain or layer factors; a short unlabelled text does. Each stage changes one thing about the best so
far. Its candidates read two windows; the better third of them reads two more, and so on. KL is compared at the budget that was
asked: what a candidate realises more or less is taken out along the slope of its own log KL.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import progress
from ..checkpoint import MoEModel
from ..errors import StructureError, TextError
from ..fidelity import Reference, compare
from ..plan import Plan
from ..policies import TokenPolicy
from ..policies.base import MEAN
from ..runtime import Runtime
from ..runtime.settings import check_budget
from ..scoring import predict, predicts, window_nll
from ..tables.build import add_tables
from ..text import Windows, windows_of
from ..version import __version__
from . import candidates, factors
from .candidates import BASELINE, key_of, shape_of
from .evidence import Evidence, Part, log_kl, loss
from .journal import Journal
from .passes import attached, observe, read_through
from .recipe import Save, map_budgets

ROUNDS = (2, 4, 6)  # windows that a stage's candidates have read after each round
BEST, KEPT = 3, 3  # candidates that a stage hands on; one in so many of a round's goes on
LEAST = 4  # windows of a text
HELD = 4  # one window in so many is not chosen on
LOOKED_AT = 4  # windows of the dense pass that thresholds come from
CLOSE = math.log(1.02)  # KL this close is equal; perplexity decides then


@dataclass(frozen=True)
class Tuned:
    """The plan with thresholds and recommendation, and every candidate with what was seen of it, best first."""

    plan: Plan
    policy: TokenPolicy
    tried: list[dict[str, Any]]
    searched: Plan  # with the tables of every candidate

    @property
    def recommendation(self) -> dict[str, Any]:
        assert self.plan.recommendation is not None
        return self.plan.recommendation


def tune(
    model: PreTrainedModel,
    plan: Plan,
    windows: Windows,
    budgets: Sequence[object],
    *,
    path: str | Path | None = None,
    mean: bool = True,
    save: Save = lambda plan: None,
) -> Tuned:
    """The plan with what suits this model on this text: thresholds at the budgets, and a recommendation with its evidence.

    `path`: where the plan lies; a search that is stopped goes on from a file beside it. `mean`: whether the mean of skipped
    experts is tried, which engines other than transformers cannot run.
    """
    wanted = sorted({check_budget(b, plan.top_k) for b in budgets} - {0.0})
    _check(model, windows, wanted)
    journal = Journal(path, _identity(model, plan, windows, wanted))
    search = Search(model, plan, windows, wanted, journal)
    best, plain = search.run(mean)
    choice, runner_up = search.choose(best)
    served = choice if choice.compensate is None else search.choose(plain)[0]
    recommendation = {
        "settings": choice.settings,
        "served": served.settings,
        "budgets": wanted,
        "text": vars(windows.workload),
        "evidence": search.evidence(choice, runner_up),
    }
    for policy in dict.fromkeys([served, choice]):  # newest last: what `auto` takes
        mapped = map_budgets(
            model, search.with_tables_of(plan, policy), policy, windows, wanted, judged=True, save=save
        )
        plan = mapped.plan
    plan = replace(plan, recommendation=recommendation)
    save(plan)
    journal.remove()
    return Tuned(plan, choice, search.table(), search.plan)


def _check(model: PreTrainedModel, windows: Windows, budgets: Sequence[float]) -> None:
    if not predicts(model):
        raise TextError("Settings are judged by a model's predictions, and this one makes none. Load it with its head.")
    if len(windows.ids) < LEAST or not budgets:
        raise TextError(
            f"Tuning needs budgets above 0 and at least {LEAST} windows, of which some are held out; here are {len(budgets)} and "
            f"{len(windows.ids)}. Give a longer text, or a smaller --window."
        )


def _identity(model: PreTrainedModel, plan: Plan, windows: Windows, budgets: Sequence[float]) -> dict[str, Any]:
    return {
        **{"model": plan.fingerprint.routers.exact, "text": windows.workload.sha256, "budgets": list(budgets)},
        **{"dtype": str(model.dtype), "device": model.device.type, "version": __version__, "torch": torch.__version__},
    }


class Search:
    """Candidates on one model and text. Windows in front are chosen on, those behind are held out."""

    def __init__(
        self, model: PreTrainedModel, plan: Plan, windows: Windows, budgets: Sequence[float], journal: Journal
    ):
        self.model, self.plan, self.windows, self.budgets, self.journal = model, plan, windows, list(budgets), journal
        self.sites = MoEModel.of(model).sites
        self.every = len(windows.ids)
        self.chosen_on = self.every - max(1, self.every // HELD)
        self.reference = Reference()
        self.policies: dict[str, TokenPolicy] = {}
        self.task: progress.Task | None = None

    # ---- stages -------------------------------------------------------------------------------------------------

    def run(self, mean: bool) -> tuple[list[TokenPolicy], list[TokenPolicy]]:
        """(the best candidates, the best in which nothing stands in for skipped slots), read to the end of the part."""
        with progress.task("measurements", self._most(mean)) as self.task:
            self.task.done = self.task.before = self.journal.windows
            best = self.stage(candidates.scores())
            best = self.stage([*best, *candidates.gains(best, self._fitted(best[0]))])
            best = self.stage([*best, *candidates.factors(best, self._factors(best[0]))])
            plain = best = self.stage([*best, *candidates.floors(best)])
            if mean and self._has([MEAN]):
                best = self.stage([*best, *candidates.means(best)])
            for policy in dict.fromkeys([*plain, *best, BASELINE]):
                self.measure(policy, self.every)
        return best, plain

    def stage(self, pool: Iterable[TokenPolicy]) -> list[TokenPolicy]:
        """The best of a pool, of which fewer go on each time that more windows are read."""
        left = [p for p in dict.fromkeys(pool) if candidates.usable(self.plan, p, self.budgets)]
        left = [p for p in left if self._has(p.tables)]
        self._look(left)
        for count in ROUNDS:
            count = min(count, self.chosen_on)
            for policy in left:
                self.measure(policy, count)
            left = self.ranked(left, Part(0, count))[: max(BEST, math.ceil(len(left) / KEPT))]
        return left[:BEST]

    def _most(self, mean: bool) -> int:
        """Measurements if every stage has all its candidates."""
        sizes = [len(candidates.SCORES), BEST * 5 + 1, BEST * 3, BEST * 2, BEST * 3 if mean else 0]
        each = [2 * n + 2 * math.ceil((n + BEST) / KEPT) + 2 * BEST for n in sizes]
        return sum(each) + 2 * BEST * max(0, self.every - ROUNDS[-1])

    def _has(self, tables: Iterable[str]) -> bool:
        """Whether the model has these tables; what comes from weights is computed."""
        try:
            self.plan = add_tables(self.plan, tables, self.model)
        except StructureError:
            return False
        return True

    # ---- tables that the text gives -----------------------------------------------------------------------------

    def _fitted(self, policy: TokenPolicy) -> str:
        """The table of gains that fit this candidate's layers."""
        part = self.windows.ids[: ROUNDS[0]].split(1)
        name = f"gain_fit_{self._mark(policy)}"
        return self._numbered(
            name, lambda: factors.fitted_gains(self.model, self.plan, policy, part, self._middle(policy))
        )

    def _factors(self, policy: TokenPolicy) -> list[str]:
        """Tables of layer factors; sensitivity is that of this candidate."""
        first = self.windows.ids[:1]
        made = {
            f"factor_branch_{self._mark()}": lambda: factors.branch(self.model, first),
            f"factor_sensitivity_{self._mark(policy)}": lambda: factors.sensitivity(
                self.model, self.plan, policy, first, self._middle(policy)
            ),
            "factor_first": lambda: dict.fromkeys(self.plan.tables, 1.0),
        }
        names = [self._numbered(name, lambda make=make: factors.as_factor(make())) for name, make in made.items()]
        guard = {"factor_first": [next(iter(self.plan.tables))]}
        self.plan = replace(self.plan, guarded=self.plan.guarded | {k: tuple(v) for k, v in guard.items()})
        return names

    def _mark(self, policy: TokenPolicy | None = None) -> str:
        """What tells tables of other texts and candidates apart: thresholds hold for one table alone."""
        text = torch.tensor(list((self.windows.workload.sha256 + (key_of(policy) if policy else "")).encode()))
        return windows_of(text.view(1, -1), "").workload.sha256[:8]

    def _middle(self, policy: TokenPolicy) -> float:
        return self._taus(policy)[len(self.budgets) // 2]

    def _numbered(self, name: str, make: Any) -> str:
        """The table with one number a layer, made once."""
        if name not in self.journal.numbers:
            self.journal.numbers[name] = make()
            self.journal.save()
        numbers = self.journal.numbers[name]
        self.plan = self.plan.with_tables({key: {name: torch.tensor(numbers[key])} for key in self.plan.tables})
        return name

    def with_tables_of(self, plan: Plan, policy: TokenPolicy) -> Plan:
        """The user's plan with the tables that the text gave and this policy needs."""
        names = [n for n in plan.lacks(policy.tables) if n in self.journal.numbers]
        new = {key: {n: layer[n] for n in names} for key, layer in self.plan.tables.items()}
        guarded = {n: self.plan.guarded[n] for n in names if n in self.plan.guarded}
        made = {"params": {}, "workload": vars(self.windows.workload)}
        return plan.with_tables(new, made, guarded=guarded) if names else plan

    # ---- measurements -------------------------------------------------------------------------------------------

    def _look(self, policies: Sequence[TokenPolicy]) -> None:
        """Thresholds of the unskipped model for all of these, by one pass."""
        shapes = {key_of(shape_of(p)): shape_of(p) for p in policies}
        new = {key: shape for key, shape in shapes.items() if key not in self.journal.taus}
        if not new:
            return
        part = windows_of(self.windows.ids[:LOOKED_AT], "")
        _, seen = observe(self.model, self.plan, new, lambda: read_through(self.model, part))
        for key, histogram in seen.items():
            self.journal.taus[key] = [histogram.threshold(budget) for budget in self.budgets]
        self.journal.save()

    def _taus(self, policy: TokenPolicy) -> list[float]:
        return self.journal.taus[key_of(shape_of(policy))]

    @torch.inference_mode()
    def measure(self, policy: TokenPolicy, count: int) -> None:
        """The candidate on the first `count` windows at every budget; what was measured before is not measured again."""
        self.policies[key_of(policy)] = policy
        rows = self.journal.rows.setdefault(key_of(policy), [])
        if len(rows) >= count:
            return
        self._look([policy])
        with attached(self.model, self.plan, policy, self.sites) as runtime:
            while len(rows) < count:
                rows.append(self._row(runtime, len(rows), self._taus(policy)))
                self.journal.save()
                if self.task is not None:
                    self.task.advance()

    def _row(self, runtime: Runtime, number: int, taus: Sequence[float]) -> list[list[float]]:
        ids = self.windows.ids[number : number + 1]
        row = []
        for tau in taus:
            whole = self.reference.of(number, lambda: self._whole(runtime, number))
            runtime.set(torch.full((3,), tau))
            runtime.reset()
            logits = predict(self.model, ids)
            kl, agreement, _ = compare(whole, logits)[0].tolist()
            row.append([kl, agreement, float(window_nll(logits, ids.to(logits.device))[0]), runtime.realised])
        return row

    def _whole(self, runtime: Runtime, number: int) -> torch.Tensor:
        """The unskipped model's logits of a window, and its loss."""
        ids = self.windows.ids[number : number + 1]
        with runtime.aside():
            logits = predict(self.model, ids)
        lost = float(window_nll(logits, ids.to(logits.device))[0])
        self.journal.numbers.setdefault("unskipped", {})[str(number)] = lost
        return logits

    # ---- what is best -------------------------------------------------------------------------------------------

    def ranked(self, policies: Iterable[TokenPolicy], part: Part) -> list[TokenPolicy]:
        return sorted(policies, key=lambda p: log_kl(self.journal.rows[key_of(p)], self.budgets, part))

    def choose(self, best: Sequence[TokenPolicy]) -> tuple[TokenPolicy, TokenPolicy]:
        """(choice, runner-up): the least KL, among equals the least perplexity; never what is worse than the gate share on the
        windows that were held out."""
        part, held = Part(0, self.chosen_on), Part(self.chosen_on, self.every)
        rows = {p: self.journal.rows[key_of(p)] for p in (*best, BASELINE)}
        order = self.ranked(best, part)
        least = log_kl(rows[order[0]], self.budgets, part)
        equal = [p for p in order if log_kl(rows[p], self.budgets, part) <= least + CLOSE]
        choice = min(equal, key=lambda p: loss(rows[p], part))
        if log_kl(rows[BASELINE], self.budgets, held) < log_kl(rows[choice], self.budgets, held):
            return BASELINE, choice
        return choice, next((p for p in order if p != choice), BASELINE)

    # ---- what is said of it -------------------------------------------------------------------------------------

    def evidence(self, choice: TokenPolicy, runner_up: TokenPolicy) -> dict[str, Any]:
        """On the windows that were held out; the unskipped model's loss beside."""
        tell = Evidence(self.journal, self.budgets, Part(self.chosen_on, self.every), self.windows.ids.shape[1] - 1)
        whole = {"choice": choice, "runner_up": runner_up, "baseline": BASELINE}
        found = {name: tell.of(policy, BASELINE) for name, policy in whole.items()}
        return {**found, "candidates": len(self.journal.rows), "held_out": tell.size}

    def table(self) -> list[dict[str, Any]]:
        """Every candidate with its KL on the windows it has read, furthest first, then best first."""
        tell = Evidence(self.journal, self.budgets, Part(0, self.chosen_on), self.windows.ids.shape[1] - 1)
        rows = [tell.row(policy) for policy in self.policies.values()]
        return sorted(rows, key=lambda row: (-row["windows"], row["log_kl"]))
