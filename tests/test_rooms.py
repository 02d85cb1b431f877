"""The house and its laws: rooms import only what docs/architecture.md allows, and what must stand once stands once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ace_moe

SOURCE = Path(ace_moe.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
MODULES = {p.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."): p for p in SOURCE.rglob("*.py")}


def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


TREES = trees()


def room(module: str) -> str:
    """The first part of a path; the engines of `integrations/` are rooms of their own."""
    parts = module.removesuffix(".__init__").split(".")
    return ".".join(parts[:2]) if parts[0] == "integrations" else parts[0]


def targets(module: str, node: ast.ImportFrom) -> list[str]:
    """The modules of ours that a relative import names, wherever in the file it stands."""
    package = module.split(".")[:-1]
    base = package[: len(package) - (node.level - 1)] + (node.module.split(".") if node.module else [])
    found = []
    for alias in node.names:
        name = ".".join([*base, alias.name])
        known = [n for n in (name, f"{name}.__init__", ".".join(base), ".".join([*base, "__init__"])) if n in MODULES]
        found += known[:1]
    return found


def imports() -> set[tuple[str, str]]:
    """Every (module, imported module), lazy and type-only imports included."""
    return {
        (module, target)
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for target in targets(module, node)
    }


def edges() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {room(module): set() for module in MODULES if module != "__init__"}
    for module, target in imports():
        if module != "__init__" and room(module) != room(target):
            found[room(module)].add(room(target))
    return found


def allowed() -> dict[str, set[str]]:
    """The table of rooms in the architecture page: | `room/` | holds | may import |"""
    rows = re.findall(r"^\| (`[^|]+`) \| [^|]+ \| ([^|]*) \|$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    found = {}
    for rooms, may in rows:
        for name in re.findall(r"`([\w./]+)`", rooms):
            key = name.removesuffix("/").removesuffix(".py").replace("/", ".")
            found[key] = {
                m.removesuffix("/").removesuffix(".py").replace("/", ".") for m in re.findall(r"`([\w./]+)`", may)
            }
    return found


def test_rooms_import_what_the_page_says_and_nothing_else() -> None:
    """Both ways: an import the table does not allow, and a permission nobody uses."""
    assert edges() == allowed()


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle of the graph, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if found := visit(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def test_no_cycle_between_rooms() -> None:
    assert cycle(edges()) == []


def test_no_cycle_between_modules() -> None:
    """Within a room too; a package's own face may import its parts."""
    graph: dict[str, set[str]] = {}
    for module, target in imports():
        if not module.endswith("__init__") and not target.endswith("__init__"):
            graph.setdefault(module, set()).add(target)
    assert cycle(graph) == []


# ---- one place for each thing -------------------------------------------------------------------------------------------


def where(found: list[tuple[str, ast.AST]]) -> set[str]:
    return {module for module, _ in found}


def calls(name: str) -> set[str]:
    """Modules that call something of this name."""
    return where(
        [
            (module, node)
            for module, tree in TREES.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) == name
        ]
    )


def jitted() -> set[str]:
    """Names of Triton functions, with the one name under which a module imports another's."""
    found = {"kernel"}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                found.add(node.name) if module.startswith("kernels.") else None
    return found


def launches() -> dict[str, set[str]]:
    """By kernel, the modules that subscript it with a grid and call it."""
    found: dict[str, set[str]] = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value).rpartition(".")[2]
                if name in jitted():
                    found.setdefault(name, set()).add(module)
    return found


@pytest.mark.long
def test_one_place_launches_the_rule() -> None:
    found = launches()
    assert found["decide"] == found["route"] == found["restore"] == {"kernels.decide"}
    others = {"kernels.experts", "kernels.attend", "kernels.track", "kernels.bits", "kernels.gemv"}
    assert {m for modules in found.values() for m in modules} == {"kernels.decide"} | others


def test_one_place_merges_reports() -> None:
    """A ratio of executed to routed slots is taken in one function."""
    assert {
        m for m, tree in TREES.items() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "merge"
    } == {
        "runtime.report",
        "policies.sere",  # of slots, not of reports
    }
    ratios = [
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and getattr(node.right, "id", "") == "routed"
        and isinstance(node.left, ast.BinOp | ast.Name)
    ]
    assert ratios == ["runtime.report"]


def test_one_recipe_maps_budgets() -> None:
    assert calls("quantile_fits") == {"planning.recipe", "evaluate.thresholds"}, "the second studies mapping itself"
    assert calls("correct") == {"planning.recipe", "evaluate.thresholds"}
    callers = {
        "ace",
        "bench.quality",
        "cli.plans",
        "cli.serving",
        "demo.__init__",
        "planning.bounds",
        "planning.tuning",
    }
    assert calls("map_budgets") == callers


@pytest.mark.parametrize("name", ["Ace", "Share", "Gsp", "Rcr", "TopP", "Modes", "Fixed"])
def test_no_list_of_policies_outside_their_room(name: str) -> None:
    """Nobody asks a policy for its type: it brings its form along."""
    asked = [
        module
        for module, tree in TREES.items()
        if room(module) != "policies"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("isinstance", "issubclass")
        and any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))
    ]
    assert asked == []
