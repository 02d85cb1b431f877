"""The verdict of a stored comparison: every method against a rival, and the method to use. No model is needed."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict

from ...errors import OptionError
from ...scoring.losses import Losses, perplexity_change
from ...scoring.statistics import relative_change
from ..store import Results

CITED = "cited"  # the gain of each method's own paper
NEAR = 0.05  # nats per token: as far as is advised to go
TIE = 1.05  # KLs within this factor are decided by perplexity
NEAREST = "nearest to the unskipped model"
TIED = "within 5 % of the nearest to the unskipped model, and has the better perplexity"
SAFEGUARDS = ("min_active", "min_mass")
Cells = list[Results]


# ---- pairs ----------------------------------------------------------------------------------------------------------


def losses_of(entry: Results) -> Losses:
    """The losses a cell or the unskipped model was stored with."""
    return Losses(entry["nll"], entry["targets"])


def kl_of(cell: Results) -> float:
    """The number tables are sorted by: KL, or the change of perplexity where a file has no KL."""
    return cell["kl"]["value"] if "kl" in cell else cell["change"]["value"]


def against(results: Results, rival: str) -> list[Results]:
    """Pair each cell with the rival's at the same gain and budget: changes of perplexity and of KL."""
    if rival not in results["grid"]["methods"]:
        raise OptionError(f"{rival!r} is not in these results. Choose one of: {', '.join(results['grid']['methods'])}.")
    rivals = {(cell["gain"], cell["budget"]): cell for cell in results["cells"] if cell["method"] == rival}
    rows = []
    for cell in results["cells"]:
        other = rivals.get((cell["gain"], cell["budget"]))
        if other is None or cell["method"] == rival:
            continue
        change = perplexity_change(losses_of(cell), losses_of(other))
        row = {name: cell[name] for name in ("method", "gain", "budget")} | {"rival": rival, **asdict(change)}
        if "kl_by_window" in cell and "kl_by_window" in other:
            row["kl"] = asdict(relative_change(cell["kl_by_window"], other["kl_by_window"]))
        rows.append(row)
    return rows


# ---- advice ---------------------------------------------------------------------------------------------------------


def advise(results: Results) -> Results | None:
    """Words and commands for the method with the least KL over the budgets; of near equals, the one with the least perplexity.

    Only methods count that every engine serves without a text of their own; None if there is none.
    """
    ways: dict[tuple[str, str], Cells] = {}
    for cell in sorted(results["cells"], key=lambda cell: cell["budget"]):
        if "kl" in cell and cell["method"] in results.get("servable", {}):
            ways.setdefault((cell["method"], cell["gain"]), []).append(cell)
    if not ways:
        return None
    most = max(map(len, ways.values()))
    distances = {way: _log_kl(cells) for way, cells in ways.items() if len(cells) == most}
    nearest = min(distances, key=lambda way: distances[way])
    tied = [way for way, distance in distances.items() if distance <= distances[nearest] + math.log(TIE)]
    chosen = min(tied, key=lambda way: sum(cell["perplexity"] for cell in ways[way]))
    cells = ways[chosen]
    near = [cell for cell in cells if (cell["kl"]["high"] or cell["kl"]["value"]) <= NEAR]
    return {
        "words": _words(cells, near, NEAREST if chosen == nearest else TIED, results["workload"]),
        "commands": _commands(results, *chosen, (near or cells[:1])[-1]["budget"]),
    }


def _log_kl(cells: Cells) -> float:
    return sum(math.log(max(cell["kl"]["value"], 1e-12)) for cell in cells) / len(cells)


def _words(cells: Cells, near: Cells, how: str, text: Results) -> str:
    kls = ", ".join(f"{cell['kl']['value']:.4f} at {100 * cell['budget']:.4g} %" for cell in cells)
    said = f"{cells[0]['method']} with gain {cells[0]['gain']} is {how}: KL {kls}. "
    if near:
        same = f"{100 * near[-1]['agreement']['value']:.1f} % of the likeliest tokens are the same"
        said += f"Up to {100 * near[-1]['budget']:.4g} % it stays within {NEAR} nats per token, where {same}. "
    else:
        said += f"It is further than {NEAR} nats per token away at every budget measured; begin lower. "
    return f"{said}Measured on {text['windows']} windows of {text['name']}: try a task of your own before you serve it."


def _commands(results: Results, method: str, gain: str, budget: float) -> list[str]:
    """To copy; results know a model by its last name alone, so the reader puts in where it is."""
    preset = results["servable"][method] == "preset"
    given = f"--preset {shlex.quote(method)}" if preset else f"--policy {shlex.quote(method)}"
    if not preset and ":gain=" not in method and gain != CITED:
        given += f" --gain {shlex.quote(gain)}"
    safeguards = results.get("identity", {}).get("safeguards", {})
    for name in (name for name in SAFEGUARDS if name in safeguards):
        given += f" --{name.replace('_', '-')} {safeguards[name]:g}"
    return [
        f"ace plan MODEL {given} --budgets {budget:g} -o plan.safetensors",
        f"ace serve MODEL --plan plan.safetensors --skip {budget:g}",
    ]
