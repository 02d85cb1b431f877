"""Which model a plan belongs to: its structure, its router rows, and a small sample of its experts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .entries import NUMBER, expect, expect_each

FEW_PER_CENT = 1.1  # sizes closer than this are said in per cent, others as a factor


@dataclass(frozen=True)
class Routers:
    """sha256 over all router rows as bf16. In `coarse` what fp16 holds less precisely than bf16 is set to 0, so loads of
    one bf16 checkpoint in either precision agree; None in plans of schema 1."""

    exact: str
    coarse: str | None = None

    def among(self, hashes: Iterable[str | None]) -> bool:
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
        """(factor, mine, other's) of the expert whose rms differs most."""
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
    unread: dict[str, Any] = field(default_factory=dict)  # parts of a later release, written back as they were

    def difference(self, model: Fingerprint) -> str:
        """The first difference between this structure, a plan's, and a model's in words, or nothing."""
        return structure_difference(self.structure, model.structure)

    def same_routers(self, model: Fingerprint) -> bool:
        mine = (self.routers.exact, self.routers.coarse)
        return not self.difference(model) and model.routers.among(mine)

    def experts_notice(self, model: Fingerprint) -> str | None:
        """How far a model's experts are from this plan's where both were sampled; None if they are the same."""
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
            "quantised copy differs by a few per cent; if this is another model, build a plan of it with `ace tables`."
        )

    def to_json(self) -> dict[str, Any]:
        experts = {key: {"rms": list(s.rms), "sample": s.sample} for key, s in self.experts.items()}
        routers = {"exact": self.routers.exact, "coarse": self.routers.coarse}
        return {**self.unread, "structure": self.structure, "routers": routers, "experts": experts}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Fingerprint:
        """Everything that is read later without a check is checked here; a ValueError or KeyError says what is wrong."""
        known = ("structure", "routers", "experts")
        structure, routers, experts = (found[name] for name in known)
        _check_structure(structure)
        expect_each(routers, {"exact": str, "coarse": (str, type(None))}, "routers: ")
        samples = {key: _sample(key, value) for key, value in experts.items()}
        foreign = [key for key in samples if key not in structure]
        if foreign:
            raise ValueError(f"a sample of experts of layer {foreign[0]}, which the structure does not have")
        unread = {name: value for name, value in found.items() if name not in known}
        return cls(structure, Routers(routers["exact"], routers["coarse"]), samples, unread)


def _check_structure(structure: Mapping[str, Any]) -> None:
    if not structure:
        raise ValueError("no layers")
    for key, layer in structure.items():
        for name in ("experts", "top_k"):
            expect(layer[name], int, f"{name} of layer {key}")
        if not 1 <= layer["top_k"] <= layer["experts"]:
            raise ValueError(f"layer {key} has {layer['top_k']} slots for {layer['experts']} experts")


def _sample(key: str, found: Mapping[str, Any]) -> Sample:
    expect(found["rms"], list, f"rms of layer {key}")
    expect(found["sample"], str, f"sample of layer {key}")
    for value in found["rms"]:
        expect(value, NUMBER, f"rms of layer {key}")
        if not 0 <= value < math.inf:  # NaN fails too
            raise ValueError(f"rms of layer {key} is {value!r:.40}")
    return Sample(tuple(map(float, found["rms"])), found["sample"])


def _by_how_much(factor: float, mine: float, other: float) -> str:
    sizes = f"(rms {mine:.3g} against {other:.3g})"
    times = max(factor, 1 / factor)
    if times >= FEW_PER_CENT:
        return f"are {times:.3g}× {'larger' if factor > 1 else 'smaller'} than the plan's {sizes}"
    if times < 1.0005:
        return f"have other values of the same size {sizes}"
    return f"are {times - 1:.1%} {'larger' if factor > 1 else 'smaller'} than the plan's {sizes}"


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
