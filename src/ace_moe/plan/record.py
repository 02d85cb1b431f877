"""The plan: tables, thresholds, settings and model fingerprint in one safetensors file.

Tensors `layers.<n>.<table>` (float32; gsp and rcr are [experts], what some policies need beside has its own shape); JSON
metadata under the key `ace`. `plan_entries` holds what a threshold is, `plan_file` how the file is written and checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import PlanError, brief
from ..files import expand
from . import file
from .entries import Phase, Threshold, Workload, look_up

__all__ = ["Phase", "Plan", "Threshold", "Workload", "missing_table", "structure_difference"]


@dataclass(frozen=True)
class Plan:
    """What `ace tables` and `ace budget` make and every integration reads."""

    tables: dict[str, dict[str, Tensor]]
    fingerprint: dict[str, Any]
    model: str = ""
    undefined: dict[str, str] = field(default_factory=dict)
    thresholds: tuple[Threshold, ...] = ()
    other_weights: tuple[str, ...] = ()
    calibrations: dict[str, dict[str, Any]] = field(default_factory=dict)

    # ---- tables -----------------------------------------------------------------------------------------------

    def with_tables(self, new: Mapping[str, Mapping[str, Tensor]], made: Mapping[str, Any] | None = None) -> Plan:
        """The plan with further tables of every layer; `made` says of a calibration which text and settings it had."""
        if set(new) != set(self.tables):
            raise PlanError("A table needs values for every MoE layer of the plan's model. Build it on that model.")
        tables = {key: {**layer, **new[key]} for key, layer in self.tables.items()}
        names = {name for layer in new.values() for name in layer}
        recorded = self.calibrations | ({name: dict(made) for name in sorted(names)} if made is not None else {})
        return replace(self, tables=tables, calibrations=recorded)

    @property
    def top_k(self) -> int:
        """Slots a token has in each layer (the fewest, where layers differ)."""
        return min(int(layer["top_k"]) for layer in self.fingerprint["structure"].values())

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Which of the named tables a policy needs are not in the plan."""
        return [name for name in names if any(name not in layer for layer in self.tables.values())]

    # ---- thresholds -------------------------------------------------------------------------------------------

    def with_thresholds(self, new: list[Threshold]) -> Plan:
        """Newest last; an entry for the same settings, budget, phase and workload is replaced."""

        def identity(t: Threshold) -> str:
            return json.dumps([t.settings, t.budget, t.phase, t.workload.sha256], sort_keys=True)

        fresh = {identity(t) for t in new}
        return replace(self, thresholds=(*(t for t in self.thresholds if identity(t) not in fresh), *new))

    def threshold(
        self, settings: Mapping[str, Any], budget: float, phase: Phase = "both", workload: str | None = None
    ) -> tuple[float, str | None]:
        """(τ, notice) for a budget: exact entry, or interpolated between two with a notice. Budget 0 needs no entry."""
        return look_up(self.thresholds, settings, budget, phase, workload)

    # ---- the model it belongs to --------------------------------------------------------------------------------

    def check_model(self, fingerprint: Mapping[str, Any], allow_other_weights: bool = False) -> Plan:
        """This plan if it fits the model; with other weights only if that is allowed, and then it is recorded."""
        difference = structure_difference(self.fingerprint["structure"], fingerprint["structure"])
        if difference:
            raise PlanError(
                f"The plan is of another model ({self.model or 'unnamed'}): {difference}. Build one with `ace tables`."
            )
        content = fingerprint["content"]
        if content in (self.fingerprint["content"], *self.other_weights):
            return self
        if not allow_other_weights:
            raise PlanError(
                f"The plan's model ({self.model or 'unnamed'}) has the same shape but other router weights. Build a plan "
                "with `ace tables`, or pass allow_other_weights for a quantised copy of the same model."
            )
        return replace(self, other_weights=(*self.other_weights, content))

    # ---- the file -----------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """A half-written plan never replaces a good one."""
        return file.write(path, self.tables, self._metadata())

    def _metadata(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "undefined": self.undefined,
            "other_weights": list(self.other_weights),
            "calibrations": self.calibrations,
            "thresholds": [asdict(t) for t in self.thresholds],
        }

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read and check everything; a file that is wrong in any way is refused with the reason."""
        path = expand(path)
        parts = file.open_file(path)
        try:
            return cls._from_parts(*file.parse(*parts))
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise PlanError(
                f"{path}: the plan's metadata is damaged ({brief(error)}). Build it again with `ace tables`."
            ) from error

    @classmethod
    def _from_parts(cls, ace: Mapping[str, Any], tables: dict[str, dict[str, Tensor]]) -> Plan:
        return cls(
            tables=tables,
            fingerprint=ace["fingerprint"],
            model=ace["model"],
            undefined=ace["undefined"],
            thresholds=tuple(Threshold.from_json(t) for t in ace["thresholds"]),
            other_weights=tuple(ace["other_weights"]),
            calibrations=ace.get("calibrations", {}),
        )


def missing_table(policy: str, table: str, calibrated: bool) -> str:
    """What to say when a policy's table is not in the plan."""
    how = "calibrates it on that text" if calibrated else "computes it from the weights"
    return (
        f"Policy {policy!r} needs the table {table}, which this plan does not have. `ace budget MODEL --plan PLAN --text FILE "
        f"--policy {policy}` {how} (in Python: `ace_moe.offline.prepare`); policy 'share' needs none."
    )


def structure_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first difference between two structures in words, or nothing."""
    if set(mine) != set(theirs):
        return f"MoE layers {_span(mine)} in the plan, {_span(theirs)} in the model"
    for key in mine:
        for name, value in mine[key].items():
            if theirs[key].get(name) != value:
                return f"layer {key} has {name} {value} in the plan, {theirs[key].get(name)} in the model"
    return ""


def _span(structure: Mapping[str, Any]) -> str:
    keys = list(structure)
    return f"{keys[0]}–{keys[-1]} ({len(keys)})" if keys else "none"
