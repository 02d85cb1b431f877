"""The settings that suit a model: candidates in stages, judged by KL on a part of a text and checked on the rest.

No theory picks a score, a gain or layer factors; a short unlabelled text does. Each stage changes one thing about the best so
far. Its candidates read two windows; the better third of them reads two more, and so on. KL is compared at the budget that was
asked: what a candidate realises more or less is taken out along the slope of its own log KL.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ... import progress
from ...budget import check_budget
from ...errors import TextError
from ...mapping.recipe import Save, map_budgets
from ...mapping.unfinished import Journal
from ...plan import Plan
from ...policies import TokenPolicy
from ...scoring.predictions import predicts
from ...text import Windows
from ...version import __version__
from . import candidates, factors
from .candidates import BASELINE, key_of, varied
from .evidence import Evidence, TextPart, log_kl, loss
from .trials import Trials

ROUNDS = (2, 4, 6)  # windows that a stage's candidates have read after each round
BEST, KEPT = 3, 3  # candidates that a stage hands on; one in so many of a round's goes on
LEAST = 4  # windows of a text
HELD = 4  # one window in so many is not chosen on
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
    save: Save = lambda plan: None,
) -> Tuned:
    """The plan with what suits this model on this text: thresholds at the budgets, and a recommendation with its evidence.

    `path`: where the plan lies; a search that is stopped goes on from a file beside it.
    """
    wanted = sorted({check_budget(b, plan.top_k) for b in budgets} - {0.0})
    _check(model, windows, wanted)
    journal = Journal(path, identity(model, plan, windows, wanted))
    search = Search(model, plan, windows, wanted, journal)
    choice, runner_up = search.choose(search.run())
    recommendation = {
        "settings": choice.settings,
        "budgets": wanted,
        "text": vars(windows.workload),
        "evidence": search.evidence(choice, runner_up),
    }
    mapped = map_budgets(model, search.with_tables_of(plan, choice), choice, windows, wanted, judged=True, save=save)
    plan = replace(mapped.plan, recommendation=recommendation)
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


def identity(model: PreTrainedModel, plan: Plan, windows: Windows, budgets: Sequence[float]) -> dict[str, Any]:
    """The facts that must be the same for a search to go on from its journal."""
    return {
        **{"model": plan.fingerprint.routers.exact, "text": windows.workload.sha256, "budgets": list(budgets)},
        "window": windows.ids.shape[1],  # the same tokens cut otherwise are other windows
        **{"dtype": str(model.dtype), "device": model.device.type, "version": __version__, "torch": torch.__version__},
    }


class Search(Trials):
    """Candidates on one model and text. Windows in front are chosen on, those behind are held out."""

    @property
    def chosen_on(self) -> int:
        """Windows in front, to choose on."""
        return self.every - max(1, self.every // HELD)

    # ---- stages -------------------------------------------------------------------------------------------------

    def run(self) -> list[TokenPolicy]:
        """The best candidates, read to the end of the part."""
        with progress.task("measurements", self._most()) as self.task:
            self.task.done = self.task.before = self.journal.windows
            best = self.stage(candidates.scores())
            fitted = replace(best[0], gain=self._fitted(best[0]))  # the table of fitted gains belongs to the first
            best = self.stage([*best, *varied(best, "gain", candidates.GAINS), fitted])
            best = self.stage([*best, *varied(best, "factor", self._factors(best[0]))])
            best = self.stage([*best, *varied(best, "min_active", candidates.FLOORS)])
            for policy in dict.fromkeys([*best, BASELINE]):
                self.measure(policy, self.every)
        return best

    def stage(self, pool: Iterable[TokenPolicy]) -> list[TokenPolicy]:
        """The best of a pool, of which fewer go on each time that more windows are read."""
        left = [p for p in dict.fromkeys(pool) if candidates.usable(self.plan, p, self.budgets)]
        left = [p for p in left if self.has(p.tables)]
        self.look(left)
        for count in ROUNDS:
            count = min(count, self.chosen_on)
            for policy in left:
                self.measure(policy, count)
            left = self.ranked(left, TextPart(0, count))[: max(BEST, math.ceil(len(left) / KEPT))]
        return left[:BEST]

    def _most(self) -> int:
        """Measurements if every stage has all its candidates."""
        sizes = [len(candidates.SCORES), BEST * 5 + 1, BEST * 3, BEST * 2]
        each = [2 * n + 2 * math.ceil((n + BEST) / KEPT) + 2 * BEST for n in sizes]
        return sum(each) + BEST * max(0, self.every - ROUNDS[-1])

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
        first_layer = (next(iter(self.plan.tables)),)
        self.plan = replace(self.plan, guarded=self.plan.guarded | {"factor_first": first_layer})
        return names

    def _mark(self, policy: TokenPolicy | None = None) -> str:
        """A mark that tells tables of other texts and candidates apart: thresholds hold for one table alone."""
        of = self.windows.workload.sha256 + ("" if policy is None else key_of(policy))
        return hashlib.sha256(of.encode()).hexdigest()[:8]

    def _middle(self, policy: TokenPolicy) -> float:
        return self.taus(policy)[len(self.budgets) // 2]

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

    # ---- what is best -------------------------------------------------------------------------------------------

    def choose(self, best: Sequence[TokenPolicy]) -> tuple[TokenPolicy, TokenPolicy]:
        """(choice, runner-up): the least KL, among equals the least perplexity; never what is worse than the gate share on the
        windows that were held out."""
        part, held = TextPart(0, self.chosen_on), TextPart(self.chosen_on, self.every)
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
        tell = self._evidence(TextPart(self.chosen_on, self.every))
        whole = {"choice": choice, "runner_up": runner_up, "baseline": BASELINE}
        found = {name: tell.of(policy, BASELINE) for name, policy in whole.items()}
        return {**found, "candidates": len(self.journal.rows), "held_out": tell.size}

    def _evidence(self, part: TextPart) -> Evidence:
        return Evidence(self.journal, self.budgets, part, self.windows.ids.shape[1] - 1)

    def table(self) -> list[dict[str, Any]]:
        """List every candidate with its KL on the windows it has read, those that read most first, then the best."""
        tell = self._evidence(TextPart(0, self.chosen_on))
        rows = [tell.row(policy) for policy in self.policies.values()]
        return sorted(rows, key=lambda row: (-row["windows"], row["log_kl"]))
