"""Every number in the README comes from a stored result."""

import json
import re
from pathlib import Path

from ace_moe.policies import POLICIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def stored(name: str):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def test_demo_table_is_the_stored_result():
    cells = stored("demo.json")["cells"]
    assert f"perplexity {cells[0]['perplexity']:.2f} unskipped" in README
    for budget in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        paper, power = (c for c in cells if c["budget"] == budget)
        numbers = [f"{c['realised']:.2%}".replace("%", " %") + f" | {c['perplexity']:.2f}" for c in (paper, power)]
        assert f"| {budget:.0%}".replace("%", " %") + f" | {numbers[0]} | {numbers[1]} |" in README


def test_transfer_and_memory_claims_hold():
    rows = [r for key in ("min_active_1", "min_active_2") for r in stored("threshold_transfer_demo.json")[key]]
    assert all(abs(r["mapped_realised"] - r["budget"]) <= 0.001 for r in rows)
    assert all(abs(r["measured_corrected"] - r["budget"]) <= 0.002 for r in rows)
    tables = stored("tables_memory.json")
    assert f"{tables['many']['peak_gb']:.1f} GB of memory" in README


def test_comparison_claims_are_the_stored_result():
    results = stored("compare_demo.json")
    change = {
        c["method"]: f"{100 * c['change']['value']:.1f} %"
        for c in results["cells"]
        if (c["gain"], c["budget"]) == ("power", 0.5)
    }
    said = f"`ace` raises perplexity by {change['ace']}, a plain `share` by {change['share']} and `modes` by {change['modes']}"
    assert said in " ".join(README.split())
    assert f"{len(POLICIES)} methods" in README


def test_linked_files_exist():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link


def test_speed_table_is_the_stored_result():
    rows = [r for r in stored("latency_h200.json")["rows"] if r["path"] != "ace_unruled"]
    sizes = [
        ("ttft", 1024, 1),
        ("ttft", 1024, 4),
        ("ttft", 1024, 16),
        *(("tpot", 256, batch) for batch in (1, 4, 16, 64)),
    ]
    for size in sizes:
        stock, ours, skipped = (r for r in rows if (r["what"], r["tokens"], r["batch"]) == size)
        digits = 1 if size[0] == "ttft" else 2
        cells = [f"{r['gpu_ms']:.{digits}f}" for r in (stock, ours, skipped)]
        ratios = [f"{r['gpu_ms'] / skipped['gpu_ms']:.2f}×" for r in (stock, ours)]
        assert "| " + " | ".join([*cells, *ratios]) + " |" in README
        assert f"{skipped['realised']:.0%}" == "60%" and skipped["valid"]


def test_claim_against_generate_holds():
    stock, *_, skipped = stored("latency_generate_h200.json")["rows"]
    assert f"60 % skipped is {stock['gpu_ms'] / skipped['gpu_ms']:.2f}× faster at batch 1" in flat()


def test_claims_against_eager_hold():
    rows = stored("latency_paper_h200.json")["rows"]
    found = {}
    for what in ("ttft", "tpot"):
        sizes = dict.fromkeys((r["tokens"], r["batch"]) for r in rows if r["what"] == what)
        groups = [
            [r["gpu_ms"] for r in rows if (r["what"], r["tokens"], r["batch"]) == (what, *size)] for size in sizes
        ]
        found[what] = [g[0] / g[-1] for g in groups], [g[-2] / g[-1] for g in groups]
    (first, first_own), (token, token_own) = found["ttft"], found["tpot"]
    assert (
        f"{min(first):.1f}–{max(first):.1f}× faster to the first token and {min(token):.0f}–{max(token):.0f}× per"
        in flat()
    )
    own = [f"{min(own):.2f}–{max(own):.2f}×" for own in (first_own, token_own)]
    assert f"skipping itself gives {own[0]} and {own[1]} of it" in flat()
    assert all(r["valid"] is not False for r in rows)


def test_serving_claims_hold():
    rows = stored("serving_h200.json")["rows"]
    tpot = {r["batch"]: f"{r['speed']:.2f}×" for r in rows if (r["what"], r["way"]) == ("TPOT", "60%")}
    found = [r["realised"] for r in rows if r["way"] == "60%"]
    assert {f"{ratio:.0%}" for ratio in found} == {"60%"} and "a token with 60 % of slots skipped comes" in flat()
    said = f"comes {tpot[1]} as fast as from vLLM alone at batch 1, {tpot[4]} at 4, {tpot[16]} at 16, {tpot[64]} at 64,"
    assert said in flat()
    assert f"the first tokens of 16 × 1,024 come {rows[-1]['speed']:.2f}× as fast" in flat()


def test_serving_page_is_the_stored_result():
    result, page = stored("serving_h200.json"), (ROOT / "docs" / "serving.md").read_text()
    for first in range(0, len(result["rows"]), 3):
        stock, whole, part = result["rows"][first : first + 3]
        digits = 0 if stock["what"] == "TTFT" else 2
        cells = [f"{row['median_ms']:.{digits}f}" for row in (stock, whole, part)]
        assert f"| {' | '.join(cells)} ({100 * part['realised']:.0f} %) | {part['speed']:.2f}× |" in page
    assert result["command"].split(" --out")[0] in page
    agreement = [row for name, row in stored("serving_agreement_h200.json").items() if name.startswith("float32")]
    assert all(
        row["equal_tokens"] == row["tokens"] == 192 and row["kept"] == row["kept_transformers"] for row in agreement
    )
    assert max(row["worst_prompt_logprob"] for row in agreement) <= 9e-6 and "at most 9e-06" in page
    bf16 = [
        row["equal_tokens"] for name, row in stored("serving_agreement_cpu.json").items() if name.startswith("bfloat16")
    ]
    assert f"agree on {bf16[0]} of 192 tokens with nothing skipped and on all {bf16[1]} at 50 %" in " ".join(
        page.split()
    )


def test_squared_gates_are_the_stored_result():
    page = " ".join((ROOT / "docs" / "policies.md").read_text().split())
    cells = {(c["method"], c["budget"]): c for c in stored("compare_squared_lab.json")["cells"] if c["gain"] == "none"}
    for name in ("share:squared=true", "top_p:squared=true"):
        change = [cells[name, b]["perplexity"] / cells["share", b]["perplexity"] - 1 for b in (0.3, 0.5, 0.6)]
        assert f"`{name}` " + ", ".join(f"{c:+.1%}".replace("-", "−").replace("%", " %") for c in change) in page


def test_layer_claims_hold():
    result = stored("layer_h200.json")
    whole = [r for r in result["rows"] if r["kept"] == 1]
    speed = [r["stock_us"] / r["ours_us"] for r in whole]
    against = [r["vllm_us"] / r["ours_us"] for r in whole]
    share = [r["tb_s"] / result["ceiling_tb_s"] for r in whole if r["tokens"] <= 64]
    assert f"{min(speed):.1f}–{max(speed):.1f}× faster" in README
    assert f"and {min(against):.2f}–{max(against):.2f}× as fast as vLLM's" in flat()
    assert f"{min(share):.0%}–{max(share):.0%} of the measured".replace("%–", "–").replace("% of", " % of") in flat()
    part = {r["tokens"]: r["ours_us"] for r in result["rows"] if r["kept"] < 1}
    left = {r["tokens"]: f"{part[r['tokens']] / r['ours_us']:.0%}".replace("%", " %") for r in whole}
    skipped = [100 * (1 - r["kept"]) for r in result["rows"] if r["kept"] < 1]
    assert (
        f"At {min(skipped):.0f}–{max(skipped):.0f} % skipped they take {left[1]} of their unskipped time at one token"
        in flat()
    )
    assert f"{left[16]} at 16 and {left[4096]} at 4,096" in flat()
    rule = [r["rule_us"] for r in result["deciding"]]
    together = result["deciding"][0]["route_and_rule_us"]
    assert f"rule alone takes {min(rule):.1f}–{max(rule):.1f} µs, routing and rule together {together:.1f} µs" in flat()


def test_cpu_claims_hold():
    rows = [r for r in stored("latency_cpu.json")["rows"] if r["path"] == "ace"]
    speed = [f"{a['wall_ms'] / b['wall_ms']:.2f}×" for a, b in zip(rows[::2], rows[1::2], strict=True)]
    assert all(f"{r['realised']:.0%}".replace("%", " % skipped makes prompts") in flat() for r in rows[1::2])
    assert f"{speed[0]} (8 × 256 tokens) and {speed[1]} (2 × 1,024)" in flat()


def flat() -> str:
    """The README without its line breaks."""
    return " ".join(README.split())
