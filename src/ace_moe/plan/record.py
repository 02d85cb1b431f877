"""The plan: tables, thresholds, settings and model fingerprint in one safetensors file.

Tensors `layers.<n>.<table>` (float32; gsp and rcr are [experts], other tables may have a shape of their own) are there once
a policy that reads them was used; JSON metadata under the key `ace`. `entries` holds what a threshold is, `fingerprint` which
model a plan belongs to, `lookup` how a budget finds its threshold, `file` and `shapes` how the file is written and checked.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BUILD, BudgetError, PlanError
from ..files import expand, write_whole
from . import file
from .entries import Phase, Threshold, Workload, compared
from .fingerprint import Fingerprint
from .lookup import Answer, Curve, Lookup, workloads_of
from .shapes import check_factors


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan: `ace plan` makes it, every engine reads it. `tables` has every layer of the model, with or without tables in it."""

    tables: dict[str, dict[str, Tensor]]
    fingerprint: Fingerprint
    model: str = ""
    undefined: dict[str, str] = field(default_factory=dict)
    thresholds: tuple[Threshold, ...] = ()
    other_weights: tuple[str, ...] = ()
    calibrations: dict[str, dict[str, Any]] = field(default_factory=dict)
    shapes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # dimensions of tables that have others than usual
    guarded: dict[str, tuple[str, ...]] = field(default_factory=dict)  # factor table → layers never skipped under it
    recommendation: dict[str, Any] | None = None
    curves: tuple[Curve, ...] = ()
    default_workload: str | None = None  # sha256 of the text that is meant where none is named
    made: tuple[dict[str, Any], ...] = ()  # the commands that wrote into it, oldest first

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return all(equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __repr__(self) -> str:
        names = ", ".join(next(iter(self.tables.values()), {})) or "none"
        budgets = sorted({t.budget for t in self.thresholds})
        mapped = f"thresholds for {budgets[0]:.0%} to {budgets[-1]:.0%}" if budgets else "no thresholds"
        texts = ", ".join(w.name for w in self.workloads) or "no text"
        return f"Plan({self.model or 'unnamed'}: {len(self.layers)} layers, tables {names}, {mapped} on {texts})"

    @property
    def layers(self) -> list[str]:
        """The model's MoE layers, in order."""
        return list(self.fingerprint.structure)

    @property
    def top_k(self) -> int:
        """Slots a token has in each layer (the fewest, where layers differ)."""
        return min(int(layer["top_k"]) for layer in self.fingerprint.structure.values())

    # ---- tables -----------------------------------------------------------------------------------------------

    def with_tables(
        self,
        new: Mapping[str, Mapping[str, Tensor]],
        made: Mapping[str, Any] | None = None,
        *,
        shapes: Mapping[str, Sequence[str]] | None = None,
        guarded: Mapping[str, Sequence[str]] | None = None,
    ) -> Plan:
        """The plan with further tables of every layer; `made` says of a calibration which text and settings it had.

        `shapes` names the dimensions of tables that are not one value or one for each expert, pair, slot or level;
        `guarded` the layers that a new factor table never skips.
        """
        if set(new) != set(self.layers):
            raise PlanError("A table needs values for every MoE layer of the plan's model. Build it on that model.")
        tables = {key: {**self.tables.get(key, {}), **new[key]} for key in self.layers}
        check_factors(tables)
        names = sorted({name for layer in new.values() for name in layer})
        return replace(
            self,
            tables=tables,
            calibrations=self.calibrations | ({name: dict(made) for name in names} if made is not None else {}),
            shapes=self.shapes | {name: tuple(dims) for name, dims in (shapes or {}).items()},
            guarded=self.guarded | {name: tuple(layers) for name, layers in (guarded or {}).items()},
        )

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Name those of the tables that the plan does not have for every layer."""
        return [name for name in names if any(name not in self.tables.get(key, {}) for key in self.layers)]

    # ---- thresholds -------------------------------------------------------------------------------------------

    def with_thresholds(self, new: list[Threshold]) -> Plan:
        """Append entries; one for the same settings, budget, phase and workload is replaced."""

        def identity(t: Threshold) -> str:
            return json.dumps([compared(t.settings), t.budget, t.phase, t.workload.sha256], sort_keys=True)

        fresh = {identity(t) for t in new}
        kept = tuple(t for t in self.thresholds if identity(t) not in fresh)
        return replace(self, thresholds=(*kept, *new), default_workload=self._default(*(t.workload for t in new)))

    def with_curve(self, new: Curve) -> Plan:
        """Append a curve; one of the same settings and text is replaced."""
        kept = tuple(c for c in self.curves if c.workload.sha256 != new.workload.sha256 or not c.fits(new.settings))
        return replace(self, curves=(*kept, new), default_workload=self._default(new.workload))

    def curve(self, settings: Mapping[str, Any], sha256: str) -> Curve | None:
        """Find the curve of these settings, whatever their gain, on a text."""
        return next((c for c in self.curves if c.workload.sha256 == sha256 and c.fits(settings)), None)

    def lookup(
        self, settings: Mapping[str, Any], budget: float, phase: Phase = "both", workload: str | None = None
    ) -> Answer:
        """Look up τ for a budget under exact settings; `workload` names a text, by default the plan's own choice."""
        if not isinstance(budget, (int, float)):
            raise BudgetError(f"A budget is a number such as 0.5, not {budget!r:.60}.")
        return Lookup(self, settings, workload).at(budget, phase)

    # ---- texts ------------------------------------------------------------------------------------------------

    @property
    def workloads(self) -> list[Workload]:
        """Every text that something was mapped on."""
        return workloads_of(self.thresholds, self.curves)

    def with_default(self, workload: Workload) -> Plan:
        """Use this text where none is named."""
        return replace(self, default_workload=workload.sha256)

    def _default(self, *new: Workload) -> str | None:
        """Choose the default text: the first that a user gave; one that the model wrote gives way to it."""
        newest = [*(c.workload.sha256 for c in self.curves[-1:]), *(t.workload.sha256 for t in self.thresholds[-1:])]
        texts = {w.sha256: w for w in (*new, *self.workloads)}
        current = texts.get(self.default_workload or (newest[-1] if newest else ""))
        first = next((w for w in new if not w.own), next(iter(new), None))
        if first is not None and (current is None or (current.own and not first.own)):
            return first.sha256
        return current.sha256 if current else None

    # ---- the model it belongs to --------------------------------------------------------------------------------

    def check_model(self, fingerprint: Fingerprint, allow_other_weights: bool = False) -> Plan:
        """Return this plan if it fits the model; with other routers only if that is allowed, and then it is recorded.

        Other experts under the same routers are no reason to refuse: a warning says how far they are.
        """
        difference = self.fingerprint.difference(fingerprint)
        if difference:
            raise PlanError(
                f"The plan is of another model ({self.model or 'unnamed'}): {difference}. Build one with {BUILD}."
            )
        known = self.fingerprint.same_routers(fingerprint) or fingerprint.routers.among(self.other_weights)
        if not known and not allow_other_weights:
            raise PlanError(
                f"The plan's model ({self.model or 'unnamed'}) has the same shape but other router weights. Build a plan "
                f"with {BUILD}, or pass allow_other_weights for a quantised copy of the same model."
            )
        notice = self.fingerprint.experts_notice(fingerprint)
        if notice:
            warnings.warn(notice, stacklevel=2)
        return self if known else replace(self, other_weights=(*self.other_weights, fingerprint.routers.name))

    # ---- the file -----------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the file whole: a half-written plan never replaces a good one."""
        return write_whole(path, self.to_bytes(), "The plan")

    def to_bytes(self) -> bytes:
        """Build the whole file."""
        points = {f"curves.{n}": curve.points for n, curve in enumerate(self.curves)}
        metadata = {
            "model": self.model,
            "fingerprint": self.fingerprint.to_json(),
            "undefined": self.undefined,
            "other_weights": list(self.other_weights),
            "calibrations": self.calibrations,
            "shapes": {name: list(dims) for name, dims in self.shapes.items()},
            "guarded": {name: list(layers) for name, layers in self.guarded.items()},
            "thresholds": [asdict(t) for t in self.thresholds],
            "recommendation": self.recommendation,
            "curves": [curve.to_json(f"curves.{n}") for n, curve in enumerate(self.curves)],
            "default_workload": self.default_workload,
            "made": list(self.made),
        }
        return file.serialise(self.tables, points, metadata)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read and check everything; a file that is wrong in any way is refused with the reason."""
        return cls(**file.read(expand(path)))


def equal(one: Any, other: Any) -> bool:
    """Compare by value, tensors in dictionaries included."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        alike = isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype == other.dtype
        return alike and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    return bool(one == other)


def missing_table(policy: str, table: str) -> str:
    """Say that a policy's table is not in the plan, and how to make it."""
    return (
        f"Policy {policy!r} needs the table {table}, which this plan does not have. `ace plan MODEL --plan PLAN --text FILE "
        f"--policy {policy}` makes it (in Python: `ace_moe.lab.policies.prepare`); policy 'share' needs none."
    )
