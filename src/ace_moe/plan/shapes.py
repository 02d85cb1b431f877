"""What a plan's tables look like: which layers have them, their shapes, their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import PlanError
from .entries import expect

CORE = {"gsp", "rcr"}  # tables every plan has, unless it says why not
FACTOR = "factor_"  # tables with one number a layer, by which contributions are multiplied
DIMENSIONS = ("experts", "top_k", "hidden", "intermediate", "levels", "one")
MOST_DIMENSIONS = 3
ROUNDING = 1e-6
Shapes = Mapping[str, Sequence[str]]
Structure = Mapping[str, Mapping[str, Any]]
Tables = dict[str, dict[str, Tensor]]
AGAIN = "Build it again with `ace tables`."


def check_declared(shapes: dict[str, Any]) -> dict[str, list[str]]:
    """`shapes` as it stands in the metadata: table → names of its dimensions."""
    for name, dims in shapes.items():
        expect(dims, list, f"shapes: {name}")
        if name in CORE or name.startswith(FACTOR):
            raise ValueError(f"shapes: {name} has a shape of its own, which cannot be another")
        if not 1 <= len(dims) <= MOST_DIMENSIONS or any(dim not in DIMENSIONS for dim in dims):
            raise ValueError(f"shapes: {name} is {dims!r:.60}, not one to three of {', '.join(DIMENSIONS)}")
    return shapes


def check_layers(names: Mapping[str, set[str]], structure: Structure, undefined: Mapping[str, str]) -> None:
    """`names`: the tables of each layer. Every table is there for every layer of the model, and for no other."""
    wanted = (CORE | {name for layer in names.values() for name in layer}) - set(undefined)
    missing = [key for key in structure if not wanted <= names.get(key, set())]
    foreign = [key for key in names if key not in structure]
    if missing or foreign:
        raise PlanError(
            f"tables and layer list disagree (missing: {', '.join(missing[:5]) or 'none'}; foreign: "
            f"{', '.join(foreign[:5]) or 'none'}). The file was edited or cut; build it again with `ace tables`."
        )


class Expected:
    """The shapes that tables of a model of this structure have."""

    def __init__(self, structure: Structure, shapes: Shapes):
        self.structure, self.shapes = structure, shapes
        self.levels = 1 + sum(layer["top_k"] - 1 for layer in structure.values())

    def check(self, key: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        sizes = {**self.structure[key], "levels": self.levels, "one": 1}
        fits, wanted = self._judge(name, shape, sizes)
        if dtype != "float32" or not fits:
            raise PlanError(f"layers.{key}.{name} is {dtype} {list(shape)}, not float32 {wanted}. {AGAIN}")

    def _judge(self, name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[bool, str]:
        """(whether the shape is right, what it should be)."""
        if name in CORE:
            return shape == (sizes["experts"],), f"[{sizes['experts']}]"
        if name.startswith(FACTOR):
            return shape in ((), (1,)), "with one value"
        if name in self.shapes:
            wanted = [sizes[dim] for dim in self.shapes[name]]
            return list(shape) == wanted and min(wanted) > 0, f"{wanted} ({', '.join(self.shapes[name])})"
        usual = {sizes["experts"], sizes["top_k"], self.levels}
        fits = len(shape) <= 2 and set(shape) <= usual
        return fits, "with one value, or one for each expert, pair, slot or level; others are declared in `shapes`"


def check_values(tables: Tables, shapes: Shapes) -> None:
    """Finite everywhere; negative only where a shape of its own says that the table is no weight of experts."""
    for key, layer in tables.items():
        for name, values in layer.items():
            if not values.isfinite().all() or (name not in shapes and (values < 0).any()):
                kind = "NaN or infinite" if name in shapes else "NaN, infinite or negative"
                raise PlanError(f"layers.{key}.{name} has {kind} values. {AGAIN}")
    check_factors(tables)


def check_factors(tables: Tables) -> None:
    """A factor only ever lowers a layer's contributions, and one layer keeps its own."""
    for name in factors_of(tables):
        values = [float(layer[name]) for layer in tables.values() if name in layer]
        if min(values) <= 0 or abs(max(values) - 1) > ROUNDING:
            raise PlanError(
                f"{name} goes from {min(values):g} to {max(values):g}; factors are above 0 and the largest of all layers "
                "is 1. Divide them by their largest, or build the table again."
            )


def factors_of(tables: Tables) -> list[str]:
    return sorted({name for layer in tables.values() for name in layer if name.startswith(FACTOR)})


def check_factor_names(named: Mapping[str, str], tables: Tables) -> None:
    """`named`: factor table → who names it."""
    known = factors_of(tables)
    for name, who in named.items():
        if name not in known:
            raise PlanError(
                f"{who} names the factor table {name!r:.40}, which the plan does not have (it has {', '.join(known) or 'none'}"
                f"). The file was edited. {AGAIN}"
            )
