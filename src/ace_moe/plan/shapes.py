"""Checks of a plan's tables: which layers have them, their shapes, their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import BUILD, PlanError
from ..schema import choice, items
from ..schema import values as by_name

BY_EXPERT = {"gsp", "rcr"}  # tables with one number for each expert, whatever a file declares
FACTOR = "factor_"  # tables with one number a layer, by which contributions are multiplied
SIZE = choice("experts", "top_k", "hidden", "intermediate", "levels", "one")
DECLARED = by_name(items(SIZE, 1, 3))  # table → what its dimensions count
ROUNDING = 1e-6
Shapes = Mapping[str, Sequence[str]]
Structure = Mapping[str, Mapping[str, Any]]
Tables = dict[str, dict[str, Tensor]]
AGAIN = f"Remove the file and build it again with {BUILD}."


def check_declared(shapes: Shapes) -> None:
    """Refuse `shapes` of the metadata that declare a table which has a shape of its own."""
    for name in shapes:
        if name in BY_EXPERT or name.startswith(FACTOR):
            raise ValueError(f"shapes: {name} has a shape of its own, which cannot be another")


def check_layers(names: Mapping[str, set[str]], structure: Structure) -> None:
    """Refuse tables that are not there for every layer of the model and no other; `names`: the tables of each layer."""
    wanted = {name for layer in names.values() for name in layer}
    missing = [key for key in structure if not wanted <= names.get(key, set())]
    foreign = [key for key in names if key not in structure]
    if missing or foreign:
        raise PlanError(
            f"tables and layer list disagree (missing: {', '.join(missing[:5]) or 'none'}; foreign: "
            f"{', '.join(foreign[:5]) or 'none'}). The file was edited or cut. {AGAIN}"
        )


def check_shape(
    structure: Structure, declared: Shapes, key: str, name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    """Refuse a table of another shape than it should have: its own, a declared one, or one of the usual."""
    levels = 1 + sum(layer["top_k"] - 1 for layer in structure.values())
    sizes = {**structure[key], "levels": levels, "one": 1}
    if name in BY_EXPERT:
        fits, wanted = shape == (sizes["experts"],), f"[{sizes['experts']}]"
    elif name.startswith(FACTOR):
        fits, wanted = shape in ((), (1,)), "with one value"
    elif name in declared:
        own = [sizes[dim] for dim in declared[name]]
        fits, wanted = list(shape) == own and min(own) > 0, f"{own} ({', '.join(declared[name])})"
    else:
        fits = len(shape) <= 2 and set(shape) <= {sizes["experts"], sizes["top_k"], levels}
        wanted = "with one value, or one for each expert, pair, slot or level; others are declared in `shapes`"
    if dtype != "float32" or not fits:
        raise PlanError(f"layers.{key}.{name} is {dtype} {list(shape)}, not float32 {wanted}. {AGAIN}")


def check_values(tables: Tables, shapes: Shapes) -> None:
    """Refuse values that are not finite, and negative ones unless a declared shape says the table does not weigh experts."""
    for key, layer in tables.items():
        for name, values in layer.items():
            if not values.isfinite().all() or (name not in shapes and (values < 0).any()):
                kind = "NaN or infinite" if name in shapes else "NaN, infinite or negative"
                raise PlanError(f"layers.{key}.{name} has {kind} values. {AGAIN}")
    check_factors(tables)


def check_factors(tables: Tables) -> None:
    """Refuse factors that raise contributions or lower them in every layer: the largest of all layers is 1."""
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
    """Refuse factor tables that are named and not there; `named`: factor table → who names it."""
    known = factors_of(tables)
    for name, who in named.items():
        if name not in known:
            raise PlanError(
                f"{who} names the factor table {name!r:.40}, which the plan does not have (it has {', '.join(known) or 'none'}"
                f"). The file was edited. {AGAIN}"
            )
