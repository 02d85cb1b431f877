"""How pages are written from stored results: what stands between two marks of a page, `<!-- part … -->` and `<!-- /part -->`.

The rest of a page is typed in the page itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
MODELS = ("lab-moe", "lab-olmoe", "lab-glm", "demo-moe")  # as pages list them
Row = dict[str, Any]


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def written(page: Path, **parts: str) -> str:
    """The page with these parts made again."""
    text = page.read_text(encoding="utf-8")
    for name, made in parts.items():
        marks = re.compile(rf"(<!-- {name}\b[^>]*-->\n?).*?(<!-- /{name} -->)", re.S)
        text, found = marks.subn(lambda mark, made=made: mark[1] + made + mark[2], text)  # type: ignore[misc]
        assert found == 1, f"{page.name} has no place for {name}"
    return text


# ---- how numbers look ---------------------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---") -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], f"|{'|'.join([rule] * len(columns))}|", *lines[1:]]) + "\n"


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def wrapped(text: str) -> str:
    return fill(text, width=125)


# ---- pictures -----------------------------------------------------------------------------------------------------------


def made_from(script: str, *results: str) -> str:
    """What a picture shows goes by this; it is written into the file."""
    read = b"".join((RESULTS / name).read_bytes() for name in results)
    return hashlib.sha256(read + Path(script).read_bytes()).hexdigest()


def panels(count: int, width: float) -> tuple[Any, Any]:
    """A figure with so many axes beside each other, drawn without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(width, 3.7), dpi=150, facecolor="white")
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, picture: Path, mark: str) -> None:
    figure.tight_layout()
    figure.savefig(picture, metadata={"Made from": mark, "Software": None})
