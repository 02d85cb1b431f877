"""docs/speed.md is what its script writes from the stored results."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import speed_page  # noqa: E402


def test_the_page_is_the_stored_results():
    assert speed_page.PAGE.read_text() == speed_page.page()


def test_decoders_are_as_near_to_fp32_as_the_page_says():
    rows = speed_page.load("decoder_h200.json")["rows"]
    assert {r["family"] for r in rows} == {
        "qwen3-30b-a3b",
        "qwen3.6-35b-a3b",
        "gemma-4-26b-a4b",
        "gpt-oss-20b",
        "glm-4.5-air",
    }
    assert all(r["graph"] and r["fused"] for r in rows)
    assert all(r["equal"] == r["tokens"] for r in rows if r["dtype"] == "float32")
    rounded = [r for r in rows if r["dtype"] == "bfloat16"]
    farther = [r for r in rounded if r["error"] > 1.25 * r["plain"]]
    assert (len(rounded), len(farther), farther[0]["size"]) == (36, 1, "tiny")


def test_its_commands_exist():
    """Every result names a command of ours."""
    for name in ("layer_h200.json", "latency_cpu.json"):
        command = speed_page.load(name)["command"].split()
        assert command[0] == "ace" or (ROOT / command[1]).exists()
