"""Loading a model and its tokenizer for the commands, with errors of our own."""

from __future__ import annotations

import math
import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..errors import AceError, CheckpointError, DeviceError, OptionError, TextError, brief
from ..text import Text, Windows, cut
from . import resolve
from .expansion import check_loaded, expand_model, is_packed
from .model import load_config
from .structure import model_class

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(
    model: str | Path,
    device: str | None = None,
    dtype: str = "auto",
    expand: bool = False,
    device_map: str | None = None,
) -> PreTrainedModel:
    """Load a model in its own precision on one device (the GPU if there is one), or spread by a `device_map`.

    `expand` decodes a quantised checkpoint into an unquantised model, also of formats that transformers does not load.
    """
    _check_how(device, dtype, expand, device_map)
    device = device or default_device()
    check_device(device)
    if torch.device(device).type == "cpu":
        share_cores()
    folder = resolve(model)
    config, packed = load_config(folder), is_packed(folder)  # a missing shard is reported before gigabytes are read
    hint = " Or decode it with --expand (expand=True), which needs no other library." if packed and not expand else ""
    causal = type(config) in AutoModelForCausalLM._model_mapping
    cls = AutoModelForCausalLM if causal else model_class(config)
    try:
        if expand:
            loaded, report = expand_model(folder, config, dtype)
        else:
            how: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True}
            how |= {"device_map": device_map} if device_map else {}
            loaded, report = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True, **how)
        loaded = (loaded if device_map else loaded.to(device)).eval()
    except AceError:
        raise
    except Exception as error:  # readers, converters and quantisers of many libraries run here
        raise CheckpointError(
            f"{model} could not be loaded ({brief(error)}). If a file is damaged, download it again; if a library is "
            f"missing, install it; if memory ran out, choose another --device.{hint}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would run on with random numbers there
        raise CheckpointError(
            f"{model} has no tensor for {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}. A shard is "
            f"missing or the files are of another model; check the folder against its index, or download it again.{hint}"
        )
    if packed:
        check_loaded(loaded, folder)
    return loaded


def _check_how(device: str | None, dtype: str, expand: bool, device_map: str | None) -> None:
    """Refuse options that mean nothing, or nothing together."""
    if dtype not in DTYPES:
        raise OptionError(f"There is no precision {dtype!r}. Choose one of: {', '.join(DTYPES)}.")
    if device_map is not None and (device is not None or expand):
        raise OptionError("--device-map spreads a model by itself; give it without --device and --expand.")
    if device_map is not None and find_spec("accelerate") is None:
        raise OptionError("--device-map needs accelerate. Install it with `pip install accelerate`.")


def share_cores() -> None:
    """Use fewer threads where other work has the cores: OpenMP's spin while they wait, and a pass takes many times as long."""
    used = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ or used == 1 or not hasattr(os, "getloadavg"):
        return
    free = max(1, min(used, round(cores() - os.getloadavg()[0])))
    if free < used:
        torch.set_num_threads(free)
        warnings.warn(
            f"this machine has {cores()} cores and a load of {os.getloadavg()[0]:.1f}: computing with {free} of {used} "
            "threads. OMP_NUM_THREADS sets another number.",
            stacklevel=2,
        )


def cores() -> int:
    """Count the cores this process may use; a container may have fewer than the machine."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(there, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or no limit
        return there


def default_device() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have, before the long work starts."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            f"Device {device!r} cannot be used here ({brief(error)}). Choose --device cpu, or cuda where there is a GPU."
        ) from error


def load_tokenizer(model: str | Path) -> Any:
    """Load the tokenizer of a model, and refuse one that knows no text."""
    folder = resolve(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # some classes start empty where their files are missing
            raise ValueError("it knows no token but special ones")
    except Exception as error:  # damaged files raise whatever their reader raises
        raise TextError(
            f"{model} has no usable tokenizer ({brief(error)}). Put its tokenizer files into the folder."
        ) from error
    return tokenizer


def check_window(model: PreTrainedModel, window: int) -> None:
    """Refuse a window past the model's positions, where its numbers are of no use."""
    config = model.config.get_text_config()
    positions, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    factor = rope.get("factor", 1.0)  # YaRN and its kin stretch what the model was trained with
    if isinstance(positions, int) and isinstance(factor, (int, float)) and window > positions * max(1.0, factor):
        raise OptionError(
            f"A window of {window:,} tokens is longer than the model, which has {positions:,} positions. Choose a smaller "
            "--window."
        )


def load_windows(
    model: PreTrainedModel, tokenizer: Any, text: str | Path | Text, window: int, tokens: int | None
) -> Windows:
    """Cut a text into windows of this model's tokens."""
    check_window(model, window)
    source = Text.of(text)
    return cut(source.content, tokenizer, window, tokens, model.get_input_embeddings().num_embeddings, source.name)
