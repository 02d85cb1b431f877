"""Candidates measured on one model and text, each as far as it was asked to read; nothing is measured twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel

from ... import progress
from ...checkpoint import MoEModel
from ...errors import StructureError
from ...mapping.passes import Passes, attached, observe, read_through
from ...mapping.unfinished import Journal, Row
from ...plan import Plan
from ...policies import TokenPolicy
from ...scoring.fidelity import Reference, compare
from ...scoring.predictions import predict, window_nll
from ...tables.build import add_tables
from ...text import Windows, windows_of
from .candidates import key_of, shape_of
from .evidence import TextPart, log_kl

LOOKED_AT = 4  # windows of the dense pass that thresholds come from


class Trials:
    """Trials of candidates at the budgets, window by window; the journal has what is known."""

    def __init__(
        self, model: PreTrainedModel, plan: Plan, windows: Windows, budgets: Sequence[float], journal: Journal
    ):
        self.model, self.plan, self.windows, self.budgets, self.journal = model, plan, windows, list(budgets), journal
        self.sites, self.every = MoEModel.of(model).sites, len(windows.ids)
        self.reference = Reference()
        self.policies: dict[str, TokenPolicy] = {}
        self.task: progress.Task | None = None

    def has(self, tables: Iterable[str]) -> bool:
        """True if the model has these tables; what comes from weights is computed."""
        try:
            self.plan = add_tables(self.plan, tables, self.model)
        except StructureError:
            return False
        return True

    def ranked(self, policies: Iterable[TokenPolicy], part: TextPart) -> list[TokenPolicy]:
        return sorted(policies, key=lambda p: log_kl(self.journal.rows[key_of(p)], self.budgets, part))

    def look(self, policies: Sequence[TokenPolicy]) -> None:
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

    def taus(self, policy: TokenPolicy) -> list[float]:
        return self.journal.taus[key_of(shape_of(policy))]

    @torch.inference_mode()
    def measure(self, policy: TokenPolicy, count: int) -> None:
        """The candidate on the first `count` windows at every budget; what was measured before is not measured again."""
        self.policies[key_of(policy)] = policy
        rows = self.journal.rows.setdefault(key_of(policy), [])
        if len(rows) >= count:
            return
        self.look([policy])
        with attached(self.model, self.plan, policy, self.sites) as deciders:
            passes = Passes(deciders, self.model, windows_of(self.windows.ids[: self.every // 2], ""))  # none held out
            while len(rows) < count:
                rows.append(self._row(passes, len(rows), self.taus(policy)))
                self.journal.save()
                if self.task is not None:
                    self.task.advance()

    def _row(self, passes: Passes, number: int, taus: Sequence[float]) -> Row:
        ids, row = self.windows.ids[number : number + 1], []
        whole = self.reference.of(number, lambda: self._whole(passes, number, ids))
        for tau in taus:
            passes.set(tau)
            logits = predict(self.model, ids)
            kl, agreement, _ = compare(whole, logits)[0].tolist()
            row.append([kl, agreement, float(window_nll(logits, ids.to(logits.device))[0]), passes.deciders.realised])
        return row

    def _whole(self, passes: Passes, number: int, ids: torch.Tensor) -> torch.Tensor:
        """The unskipped model's logits of a window, and its loss."""
        logits = passes.whole(ids)
        lost = float(window_nll(logits, ids.to(logits.device))[0])
        self.journal.numbers.setdefault("unskipped", {})[str(number)] = lost
        return logits
