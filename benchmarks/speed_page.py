"""The tables of docs/speed.md from the stored results; nothing in them is typed by hand.

python benchmarks/speed_page.py
"""

from __future__ import annotations

from functools import partial

from pages import DOCS, Row, load, percent, table, written

PAGE = DOCS / "speed.md"
PAPER = """The paper reports 1.72–2.25× to the first token and 1.31–1.41× per token on A100s. Eager experts loop on the host, so
the ratios against them say more about kernels and graphs than about skipping; what skipping gives is the column against
our own 0 %.
"""
# true of a file that was stored before `ace bench` took the plan out for paths that no graph records; goes with it
UNDER_PLAN = """The rows of `eager` in this table were taken with the plan still in the model, nothing skipped: they ran our
executors in the uncompiled model, not stock's. Only the column against our own 0 % holds until they are measured again.
"""


table = partial(table, rule=" --- ")


def layer_section() -> str:
    result = load("layer_h200.json")
    by_tokens: dict[int, list[Row]] = {}
    for row in result["rows"]:
        by_tokens.setdefault(row["tokens"], []).append(row)
    rows = []
    for tokens, (whole, part) in by_tokens.items():
        share = " / ".join(percent(r["tb_s"] / result["ceiling_tb_s"]) for r in (whole, part))
        vllm = f"{whole['vllm_us']:.1f}" if whole.get("vllm_us") else "–"
        times = [f"{whole['stock_us']:.1f}", vllm, f"{whole['ours_us']:.1f}", f"{part['ours_us']:.1f}"]
        bytes_left = part["union"] / whole["union"]
        rows.append(
            [f"{tokens:,}", f"{whole['union']:.1f} → {part['union']:.1f}", *times, share,
             f"{part['ours_us'] / whole['ours_us']:.2f} / {bytes_left:.2f}"]
        )  # fmt: skip
    columns = ["tokens", "experts read", "stock grouped_mm", "vLLM", "ours", "ours, 60 % skipped",
               "of read bandwidth", "time left / bytes left"]  # fmt: skip
    skipped = [100 * (1 - row["kept"]) for row in result["rows"] if row["kept"] < 1]
    share = f"{min(skipped):.0f}–{max(skipped):.0f}"
    names, decided = ("rule_us share", "route_and_rule_us share", "stock_route_us"), load("deciding_h200.json")
    decisions = [[f"{int(r['tokens']):,}", *(f"{r[n]:.1f}" for n in names)] for r in decided["deciding"]]
    return f"""## The experts of one layer

{result["device"]}, Qwen3-30B-A3B shapes, bf16, uniform routing, µs; each time is a CUDA graph over eight layers' distinct
weights. Read ceiling {result["ceiling_tb_s"]:.2f} TB/s. `–`: not measured.

    {result["command"]}

{table(columns, rows)}
Skipped are {share} % of the slots: a token runs whole slots. Up to two tokens some five microseconds are left that the
bytes at the read ceiling do not explain. From 1,024 tokens on every expert is needed and products count instead of bytes.

Deciding which slots run, µs: the rule alone, routing and rule in one kernel, and stock's softmax and top-k for comparison.

    {decided["command"]}

{table(["tokens", "rule", "routing and rule", "stock routing"], decisions)}"""


def model_section(name: str, title: str) -> str:
    result = load(name)
    sizes = list(dict.fromkeys((r["what"], r["tokens"], r["batch"]) for r in result["rows"]))
    rows = []
    for what, tokens, batch in sizes:
        group = [r for r in result["rows"] if (r["what"], r["tokens"], r["batch"]) == (what, tokens, batch)]
        time = "gpu_ms" if group[0]["gpu_ms"] is not None else "wall_ms"
        stock = min((r[time] for r in group if not r["path"].startswith("ace")), default=None)
        dense = next((r[time] for r in group if r["path"] == "ace" and r["requested"] == 0), None)
        for r in group:
            ours = r["path"] == "ace"
            experts = f"{r['executed']:.1f} of {r['experts']:.1f}" if r.get("experts") is not None else ""
            ratios = [f"{other / r[time]:.2f}×" if ours and other else "" for other in (stock, dense)]
            said = [what.upper(), f"{batch} × {tokens:,}", f"`{r['path']}`", percent(r["realised"], 1)]
            rows.append([*said, f"{r[time]:.2f}", *ratios, experts])
    columns = ["", "batch × tokens", "path", "skipped", "ms", "against best stock", "against own 0 %", "experts read"]
    facts = f"{result['device']}, torch {result['torch']}. {result.get('note', '')}".strip()
    commands = result["command"].replace("; ", "\n    ")
    return f"## {title}\n\n{facts}\n\n    {commands}\n\n{table(columns, rows)}"


def budgets_section() -> str:
    """Decode steps at 30 % beside 60 %, wherever both were timed in one run."""
    result = load("routing_h200.json")
    found = {(r["routing"], r["batch"], r["skip"]): r for r in result["rows"]}
    kinds = ["uniform", "flat", "skewed"]
    rows = []
    for routing, batch in sorted({key[:2] for key in found if key[2] == 0.3}, key=lambda k: (kinds.index(k[0]), k[1])):
        cells = [found[routing, batch, skip] for skip in (0.0, 0.3, 0.6)]
        times = [cell["ms"]["plain"] for cell in cells]
        speed = [f"{times[0] / ms:.2f}×" for ms in times[1:]]
        rows.append([routing, str(batch), *(f"{ms:.2f}" for ms in times), *speed, " / ".join(map(_read, cells[1:]))])
    columns = [
        "routing",
        "batch",
        *(f"{n} %, ms" for n in (0, 30, 60)),
        "30 % against 0",
        "60 % against 0",
        "experts read",
    ]
    return f"""## A token at 30 % and at 60 %

{result["device"]}, Qwen3-30B-A3B shapes, {result["layers"]} layers, one graph a step. Most tables here show 60 %, where what
skipping can give is plain to see; [begin lower](choosing.md#how-much). With few sequences a skipped slot is a read saved; with 64
nearly every expert is read by some token, and 30 % saves little. Last column: experts read at both, of those read at 0 %.

    {result["command"]}

{table(columns, rows)}"""


def _read(row: Row) -> str:
    facts = row["facts"]["restored"]  # restored slots read nothing more
    return f"{100 * facts['reads'] / facts['asked']:.0f} %"


def fused_section() -> str:
    """Layers rewritten against compiled as they are, and this version against an earlier one."""
    result, rows = load("fused_h200.json"), []
    for r in result["rows"]:
        plain, fused = (r["ms"][n] for n in ("plain", "fused"))
        rows.append([str(r["batch"]), percent(r["skip"]), f"{plain:.2f}", f"{fused:.2f}", f"{plain / fused:.2f}×"])
    last = next(r for r in result["rows"] if r["batch"] == 1 and r["skip"])["kernels"]["fused"]
    kernels = [[f"`{name}`", f"{began:.1f}", f"{took:.1f}"] for name, began, took in last]
    return f"""## Layers rewritten

{result["device"]}, Qwen3-30B-A3B shapes, {result["layers"]} layers. `Decoder` rewrites layers before they are compiled
([how](architecture.md#how-decoding-is-fast)). Compiled as they are (`fused=False`) they are slower, by how much depends a little
on what the compiler's own tuner picks.

    {result["command"]}

{table(["batch", "skipped", "as they are, ms", "rewritten, ms", "ratio"], rows)}
{_against()}
One token at 60 %, one layer's kernels in order, µs each began and took, what it waits for the one in front included, under a
profiler:

{table(["kernel", "began", "took"], kernels)}"""


def _against() -> str:
    result, rows = load("against_decode_h200.json"), []
    for r in result["rows"]:
        other, this = (r["ms"][n] for n in ("other", "this"))
        skipped = " / ".join(f"{100 * r['realised'][n]:.1f} %" for n in ("other", "this"))
        rows.append([str(r["batch"]), skipped, f"{other:.2f}", f"{this:.2f}", f"{other / this:.2f}×"])
    return f"""Against an early version (`{result["other"]}`), in one run at the same threshold, by which that one skips less:

    {result["command"]}

{table(["batch", "skipped then / now", "then, ms", "now, ms", "ratio"], rows)}"""


def unions_section() -> str:
    result = load("unions.json")
    batches = list(result["rows"][0]["unions"])
    rows = [
        [r["model"], f"{r['experts']}, top {r['top_k']}", *(f"{r['unions'][b]:.1f} of {r['uniform'][b]:.1f}" for b in batches),
         " ".join(f"{share:.3f}".lstrip("0") for share in r["shares"])]
        for r in result["rows"]
    ]  # fmt: skip
    first = result["rows"][0]
    columns = ["model", "experts", *(f"batch {b}" for b in batches), "mean shares of the gates"]
    return f"""What our own trained models read in a decode step, of what uniform routing would: tokens at one place of different
sequences of WikiText-2's test text, {first["sequences"]} sequences of {first["window"]} tokens. They are small models with few
experts and say little about large ones.

    {result["command"]}

{table(columns, rows)}"""


def page() -> str:
    models = [
        ("latency_h200.json", "Whole models: Qwen3-30B-A3B shapes"),
        ("latency_gemma4_h200.json", "Whole models: Gemma-4-26B-A4B shapes"),
        ("latency_qwen36_h200.json", "Whole models: Qwen3.6-35B-A3B shapes"),
        ("latency_generate_h200.json", "Against stock as `generate` compiles it"),
        ("latency_paper_h200.json", "The paper's five rows against stock's eager experts"),
        ("latency_cpu.json", "On a CPU: an 86 M-parameter model, two cores"),
    ]
    *on_gpu, on_cpu = [model_section(*model) for model in models]
    parts = [unions_section(), budgets_section(), fused_section(), layer_section(), *on_gpu, UNDER_PLAN, PAPER, on_cpu]
    return written(PAGE, measured="\n".join(parts))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
