"""What a comparison advises: the settings nearest to the unskipped model, how far to go with them, and the command."""

from __future__ import annotations

import math
from typing import Any

from ...errors import AceError
from ...policies import POLICIES, PRESETS
from ...tables import TABLES
from .grid import CITED, made, parse_method

NEAR = 0.05  # nats a token: as far as is advised to go
TIE = 1.05  # KLs within this factor are decided by perplexity
TIED = "within 5 % of the nearest to the unskipped model, and has the better perplexity"
SAFEGUARDS = ("min_active", "min_mass")
Results = dict[str, Any]
Ways = dict[tuple[str, str], list[Results]]


def advise(results: Results) -> Results | None:
    """Words and commands, from cells whose method needs no text of its own and can be served; None if there are none."""
    ways: Ways = {}
    for cell in results["cells"]:
        if "kl" in cell and usable(cell["method"]):
            ways.setdefault((cell["method"], cell["gain"]), []).append(cell)
    if not ways:
        return None
    found = best(ways)
    how = "nearest to the unskipped model" if found is nearest(ways) else TIED
    cells = sorted(found, key=lambda c: c["budget"])
    safeguards = results.get("identity", {}).get("safeguards", {})
    return {"words": words(cells, how, results["workload"]), "commands": commands(cells, safeguards)}


def usable(method: str) -> bool:
    """Whether a method decides each token from gates and tables, so that every engine can run it. What a file names is looked
    up among our own alone: a file must not make us import anything."""
    try:
        policy = made(method) if parse_method(method)[0] in {*POLICIES, *PRESETS} else None
    except AceError:
        return False
    return policy is not None and policy.by_token and set(policy.needs) <= set(TABLES)


def nearest(ways: Ways) -> list[Results]:
    """The cells of one method and gain: least KL over the budgets, of those that have most of them."""
    most = max(map(len, ways.values()))
    return min((cells for cells in ways.values() if len(cells) == most), key=_log_kl)


def best(ways: Ways) -> list[Results]:
    """Of near equals the one with the least perplexity."""
    first = nearest(ways)
    near = [c for c in ways.values() if len(c) == len(first) and _log_kl(c) <= _log_kl(first) + math.log(TIE)]
    return min(near, key=lambda cells: sum(c["perplexity"] for c in cells))


def _log_kl(cells: list[Results]) -> float:
    return sum(math.log(max(c["kl"]["value"], 1e-12)) for c in cells) / len(cells)


def reach(cells: list[Results]) -> Results | None:
    """The cell of the largest budget that stays near, by the upper end of its interval."""
    near = [c for c in cells if (c["kl"]["high"] or c["kl"]["value"]) <= NEAR]
    return near[-1] if near else None


def words(cells: list[Results], how: str, text: Results) -> str:
    kls = ", ".join(f"{c['kl']['value']:.4f} at {_percent(c['budget'])}" for c in cells)
    said = f"{cells[0]['method']} with gain {cells[0]['gain']} is {how}: KL {kls}. "
    found = reach(cells)
    if found is None:
        said += f"It is further than {NEAR} nats a token away at every budget measured; begin lower. "
    else:
        same = f"{_percent(round(found['agreement']['value'], 3))} of the likeliest tokens are the same"
        said += f"Up to {_percent(found['budget'])} it stays within {NEAR} nats a token, where {same}. "
    measured = f"Measured on {text['windows']} windows of {text['name']}"
    return f"{said}{measured}: look at a task of your own before you serve it."


def _percent(part: float) -> str:
    return f"{100 * part:.4g} %"


def commands(cells: list[Results], safeguards: Results) -> list[str]:
    """To copy; results know a model by its last name alone, so the reader puts in where it is."""
    method, gain, budget = cells[0]["method"], cells[0]["gain"], (reach(cells) or cells[0])["budget"]
    named = f"--preset {method}" if method in PRESETS else f"--policy {method}"
    gains = "" if method in PRESETS or ":gain=" in method or gain == CITED else f" --gain {gain}"
    floors = "".join(f" --{n.replace('_', '-')} {float(safeguards[n]):g}" for n in SAFEGUARDS if n in safeguards)
    return [f"ace plan MODEL {named}{gains}{floors} --budgets {budget:g} -o plan.safetensors",
            f"ace serve MODEL --plan plan.safetensors --skip {budget:g}"]  # fmt: skip
