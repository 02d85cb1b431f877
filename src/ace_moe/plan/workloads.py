"""The texts of a plan: they go by the sha256 of their tokens, and are shown by name where that tells them apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import BudgetError
from .entries import Workload

SHOWN = 4  # characters of a hash, or as many more as tell two texts apart


def distinct(found: Iterable[Workload]) -> list[Workload]:
    """Each text once, in the order of its first use."""
    return list({w.sha256: w for w in reversed(list(found))}.values())[::-1]


def labels(workloads: Sequence[Workload]) -> dict[str, str]:
    """sha256 → name, or name#ab12 where another text has that name too."""
    return {w.sha256: _label(w, [o for o in workloads if o.name == w.name and o.sha256 != w.sha256]) for w in workloads}


def _label(workload: Workload, namesakes: Sequence[Workload]) -> str:
    if not namesakes:
        return workload.name
    length = SHOWN
    while any(other.sha256[:length] == workload.sha256[:length] for other in namesakes) and length < 64:
        length += 1
    return f"{workload.name}#{workload.sha256[:length]}"


def pick(workloads: Sequence[Workload], wanted: str) -> Workload:
    """The text that is meant by a name, or by name#ab12."""
    name, mark, digest = str(wanted).rpartition("#")
    found = [w for w in workloads if w.name == wanted]
    if not found and mark:
        found = [w for w in workloads if w.name == name and w.sha256.startswith(digest)]
    if len(found) == 1:
        return found[0]
    shown = labels(workloads)
    listed = ", ".join(shown[w.sha256] for w in found or workloads) or "none"
    if found:
        raise BudgetError(f"The plan has several texts {wanted!r}: {listed}. Name one of these as the workload.")
    raise BudgetError(
        f"The plan has no workload {wanted!r}; it has: {listed}. Name one of these, or map that text with `ace budget MODEL "
        "--plan PLAN --text FILE`."
    )
