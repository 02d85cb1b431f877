"""Text for the methods that need one. It should not be the text they are measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...checkpoint.loading import load_windows
from ...text import Windows
from ..policies.calls import CALIBRATED_ON, calibration_part


def calibration_windows(
    model: PreTrainedModel, tokenizer: Any, text: Path, measured: Windows, given: Path | None
) -> tuple[Windows, str | None]:
    """Windows of the given text, else of what follows the measured tokens; and a notice if there is nothing else."""
    count, window = measured.ids.shape
    if given is not None:
        return load_windows(model, tokenizer, given, window, CALIBRATED_ON * window), None
    rest = load_windows(model, tokenizer, text, window, (count + CALIBRATED_ON) * window).ids[count:]
    if not len(rest):
        return measured, (
            f"{text.name} ends with the measured tokens, so methods that need a text are calibrated on what they are "
            "measured on and look better than they are. Give another text with --calibration."
        )
    return calibration_part(Windows(rest, measured.workload)), None
