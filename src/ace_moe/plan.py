"""The plan: tables, thresholds, settings and model fingerprint in one safetensors file.

Tensors `layers.<n>.<table>` (float32; gsp and rcr are [experts], what some policies need beside has its own shape); JSON
metadata under the key `ace`. The file is written beside its target and moved over it in one step, so a half-written plan
never replaces a good one.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .errors import BudgetError, PlanError, brief, expand

SCHEMA = 1
TENSOR = re.compile(r"layers\.(?P<key>.+)\.(?P<table>[a-z_]+)")
CORE = {"gsp", "rcr"}  # tables every plan has, unless it says why not
Phase = Literal["both", "prefill", "decode"]


@dataclass(frozen=True)
class Workload:
    """The text a threshold was mapped on."""

    name: str
    sha256: str
    tokens: int


@dataclass(frozen=True)
class Threshold:
    """τ for one budget under exact settings, and the ratio it realised on the text it was mapped on."""

    policy: str
    params: dict[str, Any]
    gain: str
    min_active: int
    min_mass: float
    budget: float
    threshold: float
    realised: float
    corrected: bool
    passes: int
    workload: Workload
    phase: Phase = "both"

    @property
    def settings(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("policy", "params", "gain", "min_active", "min_mass")}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Threshold:
        found = cls(**{**entry, "workload": Workload(**entry["workload"])})
        for name, kind in KINDS.items():
            _expect(getattr(found, name), kind, f"thresholds: {name}")
        _expect(found.workload.name, str, "thresholds: workload")
        shares = (found.budget, found.realised, found.min_mass)
        if not 0 <= found.threshold <= MOST_TAU or not all(0 <= n <= 1 for n in shares):  # NaN fails either
            raise ValueError(f"threshold entry with budget {found.budget!r} has a value out of range")
        return found


MOST_TAU = 2  # contributions end at 1, τ a little above
NUMBER = (int, float)
KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("policy", "gain", "phase"), str),
    **dict.fromkeys(("budget", "threshold", "realised", "min_mass"), NUMBER),
    **{"params": dict, "min_active": int, "passes": int, "corrected": bool},
}


def _expect(value: object, kind: type | tuple[type, ...], name: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.40}")


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
        if budget == 0:
            return 0.0, None
        entries = self._entries(settings, phase, workload)
        by_budget = {t.budget: t.threshold for t in entries} | {0.0: 0.0}
        for known, tau in by_budget.items():
            if abs(known - budget) < 1e-9:
                return tau, None
        below = max((b for b in by_budget if b < budget), default=None)
        above = min((b for b in by_budget if b > budget), default=None)
        if not entries or below is None or above is None:
            raise BudgetError(self._no_entry(settings, budget, phase, workload, entries))
        tau = by_budget[below] + (budget - below) / (above - below) * (by_budget[above] - by_budget[below])
        return tau, (
            f"no threshold was mapped for {budget:.1%}: τ = {tau:.6f} is interpolated between {below:.0%} and "
            f"{above:.0%}; the realised ratio may differ"
        )

    def _entries(self, settings: Mapping[str, Any], phase: Phase, workload: str | None) -> list[Threshold]:
        matching = [t for t in self.thresholds if t.settings == dict(settings) and t.phase in (phase, "both")]
        name = workload or (matching[-1].workload.name if matching else None)
        return [t for t in matching if t.workload.name == name]

    def _no_entry(
        self, settings: Mapping[str, Any], budget: float, phase: str, workload: str | None, entries: list[Threshold]
    ) -> str:
        had = sorted({t.budget for t in entries})
        where = f" on workload {workload!r}" if workload else ""
        have = (
            f"it has {', '.join(f'{b:.0%}' for b in had)} for these settings"
            if had
            else "it has none for these settings"
        )
        return (
            f"The plan has no threshold for a budget of {budget:.1%} with {_brief(settings)}{where}: {have}. "
            f"Map one with `ace budget MODEL --plan PLAN --text FILE --budgets {budget:g}` and the same settings."
        )

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
        """Write the whole file beside the target, flush it, then move it over the target."""
        path = expand(path)
        tensors = {
            f"layers.{key}.{name}": values.detach().float().cpu().contiguous()
            for key, layer in self.tables.items()
            for name, values in layer.items()
        }
        data = save(tensors, metadata={"ace": json.dumps(self._metadata())})
        try:
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(temporary, 0o644)
                os.replace(temporary, path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise PlanError(
                f"The plan could not be written to {path} ({error.strerror or brief(error)}). Nothing was changed there; "
                "choose another place, or free space and run again."
            ) from error
        return path

    def _metadata(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
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
        metadata, tensors = _read(path)
        try:
            plan = _from_parts(metadata, tensors)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise PlanError(
                f"{path}: the plan's metadata is damaged ({brief(error)}). Build it again with `ace tables`."
            ) from error
        return plan


def missing_table(policy: str, table: str, calibrated: bool) -> str:
    """What to say when a policy's table is not in the plan."""
    how = "calibrate(plan, policy, model, windows)" if calibrated else "add_tables(plan, policy, model)"
    return (
        f"Policy {policy!r} needs the table {table}, which this plan does not have. Add it with "
        f"`ace_moe.offline.{how}`, or use policy 'share', which needs none."
    )


def _brief(settings: Mapping[str, Any]) -> str:
    params = "".join(f" {k}={v}" for k, v in settings["params"].items())
    return (
        f"policy {settings['policy']}{params}, gain {settings['gain']}, min_active {settings['min_active']}, "
        f"min_mass {settings['min_mass']:g}"
    )


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not os.path.isfile(path):
        raise PlanError(f"There is no plan at {path}. Make one with `ace tables MODEL -o {path.name}`.")
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise PlanError(
            f"{path} is not a readable safetensors file ({brief(error)}). It is truncated or no plan; build it again with "
            "`ace tables`."
        ) from error


def _from_parts(metadata: dict[str, str], tensors: dict[str, Tensor]) -> Plan:
    if "ace" not in metadata:
        raise PlanError(
            "this safetensors file is not a plan (no `ace` metadata). Make one with `ace tables MODEL -o FILE`."
        )
    ace = json.loads(metadata["ace"])
    if ace.get("schema") != SCHEMA:
        raise PlanError(
            f"the plan has schema {ace.get('schema')!r}, this release reads {SCHEMA}. Build it again with `ace tables`, "
            "or use the release that wrote it."
        )
    structure = _checked(ace)
    tables = _tables(tensors)
    _check_tables(tables, structure, ace["undefined"])
    return Plan(
        tables={key: tables.get(key, {}) for key in structure},  # the file sorts layers as text: 10 before 2
        fingerprint=ace["fingerprint"],
        model=ace["model"],
        undefined=ace["undefined"],
        thresholds=tuple(Threshold.from_json(t) for t in ace["thresholds"]),
        other_weights=tuple(ace["other_weights"]),
        calibrations=ace.get("calibrations", {}),
    )


def _checked(ace: Mapping[str, Any]) -> dict[str, Any]:
    """The layers of the fingerprint, after the types of everything that is read later without a check."""
    structure, content = ace["fingerprint"]["structure"], ace["fingerprint"]["content"]
    if not structure:
        raise ValueError("no layers")
    for key, layer in structure.items():
        _expect(layer["experts"], int, f"experts of layer {key}")
        _expect(layer["top_k"], int, f"top_k of layer {key}")
        if not 1 <= layer["top_k"] <= layer["experts"]:
            raise ValueError(f"layer {key} has {layer['top_k']} slots for {layer['experts']} experts")
    for name, value in (("model", ace["model"]), ("content", content), *ace["undefined"].items()):
        _expect(value, str, name)
    _expect(ace["other_weights"], list, "other_weights")
    _expect(ace.get("calibrations", {}), dict, "calibrations")
    return structure


def _tables(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    tables: dict[str, dict[str, Tensor]] = {}
    for name, values in tensors.items():
        match = TENSOR.fullmatch(name)
        if not match:
            raise PlanError(
                f"tensor {name!r} is not `layers.<n>.<table>`; the file is no plan of ours. Make one with `ace tables`."
            )
        key = match["key"]
        canonical = str(int(key)) if key.isdigit() else key
        if match["table"] in tables.setdefault(canonical, {}):
            raise PlanError(
                f"layer {canonical} has two tables {match['table']}; the file was edited. Build it again with `ace tables`."
            )
        tables[canonical][match["table"]] = values
    return tables


def _check_tables(
    tables: dict[str, dict[str, Tensor]], structure: Mapping[str, Any], undefined: Mapping[str, str]
) -> None:
    wanted = (CORE | {name for layer in tables.values() for name in layer}) - set(undefined)
    missing = [key for key in structure if not wanted <= set(tables.get(key, ()))]
    foreign = [key for key in tables if key not in structure]
    if missing or foreign:
        raise PlanError(
            f"tables and layer list disagree (missing: {', '.join(missing[:5]) or 'none'}; foreign: "
            f"{', '.join(foreign[:5]) or 'none'}). The file was edited or cut; build it again with `ace tables`."
        )
    levels = 1 + sum(layer["top_k"] - 1 for layer in structure.values())
    for key, layer in tables.items():
        for name, values in layer.items():
            _check_values(f"layers.{key}.{name}", values, structure[key], None if name in CORE else levels)


def _check_values(name: str, values: Tensor, layer: Mapping[str, Any], levels: int | None) -> None:
    """Tables beside the core's may have one value, one per expert, pair, slot, or level of a budget shared by layers."""
    experts = layer["experts"]
    fits = values.shape == (experts,) if levels is None else set(values.shape) <= {experts, layer["top_k"], levels}
    if values.dtype != torch.float32 or not fits:
        raise PlanError(
            f"{name} is {str(values.dtype).removeprefix('torch.')} {list(values.shape)}, not float32 [{experts}]. Build it "
            "again with `ace tables`."
        )
    if not values.isfinite().all() or (values < 0).any():
        raise PlanError(f"{name} has NaN, infinite or negative values. Build it again with `ace tables`.")


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
