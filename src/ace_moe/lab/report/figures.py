"""Pictures of results. matplotlib is an extra: without it the numbers are still printed and stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#c0392b", "#1f6f8b", "#7f8c8d", "#8e44ad", "#27ae60")


def quality_curve(
    curves: Mapping[str, Sequence[tuple[float, float]]], dense: float, path: Path, title: str
) -> Path | None:
    """Perplexity against realised ratio, one line per rule; None if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
    axes.axhline(dense, color="#999999", linewidth=1, linestyle=":", label="unskipped")
    for (label, points), colour in zip(curves.items(), COLOURS, strict=False):
        axes.plot([100 * x for x, _ in points], [y for _, y in points], marker="o", color=colour, label=label)
    axes.set_xlabel("expert slots not executed (%)")
    axes.set_ylabel("perplexity")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path
