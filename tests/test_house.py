"""The rooms of the package: imports between them have no cycle, the lab stays behind its door, one name means one thing."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import ace_moe

SRC = Path(ace_moe.__file__).parent
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SRC.rglob("*.py")}
DOORS = {"cli", "demo", "lab"}  # may import the lab


def room(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """Rooms that a file imports, inside functions and for types too."""
    package = ".".join(("ace_moe", *path.parent.relative_to(SRC).parts))
    rooms: set[str] = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names = [module] if module != "ace_moe" else [f"ace_moe.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("ace_moe.")}
    return rooms - {room(path)}


def test_rooms_import_one_way() -> None:
    graph: dict[str, set[str]] = {}
    for path in TREES:
        graph.setdefault(room(path), set()).update(imported(path))
    assert len(graph) > 20 and graph["cli"] and "errors" in graph["plan"]
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


def test_only_doors_import_the_lab() -> None:
    assert not [path for path in TREES if room(path) not in DOORS and "lab" in imported(path)]


def test_names_mean_one_thing() -> None:
    """Class names are unique in the package, module names in a room; each part of the lab is a room of its own."""
    classes = Counter(node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert not [name for name, count in classes.items() if count > 1]
    paths = [path.relative_to(SRC) for path in TREES if path.name != "__init__.py"]
    modules = Counter((path.parts[: 2 if path.parts[0] == "lab" else 1], path.stem) for path in paths)
    assert not [name for name, count in modules.items() if count > 1]
