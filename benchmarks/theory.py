"""How tight the paper's propositions are on trained models: each bound over the truth, and how well it ranks slots.

    python benchmarks/theory.py demo-moe lab-moe lab-olmoe lab-glm --text wiki.test.raw -o benchmarks/results/theory.json

One unskipped pass gives every slot's input, gate and expert output; all else is arithmetic. docs/theory.md says what each number
means; tests/theory proves the propositions themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from running import made_here, parser, store
from torch import Tensor

from ace_moe import build_plan, rule
from ace_moe.checkpoint import MoELayer, MoEModel
from ace_moe.checkpoint.loading import load_model, load_tokenizer, load_windows
from ace_moe.lab.policies.calls import Call, answers, sites, watch
from ace_moe.mapping.fit import Histogram
from ace_moe.plan import Plan
from ace_moe.policies import Routing, make
from ace_moe.provenance import provenance
from ace_moe.scoring.statistics import spearman
from ace_moe.tables import PAPER

SKIP, TOKENS, WINDOW = 0.5, 2048, 256
GAINS: tuple[rule.Gain, ...] = ("kept", "power", "none")


def reach(layer: MoELayer) -> Tensor:
    """[E]: ‖ΓW_gate‖₂ ‖ΓW_up‖₂ ‖W_down‖₂, spectral norms; times ‖x̄‖² no response is larger."""
    assert layer.norm_scale is not None
    found = []
    for chunk in layer.chunks():
        p = layer.projections(chunk)
        assert p.gate is not None
        parts = (p.gate * layer.norm_scale, p.up * layer.norm_scale, p.down)
        found.append(torch.stack([torch.linalg.matrix_norm(w, 2) for w in parts]).prod(0))
    return torch.cat(found)


def perturbation_bound(gates: Tensor, keep: Tensor, largest: Tensor, gain: rule.Gain) -> Tensor:
    """[T]: ‖y − ŷ‖ is at most this, for gates that are not negative; `largest` [T] is the largest response.

    With a the skipped mass, G all of it and c the gain: skipped outputs are missing (a), kept ones are scaled (|c − 1|(G − a)).
    The paper's 2a is c = G / (G − a).
    """
    g = gates.float()
    skipped, kept = torch.where(keep, 0.0, g).sum(-1), torch.where(keep, g, 0.0).sum(-1)
    factor = torch.where(keep.all(-1), 1.0, rule.gain_factor(gates, torch.where(keep, gates, 0.0), gain).squeeze(-1))
    return (skipped + (factor - 1).abs() * kept) * largest


def outputs(gates: Tensor, found: Tensor) -> Tensor:
    """y [T, d] from gates [T, k] and responses [T, k, d]."""
    return (gates.float().unsqueeze(-1) * found).sum(1)


# ---- on a model ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(path: Path, text: Path) -> dict[str, Any]:
    model, plan, moe = load_model(path, device="cpu"), build_plan(path, PAPER), MoEModel.open(path)
    windows = load_windows(model, load_tokenizer(path), text, WINDOW, TOKENS)
    seen, places = watch(model, windows.ids), {site.key: site for site in sites(model)}
    responses = {k: answers(model.get_submodule(places[k].path), c.hidden, c.ids) for k, c in seen.items()}
    views = {name: contributions(name, plan, seen) for name in ("ace", "gsp", "rcr")}
    taus = {name: threshold(view) for name, view in views.items()}
    rows = {}
    for layer in moe.layers():
        call, found = seen[layer.key], responses[layer.key]
        rows[layer.key] = {
            **response(layer, plan, call, found),
            **shift(layer, call),
            **skipped_mass({name: view[layer.key] for name, view in views.items()}, taus, call),
            **perturbed(call, found, rule.kept(views["ace"][layer.key], taus["ace"])),
        }
    return {"model": path.name, "tokens": windows.ids.numel(), "mean": means(list(rows.values())), "layers": rows}


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def contributions(name: str, plan: Plan, seen: dict[str, Call]) -> dict[str, Tensor]:
    """Protected contributions [T, k] of a policy, by layer."""
    routings = {k: Routing(c.ids, c.gates, plan.tables[k], torch.zeros(())) for k, c in seen.items()}
    return {k: make(name).protected(r) for k, r in routings.items()}  # type: ignore[attr-defined]


def threshold(view: dict[str, Tensor]) -> float:
    """τ that skips half of all slots."""
    histogram = Histogram()
    for protected in view.values():
        histogram.add(protected)
    return histogram.threshold(SKIP)


def response(layer: MoELayer, plan: Plan, call: Call, found: Tensor) -> dict[str, float]:
    """How far the output-response bound is above the truth, and whether it or the tables rank slots."""
    assert layer.norm_scale is not None
    size = (call.hidden.float() / layer.norm_scale).square().sum(-1, keepdim=True)
    bound, truth = size * reach(layer)[call.ids], found.norm(dim=-1)
    tables = plan.tables[layer.key]
    return {
        "bound_over_response": float((bound / truth.clamp(min=1e-12)).median()),
        "bound_rank": spearman(bound.flatten(), truth.flatten()),
        **{f"{name}_rank": spearman(tables[name][call.ids].flatten(), truth.flatten()) for name in ("gsp", "rcr")},
        "gate_rank": spearman(call.gates.float().flatten(), truth.flatten()),
    }


def shift(layer: MoELayer, call: Call) -> dict[str, float]:
    """Where the inputs of an expert's tokens lie, against w̃ and Σw̃: medians of cosines over experts with 16 tokens or more."""
    assert layer.router_rows is not None
    x = call.hidden.float()
    centred = x - x.mean(0)
    w = layer.router_rows - layer.router_rows.mean(0)
    tilted = w @ (centred.T @ centred / len(x))
    to = torch.zeros(len(x), layer.num_experts).scatter_(1, call.ids, 1.0)
    moved = (to.T @ centred) / to.sum(0).clamp(min=1).unsqueeze(-1)
    often = to.sum(0) >= 16
    cosines = {name: torch.cosine_similarity(moved, v, dim=-1)[often] for name, v in (("row", w), ("tilted", tilted))}
    shared = layer.router_rows.mean(0).norm() / layer.router_rows.norm(dim=-1).mean()
    return {f"shift_{n}": float(c.median()) for n, c in cosines.items()} | {"shared_part_of_rows": float(shared)}


def skipped_mass(views: dict[str, Tensor], taus: dict[str, float], call: Call) -> dict[str, float]:
    """Gate mass that ACE skips, and that each view alone skips at the same τ and at the same number of slots."""
    mass = call.gates.float() / call.gates.float().sum(-1, keepdim=True)

    def skipped(name: str, tau: float) -> float:
        return float(torch.where(rule.kept(views[name], tau), 0.0, mass).sum(-1).mean())

    rows = {"mass_ace": skipped("ace", taus["ace"])}
    rows |= {f"mass_{name}_same_tau": skipped(name, taus["ace"]) for name in ("gsp", "rcr")}
    return rows | {f"mass_{name}_same_budget": skipped(name, taus[name]) for name in ("gsp", "rcr")}


def perturbed(call: Call, found: Tensor, keep: Tensor) -> dict[str, float]:
    """The perturbation bound over the truth, and whether bound and skipped mass rank tokens, for each gain."""
    lost, largest, y = ~keep.all(-1), found.norm(dim=-1).amax(-1), outputs(call.gates, found)
    mass = torch.where(keep, 0.0, call.gates.float()).sum(-1)[lost]
    rows: dict[str, float] = {}
    for gain in GAINS:
        truth = (outputs(rule.rescale(call.gates, keep, gain), found) - y).norm(dim=-1)[lost]
        bound = perturbation_bound(call.gates, keep, largest, gain)[lost]
        rows |= {
            f"{gain}_over_truth": float((bound / truth.clamp(min=1e-12)).median()),
            f"{gain}_rank": spearman(bound, truth),
            f"{gain}_mass_rank": spearman(mass, truth),
            f"{gain}_error": float((truth / y.norm(dim=-1)[lost]).median()),
        }
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("models", nargs="+", type=Path)
    made.add_argument("--text", type=Path, required=True)
    given = made.parse_args()
    rows = []
    for path in given.models:
        rows.append(measure(path, given.text))
        print(path.name, json.dumps({k: round(v, 3) for k, v in rows[-1]["mean"].items()}), flush=True)
    store(given.out, made_here(provenance=provenance(), rows=rows))


if __name__ == "__main__":
    main()
