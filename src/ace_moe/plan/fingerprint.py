"""The model a plan belongs to: its structure, its router rows, and a small sample of its experts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import BUILD
from ..schema import items, maybe, number, record, text, values

COUNT = number(0, whole=True)
LAYER = record(
    {"experts": COUNT, "top_k": COUNT}, {"hidden": COUNT, "intermediate": COUNT, "router": text}, closed=True
)
SAMPLE = record({"rms": items(number(0)), "sample": text}, closed=True)
FINGERPRINT = record(
    {
        "structure": values(LAYER),
        "routers": record({"exact": text, "coarse": maybe(text)}, closed=True),
        "experts": values(SAMPLE),
    },
    closed=True,
)
FEW_PER_CENT = 1.1  # sizes closer than this are said in per cent, others as a factor


@dataclass(frozen=True)
class Routers:
    """sha256 over all router rows as bf16. In `coarse` what fp16 holds less precisely than bf16 is set to 0, so loads of
    one bf16 checkpoint in either precision agree; None in plans of schema 1."""

    exact: str
    coarse: str | None = None

    def among(self, hashes: Iterable[str | None]) -> bool:
        """True if one of the hashes is of these rows."""
        return any(h is not None and h in (self.exact, self.coarse) for h in hashes)

    @property
    def name(self) -> str:
        """One hash that stands for these rows: equal wherever either is."""
        return self.coarse or self.exact


@dataclass(frozen=True)
class Sample:
    """A few rows of some experts of a layer: the rms of each expert's, and a sha256 over all as bf16."""

    rms: tuple[float, ...]
    sample: str

    def size_against(self, other: Sample) -> tuple[float, float, float]:
        """Find the expert whose rms differs most: (factor, mine, other's)."""
        tiny, huge = 1e-30, 1e30  # experts of zeros can be compared too
        both = zip(self.rms, other.rms, strict=False)
        pairs = [(min(max((a + tiny) / (b + tiny), tiny), huge), a, b) for a, b in both]
        return max(pairs, key=lambda pair: abs(math.log(pair[0])), default=(1.0, 0.0, 0.0))


@dataclass(frozen=True)
class Fingerprint:
    """`structure` and `experts` by layer. A layer whose experts could not be sampled is not in `experts`."""

    structure: dict[str, dict[str, Any]]
    routers: Routers
    experts: dict[str, Sample] = field(default_factory=dict)

    def difference(self, model: Fingerprint) -> str:
        """Say the first difference between this structure, a plan's, and a model's, or nothing."""
        return structure_difference(self.structure, model.structure)

    def same_routers(self, model: Fingerprint) -> bool:
        """True if a model has this structure and these router rows."""
        mine = (self.routers.exact, self.routers.coarse)
        return not self.difference(model) and model.routers.among(mine)

    def experts_notice(self, model: Fingerprint) -> str | None:
        """Say how far a model's experts are from this plan's where both were sampled; None if they are the same."""
        common = [key for key in self.experts if key in model.experts]
        sizes = {
            key: model.experts[key].size_against(self.experts[key])
            for key in common
            if model.experts[key].sample != self.experts[key].sample
        }
        if not sizes:
            return None
        worst = max(sizes, key=lambda key: abs(math.log(sizes[key][0])))
        return (
            f"The model's experts are not those the plan was made of: in {len(sizes)} of {len(common)} layers a sample "
            f"differs; experts of layer {worst} {_by_how_much(*sizes[worst])}. The same model in another precision or a "
            f"quantised copy differs by a few per cent; if this is another model, build a plan of it with {BUILD}."
        )

    def to_json(self) -> dict[str, Any]:
        experts = {key: {"rms": list(s.rms), "sample": s.sample} for key, s in self.experts.items()}
        routers = {"exact": self.routers.exact, "coarse": self.routers.coarse}
        return {"structure": self.structure, "routers": routers, "experts": experts}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Fingerprint:
        """Parse a fingerprint; a ValueError says what is wrong."""
        FINGERPRINT(facts, "fingerprint")
        structure, routers, experts = facts["structure"], facts["routers"], facts["experts"]
        if not structure:
            raise ValueError("the fingerprint has no layers")
        for key, layer in structure.items():
            if not 1 <= layer["top_k"] <= layer["experts"]:
                raise ValueError(f"layer {key} has {layer['top_k']} slots for {layer['experts']} experts")
        if foreign := [key for key in experts if key not in structure]:
            raise ValueError(f"a sample of experts of layer {foreign[0]}, which the structure does not have")
        samples = {key: Sample(tuple(map(float, s["rms"])), s["sample"]) for key, s in experts.items()}
        return cls(structure, Routers(**routers), samples)


def _by_how_much(factor: float, mine: float, other: float) -> str:
    """Say how two sizes differ: in per cent where they are close, else as a factor."""
    sizes = f"(rms {mine:.3g} against {other:.3g})"
    times = max(factor, 1 / factor)
    if times >= FEW_PER_CENT:
        return f"are {times:.3g}× {'larger' if factor > 1 else 'smaller'} than the plan's {sizes}"
    if times < 1.0005:
        return f"have other values of the same size {sizes}"
    return f"are {times - 1:.1%} {'larger' if factor > 1 else 'smaller'} than the plan's {sizes}"


def structure_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Say the first difference between two structures, or nothing."""
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
