"""The card of a published plan: what it belongs to, what it holds and how it is used, for people and for the hub."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCardData

from ..plan import Plan, Threshold, labels

LIBRARY = "ace-moe"
USE = """\
# Plan of {model}

Tables from the weights of {model}, and thresholds for budgets, for {library} (`pip install {library}`), which
makes Mixture-of-Experts models faster by leaving out expert slots that contribute little. No weights are in it.

    from ace_moe import ACE
    with ACE.load("{name}", skip={skip})(model):
        model.generate(**inputs)

    ace serve {base} --plan {name} --skip {skip}

The plan belongs to the model with the routers below; another one is refused when it is attached.

| | |
|---|---|
"""


def card(plan: Plan, name: str, base_model: str | None = None) -> str:
    """README.md, with metadata in front."""
    model = plain(plan.model) or "a model"
    skip = f"{min(budgets(plan), key=lambda b: abs(b - 0.5), default=0.5):g}"
    text = USE.format(model=model, library=LIBRARY, name=name, base=base_model or "MODEL", skip=skip)
    return f"---\n{metadata(plan, base_model).to_yaml()}\n---\n{text}{_facts(plan)}{_thresholds(plan)}"


def metadata(plan: Plan, base_model: str | None) -> ModelCardData:
    return ModelCardData(
        base_model=base_model,
        library_name=LIBRARY,
        tags=[LIBRARY, "mixture-of-experts"],
        ace_moe={"fingerprint": plan.fingerprint.routers.exact, "budgets": budgets(plan), "tables": tables(plan)},
    )


def budgets(plan: Plan) -> list[float]:
    """What the plan has thresholds for, under whatever settings."""
    return sorted({t.budget for t in plan.thresholds})


def tables(plan: Plan) -> list[str]:
    return sorted({name for layer in plan.tables.values() for name in layer})


def plain(text: object) -> str:
    """One cell of a table: names of models and texts are whatever somebody typed."""
    return " ".join("".join(c if c.isprintable() and c not in "|<>[]`" else " " for c in str(text)).split())


def _facts(plan: Plan) -> str:
    structure = plan.fingerprint.structure.values()
    facts: dict[str, Any] = {
        "routers (sha256)": plan.fingerprint.routers.exact,
        "MoE layers": len(plan.tables),
        "experts in a layer": _range([s["experts"] for s in structure]),
        "slots of a token": _range([s["top_k"] for s in structure]),
        "tables": ", ".join(tables(plan)),
        **{f"no table {plain(name)}": plain(why) for name, why in plan.undefined.items()},
    }
    return "".join(f"| {name} | {value} |\n" for name, value in facts.items())


def _range(values: list[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)}–{max(values)}"


def _thresholds(plan: Plan) -> str:
    if not plan.thresholds:
        return "\nNo thresholds yet: take a copy with `ace plans get` and map them with `ace budget`.\n"
    names = labels(plan.workloads)
    head = "\n| policy | gain | budget | realised | KL (nats) | text |\n|---|---|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(_cells(t, names))} |\n" for t in plan.thresholds)


def _cells(entry: Threshold, names: dict[str, str]) -> list[str]:
    kl = f"{entry.fidelity['kl']['value']:.4f}" if entry.fidelity else "not measured"
    text = f"{plain(names[entry.workload.sha256])}, {entry.workload.tokens:,} tokens"
    policy = " ".join(map(plain, (entry.policy, *entry.params.values())))
    return [policy, plain(entry.gain), f"{entry.budget:.1%}", f"{entry.realised:.2%}", kl, text]
