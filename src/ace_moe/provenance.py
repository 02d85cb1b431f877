"""The record of what made a file: command, release and commit, libraries, device, date, and hashes of what went in."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from .version import __version__

UNKNOWN, PROMPT = "unknown", "--prompt"
LIBRARIES = ("torch", "transformers", "safetensors", "triton", "vllm", "lm_eval", "evalscope")
FIELDS = ("command", "version", "commit", "changed", "device", "libraries", "date", "inputs")
Record = dict[str, Any]


def provenance(
    device: object = "cpu", inputs: Mapping[str, str] | None = None, argv: Sequence[str] | None = None
) -> Record:
    """Record this run; `inputs` maps names of what went in to their sha256."""
    commit, changed = _commit()
    libraries = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            libraries[name] = importlib.metadata.version(name)
    return {
        "command": command(sys.argv if argv is None else argv),
        "version": __version__,
        "commit": commit,
        "changed": changed,
        "device": device_name(device),
        "libraries": libraries,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "inputs": dict(inputs or {}),
    }


def command(argv: Sequence[str]) -> str:
    """Quote the command as it was typed, but with base names of files, and without a prompt, which a plan would publish."""
    name = Path(argv[0]).name
    return shlex.join(["ace" if name == "__main__.py" else name, *_public(argv[1:])])


def _public(parts: Sequence[str]) -> Iterator[str]:
    """The arguments with base names of files, and TEXT for a prompt."""
    prompt_follows = False
    for part in parts:
        flag, equals, value = part.partition("=") if part.startswith("--") else ("", "", part)
        path = os.path.expanduser(value)
        is_path = path.startswith((os.sep, f".{os.sep}", f"..{os.sep}")) or (os.sep in path and os.path.exists(path))
        is_prompt = prompt_follows or (flag == PROMPT and bool(equals))
        yield flag + equals + ("TEXT" if is_prompt else Path(path).name if is_path else value)
        prompt_follows = part == PROMPT


def device_name(device: object) -> str:
    """Name the kind of device, and a GPU's model."""
    import torch

    where = torch.device(str(device))
    return f"cuda ({torch.cuda.get_device_name(where)})" if where.type == "cuda" else where.type


@cache
def _commit() -> tuple[str, bool | str]:
    """Ask git for the commit of the checkout this package runs from, and if files were changed since."""
    here = Path(__file__).parent
    try:
        _git(here, "ls-files", "--error-unmatch", Path(__file__).name)  # or the checkout is somebody else's
        return _git(here, "rev-parse", "HEAD"), bool(_git(here, "status", "--porcelain", "."))
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN, UNKNOWN


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


# ---- reading --------------------------------------------------------------------------------------------------------


def read(results: Mapping[str, Any]) -> Record:
    """Read the record of a stored result; what was not written then says "unknown"."""
    runs = results.get("runs") or [results.get("provenance") or _earlier(results)]
    return {name: runs[-1].get(name, UNKNOWN) for name in FIELDS}


def _earlier(results: Mapping[str, Any]) -> Record:
    """Read the record of a stored result that has it in other words."""
    environment = results.get("environment", {})
    libraries = {name: results.get(name, environment.get(name)) for name in LIBRARIES}
    known = {
        "command": results.get("command"),
        "version": environment.get("ace_moe"),
        "device": results.get("device", environment.get("card", environment.get("device"))),
        "libraries": {name: value for name, value in libraries.items() if value} or None,
    }
    return {name: value for name, value in known.items() if value is not None}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Say which versions two records differ in; None where they are the same."""
    flat = ({**{n: r.get(n) for n in ("version", "commit")}, **(r.get("libraries") or {})} for r in (one, other))
    then, now = ({name: value or UNKNOWN for name, value in versions.items()} for versions in flat)
    names = [name for name in now if then.get(name, UNKNOWN) != now[name]]
    return ", ".join(f"{name} {then.get(name, UNKNOWN)} then and {now[name]} now" for name in names) or None
