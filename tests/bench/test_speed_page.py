"""docs/speed.md is what its script writes from the stored results."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import speed_page  # noqa: E402


def test_the_page_is_the_stored_results():
    assert speed_page.PAGE.read_text() == speed_page.page()


def test_its_commands_exist():
    """Every result names a command of ours."""
    for name in ("layer_h200.json", "latency_cpu.json"):
        command = speed_page.load(name)["command"].split()
        assert command[0] == "ace" or (ROOT / command[1]).exists()
