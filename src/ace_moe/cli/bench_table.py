"""Rows of a benchmark as a table and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import IntegrationError, OptionError
from ..lab.bench.run import UNRULED, Row
from .outputs import check_output
from .show import table

if TYPE_CHECKING:
    from rich.table import Table

Size = tuple[str, int, int]


def by_size(rows: Sequence[Row]) -> dict[Size, list[Row]]:
    sizes = dict.fromkeys((r.what, r.tokens, r.batch) for r in rows)
    return {size: [r for r in rows if (r.what, r.tokens, r.batch) == size] for size in sizes}


def _ratio(row: Row, other: Row | None) -> str:
    return "" if other is None else f"{other.ms / row.ms:.2f}×"


def latency_table(rows: Sequence[Row]) -> Table:
    """List each row with its speed against the best stock path and against our own unskipped one."""
    lines, judged = [], any(row.kl is not None for row in rows)
    for (what, tokens, batch), group in by_size(rows).items():
        stock = min((r for r in group if r.path not in ("ace", UNRULED)), key=lambda r: r.ms, default=None)
        dense = next((r for r in group if r.path == "ace" and r.requested == 0), None)
        for row in group:
            size, time = f"{what.upper()} {tokens}×{batch}", f"{row.ms:.2f} ms"
            ratios = (_ratio(row, stock), _ratio(row, dense)) if row.path == "ace" else ("", "")
            experts = f"{row.executed:.1f} of {row.experts:.1f}"
            cells = [size, row.path, f"{row.realised:.1%}", time, *ratios, experts]
            skips = row.path == "ace" and row.kl is not None  # compared with the unskipped model
            fidelity = f"{row.kl:.4f} {row.agreement:.1%} {row.acceptance:.1%}" if skips else ""
            lines.append([*cells, fidelity] if judged else cells)
    columns = ["", "path", "skipped", "time", "vs. stock", "vs. own 0 %", "experts read a layer"]
    return table("latency", [*columns, "KL, agreement, acceptance"] if judged else columns, lines)


def check_chart(path: Path | None, plan: Path | None) -> None:
    """Refuse what cannot be drawn or written, before the long work starts."""
    if path is None:
        return
    check_output(path, "picture", plan)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise IntegrationError("A chart needs matplotlib: pip install ace-moe[report].") from None
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise OptionError(
            f"{path} is not a picture that can be drawn. Its name may end in: {', '.join(sorted(kinds))}."
        )


def chart(rows: Sequence[Row], path: Path) -> None:
    """Bars of every size: stock, ours unskipped, ours skipped."""
    from matplotlib import pyplot

    groups = by_size(rows)
    figure, axes = pyplot.subplots(1, len(groups), figsize=(2.2 * len(groups) + 1, 3.4), squeeze=False)
    for axis, ((what, tokens, batch), group) in zip(axes[0], groups.items(), strict=True):
        shown = [row for row in group if row.path != UNRULED]
        names = [row.path if row.path != "ace" else f"ace {row.realised:.0%}" for row in shown]
        colours = ["#b9b9b9" if row.path != "ace" else "#2b6cb0" for row in shown]
        axis.bar(names, [row.ms for row in shown], color=colours)
        axis.set_title(f"{what.upper()} {tokens}×{batch}", fontsize=9)
        axis.tick_params(axis="x", labelrotation=60, labelsize=8)
    axes[0][0].set_ylabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
