"""What the scripts share: options are of their defaults' types, ways take turns, a ratio is met, results are whole files."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import running


def test_an_option_is_of_its_defaults_type():
    made = running.parser("words", tokens=16, skip=[0.0, 0.6], device="cpu", plain=False, at_once=1)
    assert vars(made.parse_args([])) == dict(out=None, tokens=16, skip=[0.0, 0.6], device="cpu", plain=False, at_once=1)
    given = made.parse_args(["-o", "a.json", "--tokens", "4", "--skip", "0.3", "--plain", "--at-once", "2"])
    assert (given.out, given.tokens, given.skip, given.plain, given.at_once) == (Path("a.json"), 4, [0.3], True, 2)
    with pytest.raises(SystemExit):
        running.parser("words", must_store=True).parse_args([])


def test_ways_take_turns():
    order = []
    found = running.in_turn({name: lambda name=name: order.append(name) for name in "ab"}, 2)
    assert order == ["a", "b", "a", "b"] and found == {"a": [None, None], "b": [None, None]}


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.6])
def test_a_ratio_is_met(ratio):
    assert running.settled(lambda tau: tau**2, ratio, 20) == pytest.approx(ratio**0.5, abs=1e-5)


def test_gates_that_are_nearly_equal_take_more_rounds():
    realised = lambda tau: min(max((tau - 0.125) / 2e-5, 0.0), 1.0)  # noqa: E731
    assert realised(running.settled(realised, 0.6, 12)) == 1.0
    assert realised(running.settled(realised, 0.6, 30)) == pytest.approx(0.6, abs=1e-3)


def test_results_say_what_made_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/a/unions.py", "/models/m", "--tokens", "4"])
    running.store(tmp_path / "a.json", running.made_here(rows=[1]))
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["command"] == "python benchmarks/unions.py m --tokens 4" and found["rows"] == [1] and found["device"]
    running.store(None, found)
