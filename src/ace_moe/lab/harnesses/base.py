"""Shared by the evaluation harnesses: a plan among a model's options, a checkpoint without code, data that is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...ace import ACE
from ...checkpoint import resolve
from ...errors import IntegrationError, TaskError, brief

# settings of ours among the arguments of a harness's model
OURS = ("policy", "preset", "gain", "min_active", "min_mass", "workload", "allow_other_weights", "dispatch", "fusion")


def load_ace(plan: str, skip: Any, options: dict[str, Any]) -> ACE:
    """Load a plan with our settings, taken out of the options; refuses a wrong plan before a model is loaded."""
    return ACE.load(plan, skip, **{name: options.pop(name) for name in OURS if name in options})


def folder_without_code(model: str | Path) -> str:
    """The checkpoint's folder, for a harness that would run whatever code lies in it."""
    folder = resolve(model)
    for name in ("config.json", "tokenizer_config.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # the loader will say what is wrong with it
        if isinstance(found, dict) and found.get("auto_map"):
            raise IntegrationError(
                f"{folder / name} names code of its own (auto_map), and code from a checkpoint is not run. If transformers "
                "knows the architecture, remove `auto_map` from a copy; else use another model."
            )
    return str(folder)


@contextmanager
def data_of(task: str) -> Iterator[None]:
    """Say in words that a data set is missing: its library raises errors that look like those of files."""
    try:
        yield
    except OSError as error:  # DatasetNotFoundError, ConnectionError and their kin
        raise TaskError(
            f"The data of {task} could not be had ({type(error).__name__}: {brief(error)}). It comes from the hub unless it was "
            "fetched before: check the name and the network (HF_HUB_OFFLINE forbids it), or give questions of your own in a "
            "folder with `ace eval --data FOLDER`."
        ) from error
