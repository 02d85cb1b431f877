"""The figures of docs/host.md, experts in host memory, from stored results.

python benchmarks/host_page.py
"""

from __future__ import annotations

from pages import DOCS, Row, load, percent, table, written

from ace_moe.kernels.experts import STAGED

PAGE = DOCS / "host.md"
HOSTED = """\
One {device}, {layers} layers of Qwen3-30B-A3B's shape with random weights; milliseconds a step for these layers, and how fast
experts crossed the bus, as a part of a pinned copy's {rate:.1f} GB/s (over the whole step, everything else in it included):

{table}"""
SERVED = "TPOT in vLLM {vllm} on one {device}, four layers:\n\n{table}"


def hosted(rows: list[Row], rate: float) -> str:
    base, lines = {(r["routing"], r["batch"]): r["ms"] for r in rows if r["skip"] == 0}, []
    for r in rows:
        own = base[r["routing"], r["batch"]]
        far = [f"{r['ms'][way]:.2f} ({percent(r['rate'][way] / rate)})" for way in ("host", "half")]
        faster = " / ".join(f"{own[way] / r['ms'][way]:.2f}" for way in ("host", "half", "gpu"))
        lines.append([f"{r['routing']}, {r['batch']}", percent(r["skip"]), *far, f"{r['ms']['gpu']:.2f}", faster])
    columns = ["routing, batch", "skipped", "all on the host", "half of them", "all on the GPU", "× own 0 %"]
    return table(columns, lines)


def served() -> str:
    found, lines = load("offload_vllm_h200.json"), []
    for run in found["places"]:
        for row in run["rows"]:
            ms = list(row["ms"].values())
            lines.append(
                [run["where"], str(row["batch"]), *(f"{value:.2f} ms" for value in ms), f"{ms[1] / ms[2]:.2f}"]
            )
    columns = ["on the host", "batch", "vLLM", "with the plugin, 0 %", "60 %", "× own 0 %"]
    return SERVED.format(**found, table=table(columns, lines))


def page() -> str:
    found = load("host_h200.json")
    rate = found["copy_rate"]
    here = HOSTED.format(device=found["device"], rate=rate / 1e9, layers=4, table=hosted(found["rows"], rate))
    return written(PAGE, staged=str(STAGED), hosted=here, served=served())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
