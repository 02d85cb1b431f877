"""Where results may go: never over what they are made from, into a checkpoint, or over a file of another kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..errors import OutputError
from ..files import expand
from .show import check_writable

ELSEWHERE = "Choose another place."
PICTURES = (b"\x89PNG", b"%PDF", b"<svg", b"<?xml", b"\xff\xd8", b"RIFF", b"%!PS")


def check_output(path: Path | None, kind: str, *inputs: Path | None) -> None:
    """Before the long work starts. `kind`: plan, results, page, picture or trace; `inputs`: files the output is made from."""
    if path is None:
        return
    check_writable(path)
    real = Path(os.path.realpath(expand(path)))
    for made_from in inputs:
        if made_from is not None and real.exists() and expand(made_from).exists() and real.samefile(expand(made_from)):
            raise OutputError(f"{path} is what the {kind} is made from, which would be lost. {ELSEWHERE}")
    if (real.parent / "config.json").is_file() and any(real.parent.glob("*.safetensors*")):
        raise OutputError(
            f"{path} is inside the checkpoint {real.parent}, which must stay as it is: readers take a further .safetensors "
            f"file there for a shard. {ELSEWHERE}"
        )
    if real.is_file() and real.stat().st_size and not OWN[kind](real):
        called = "page of ours" if kind == "page" else kind
        raise OutputError(f"{path} is there already and is no {called}; it would be lost. {ELSEWHERE}")


def _plan(path: Path) -> bool:
    """What calls itself a safetensors file and cannot be read is a damaged plan, or nothing that could be lost."""
    from ..plan.file import is_plan

    found = is_plan(path)
    return path.suffix == ".safetensors" if found is None else found


def _results(path: Path) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and bool({"kind", "command"} & set(found))


def _page(path: Path) -> bool:
    from ..lab.report.page import is_page

    return is_page(path)


def _picture(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(5).startswith(PICTURES)


def _trace(path: Path) -> bool:
    from ..engines.traces.file import is_trace

    return is_trace(path)


OWN = {"plan": _plan, "results": _results, "page": _page, "picture": _picture, "trace": _trace}
