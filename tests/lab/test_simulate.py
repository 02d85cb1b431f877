"""A simulation says what executing the same batches does, and a fitted time what was timed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_trace_file import fingerprint, made
from transformers import PreTrainedModel

from ace_moe import ACE
from ace_moe.demo import MODEL, TEXT
from ace_moe.engines.traces import Trace
from ace_moe.engines.traces.file import save_trace
from ace_moe.errors import AceError, OptionError, PlanError, ResultError
from ace_moe.lab.traffic.simulate import Simulation
from ace_moe.lab.traffic.timing import Cost, cost_of, fit
from ace_moe.lab.traffic.tracing import read
from ace_moe.plan import Plan, Threshold, Workload
from ace_moe.policies import make
from ace_moe.text import Windows
from command import run_ace

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def literal(trace: Trace, tau: float, steps: torch.Tensor) -> tuple[float, float, float, float]:
    """`share` on each token of each step, one at a time."""
    ran, back, asked, reads, routed = 0, 0, 0, 0, 0
    for ids, gates in trace.layers.values():
        for step in steps.tolist():
            kept, every = set(), []
            for token in step:
                g, e = gates[token].float().tolist(), ids[token].tolist()
                top = e[g.index(max(g))]
                keep = {i for i, x in zip(e, g, strict=True) if i == top or x / (sum(g) + 1e-8) >= tau}
                every.append((set(e), keep))
                kept |= keep
            ran += sum(len(keep) for _, keep in every)
            back += sum(len(keep | (e & kept)) for e, keep in every)
            asked, reads = asked + len(set().union(*(e for e, _ in every))), reads + len(kept)
            routed += sum(len(e) for e, _ in every)
    per = len(trace.layers) * len(steps)
    return ran / routed, back / routed, asked / per, reads / per


@pytest.mark.parametrize(("seed", "batch"), [(0, 1), (1, 3), (2, 5)])
def test_counts_are_those_of_a_literal_loop(seed: int, batch: int) -> None:
    trace = made(48, 16, 4, seed, requests=6)
    simulation = Simulation(trace, make("share"))
    tau, steps = 0.21 + seed / 100, simulation.steps(batch, seed)[:20]
    found = simulation.count(tau, steps, ranks=4)
    said = (found.slots, found.restored, found.asked, found.reads)
    assert said == pytest.approx(literal(trace, tau, steps), abs=1e-9)
    assert found.ranks is not None
    assert sum(found.ranks.reads) == pytest.approx(found.reads)
    assert sum(found.ranks.slots) == pytest.approx(found.slots * batch * 4)
    assert max(found.ranks.reads) <= found.ranks.busiest <= found.reads


def test_steps_have_one_token_of_a_request_and_generated_ones_where_there_are_any() -> None:
    trace = made(300, 8, 2, 0, requests=9)
    steps = Simulation(trace, make("share")).steps(7, seed=1)
    assert (trace.phases[steps] == 1).all()
    assert all(len(set(row)) == 7 for row in trace.requests[steps].tolist())
    assert torch.equal(steps, Simulation(trace, make("share")).steps(7, seed=1))
    assert not torch.equal(steps, Simulation(trace, make("share")).steps(7, seed=2))
    with pytest.raises(OptionError, match="has 9"):
        Simulation(trace, make("share")).steps(10)


@torch.inference_mode()
def decode(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> None:
    out = model(ids[:, :prompt], use_cache=True)
    for i in range(prompt, ids.shape[1]):
        out = model(ids[:, i : i + 1], past_key_values=out.past_key_values)


@pytest.mark.parametrize("policy", ["share", "ace"])
def test_the_same_batches_executed(
    policy: str, demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows
) -> None:
    """Traced under τ, four sequences decoded together: slots within 0.2 points, reads within 2 %."""
    windows, prompt, tau = Windows(demo_windows.ids[:, :40], demo_windows.workload), 16, 0.1
    with ACE(demo_plan, 0.0, policy=policy, reads=True, restore=True)(demo_model) as ace:
        ace.set_restore(False)
        ace.set_threshold(tau)
        trace = read(demo_model, ace.deciders, windows, 0.5)
        ace.reset()
        decode(demo_model, windows.ids, prompt)
        report = ace.report()
    steps = torch.arange(160).view(4, 40)[:, prompt:].T
    found = Simulation(trace, ace.policy, demo_plan).count(tau, steps)
    executed = report["reads"]["generated"]
    assert found.slots == pytest.approx(1 - report["decode"]["realised"], abs=0.002)
    assert found.reads == pytest.approx(executed["read"] / 24 / 6, rel=0.02)
    assert found.asked == pytest.approx(executed["asked"] / 24 / 6, rel=0.02)
    assert trace.shared() == {"50%": 160} and trace.fingerprint == demo_plan.fingerprint


# ---- what cannot be simulated -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["score", "pesf", "xshare", "oea", "oracle", "halving:denominator=16", "gsp"])
def test_policies_that_need_more_than_gates_are_refused(policy: str) -> None:
    from ace_moe.policies import make as made_policy

    with pytest.raises(AceError):
        Simulation(made(8, 8, 2, 0), made_policy(policy))


def test_another_models_plan_is_refused(demo_plan: Plan) -> None:
    with pytest.raises(PlanError, match="another model"):
        Simulation(made(8, 8, 2, 0), make("ace"), demo_plan)


def test_experts_without_gates_serve_fixed_alone(tmp_path: Path) -> None:
    path = tmp_path / "experts.npz"
    rng = np.random.default_rng(0)
    arrays = {f"r{n}": np.stack([rng.permutation(16)[:4] for _ in range(10)])[:, None] for n in range(8)}
    np.savez(path, **arrays)
    ran = run_ace("simulate", path, "--policy", "fixed", "--skip", "0.25,0.5", "--batch", "1,4", "--json")
    assert [row["slots"] for row in ran.json["rows"]] == [0.75, 0.5] * 2
    refused = run_ace("simulate", path, "--policy", "share")
    assert refused.code == 1 and "--policy fixed" in " ".join(refused.err.split())


# ---- time ---------------------------------------------------------------------------------------------------------------


def row(batch: int, reads: float, ms: float, **more: Any) -> dict[str, Any]:
    return {"what": "tpot", "path": "ace", "batch": batch, "executed": reads, "gpu_ms": ms, "wall_ms": 99.0, **more}


def test_a_line_is_found_again() -> None:
    truth = Cost(0.1, {1: 2.0, 4: 3.0, 16: 3.5})
    rows = [row(b, r, truth.tpot(b, r)) for b in truth.base for r in (8.0 * b**0.7, 3.0 * b**0.7)]
    found = fit(rows)
    assert found.slope == pytest.approx(0.1) and found.base == pytest.approx(truth.base)
    assert found.tpot(10, 20.0) == pytest.approx(3.25 + 2.0)
    for outside in (32, 0):
        with pytest.raises(OptionError, match="1 to 16"):
            found.tpot(outside, 20.0)
    with pytest.raises(ResultError, match="two ratios"):
        fit(rows[:1])


def test_times_fitted_on_one_routing_hold_on_another() -> None:
    """Stored steps of an H200: fitted on uniform routing at 0 and 60 %, the other routings are predicted within 10 %."""
    stored = [r for r in json.loads((RESULTS / "routing_h200.json").read_text())["rows"] if r["batch"] > 1]
    rows = [(r, row(r["batch"], r["facts"]["restored"]["reads"], r["ms"]["plain"])) for r in stored]
    cost = fit([made for r, made in rows if r["routing"] == "uniform" and r["skip"] in (0.0, 0.6)])
    held = [made for r, made in rows if r["routing"] != "uniform" and r["skip"]]
    off = [cost.tpot(r["batch"], r["executed"]) / r["gpu_ms"] - 1 for r in held]
    said = json.loads((RESULTS / "traffic_times.json").read_text())["rows"]
    assert off == pytest.approx([r["off"] for r in said]) and max(map(abs, off)) <= 0.10
    page = " ".join((RESULTS.parents[1] / "docs" / "traffic.md").read_text().split())
    assert f"are predicted within {100 * max(map(abs, off)):.1f} %" in page and len(held) == 12


def test_a_benchmark_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"rows": [row(1, r, r, shares=[0.5, 0.5]) for r in (2.0, 1.0)]}))
    assert cost_of(path, 2).slope == pytest.approx(1.0)
    with pytest.raises(ResultError, match="2 slots a token, the trace has 8"):
        cost_of(path, 8)
    path.write_text("[]")
    with pytest.raises(ResultError, match="no rows"):
        cost_of(path, 8)


def test_the_page_says_what_is_stored() -> None:
    page = (RESULTS.parents[1] / "docs" / "traffic.md").read_text()
    rows = json.loads((RESULTS / "traffic.json").read_text())["rows"]
    assert {(r["model"], r["batch"]) for r in rows} == {(m, b) for m in ("demo-moe", "lab-olmoe") for b in (4, 16)}
    for name, said in (("under", "under that threshold"), ("unskipped", "unskipped")):
        slots, reads = (max(abs(r[name][n]) for r in rows) for n in ("slots_off", "reads_off"))
        assert f"| {said} | {100 * slots:.2f} points | {100 * reads:.1f} % |" in page
    assert max(abs(r["under"]["slots_off"]) for r in rows) <= 0.002
    assert max(abs(r["under"]["reads_off"]) for r in rows) <= 0.02


# ---- as commands --------------------------------------------------------------------------------------------------------


def test_from_a_text_to_a_table(tmp_path: Path) -> None:
    path = tmp_path / "demo.trace"
    told = run_ace("trace", MODEL, "--text", TEXT, "--tokens", 512, "--window", 64, "-o", path, "--json").json
    assert told["tokens"] == 512 and told["slots"] == 512 * 8 * 6
    assert told["bytes"] <= 2.2 * told["slots"]
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"rows": [row(b, 8 * b * part, b * part) for b in (1, 8) for part in (1, 0.5)]}))
    found = run_ace(
        "simulate", path, "--skip", "0.2,0.4", "--batch", "1,8", "--bench", bench, "--ranks", 4, "--json"
    ).json
    assert [r["skipped"] for r in found["rows"]] == pytest.approx([0.2, 0.4] * 2, abs=0.01)
    assert all(r["reads"] <= r["asked"] and r["tpot_ms"] <= r["tpot_unskipped_ms"] for r in found["rows"])
    shown = run_ace("simulate", path, "--batch", "8")
    assert shown.code == 0 and "with restore" in shown.out and "tokens of prompts" in shown.err
    assert {r["batch"] for r in run_ace("simulate", path, "--json").json["rows"]} == {1, 8}, "it has 8 requests"
    assert run_ace("simulate", path, "--batch", "many").code == run_ace("simulate", path, "--batch", "9").code == 1


def test_a_trace_of_a_skipped_model_needs_a_plan(tmp_path: Path) -> None:
    ran = run_ace("trace", MODEL, "--text", TEXT, "--skip", "0.3", "-o", tmp_path / "a.trace")
    assert ran.code == 1 and "--plan" in ran.err and not (tmp_path / "a.trace").exists()


def test_budgets_by_phase_and_the_plans_own_choice(demo_plan: Plan, tmp_path: Path) -> None:
    """As `ace serve --skip-decode 0.4 --trace` leaves it; `auto` is what the plan says, as everywhere."""
    facts = {"realised": 0.3, "corrected": True, "passes": 1, "workload": Workload("a.txt", "0" * 64, 64)}
    entry = Threshold(**make("gsp").settings, budget=0.3, threshold=0.1, **facts)  # type: ignore[arg-type]
    plan = demo_plan.with_thresholds([entry]).save(tmp_path / "plan.safetensors")
    layers = {key: made(16, 32, 8, int(key)).layers["0"] for key in demo_plan.fingerprint.structure}
    trace = replace(made(16, 32, 8, 0), layers=layers, fingerprint=demo_plan.fingerprint)
    path = save_trace(trace, tmp_path / "served.trace")
    ran = run_ace("simulate", path, "-p", plan, "--skip", "0.3", "--batch", "1")
    assert ran.code == 0 and "gsp, simulated" in ran.out and "trace under the budget" in ran.err


def test_a_saved_trace_simulates_as_before(tmp_path: Path) -> None:
    from ace_moe.engines.traces.file import load_trace

    trace = made(64, 16, 4, 3, requests=6)
    again = load_trace(save_trace(trace, tmp_path / "a.trace"))
    one, other = (Simulation(t, make("top_p")) for t in (trace, again))
    assert one.threshold(0.4) == other.threshold(0.4)
    assert one.count(0.4, one.steps(3)) == other.count(0.4, other.steps(3))
    assert again.fingerprint == fingerprint(16, 4)
