"""What a checkpoint's own files say of its quantisation: config.json, or hf_quant_config.json beside it (ModelOpt)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ..errors import CheckpointError, brief
from .formats import Facts


def quantisation(folder: Path, config: PretrainedConfig, metadata: Mapping[str, str]) -> Facts:
    return Facts(_of_config(config) or _of_modelopt(folder / "hf_quant_config.json"), metadata)


def _of_config(config: PretrainedConfig) -> dict[str, Any]:
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if found:
            return found if isinstance(found, dict) else found.to_dict()
    return {}


def _of_modelopt(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"quant_method": "modelopt", **found["quantization"]}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({brief(error)}). It is damaged; download it again.") from error
