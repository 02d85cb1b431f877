"""What the other files here damage is good as it is. Their refusals show something only because of this."""

from __future__ import annotations

from pathlib import Path

from bad_input_cases import budget_arguments, run_arguments

from command import run_ace


def test_the_good_inputs_are_good(single: Path, sharded: Path, plan: Path, text: Path, tmp_path: Path) -> None:
    """What the other tests damage works as it is; otherwise they would show nothing."""
    for model in (single, sharded):
        assert run_ace("plan", model, "--tables", "-o", tmp_path / "new.safetensors").code == 0
        assert run_ace(*budget_arguments(model, plan, text)).code == 0
        ran = run_ace(*run_arguments(model, plan))
        assert ran.code == 0, ran.err
