"""Checks of output paths: never over what results are made from, into a checkpoint, or over a file of another kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..errors import OutputError
from ..files import expand

ELSEWHERE = "Choose another place."
PICTURES = (b"\x89PNG", b"%PDF", b"<svg", b"<?xml", b"\xff\xd8", b"RIFF", b"%!PS")


def check_output(path: Path | None, kind: str, *inputs: Path | None) -> None:
    """Refuse an output before the long work starts.

    `kind`: plan, results, page, picture or trace; `inputs`: files the output is made from.
    """
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
    if real.is_file() and real.stat().st_size and not _is_ours(real, kind):
        called = {"page": "page of ours", "results": "results file"}.get(kind, kind)
        raise OutputError(f"{path} is there already and is not a {called}; it would be lost. {ELSEWHERE}")


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, before the long work starts."""
    from ..plan.cache import check_own

    path = expand(path)
    check_own(path)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise OutputError(f"There is no folder {folder} to write {path.name} into. Create it, or choose another place.")
    if path.is_dir() or not os.access(folder, os.W_OK):
        why = "it is a folder" if path.is_dir() else "no permission"
        raise OutputError(f"{path} cannot be written: {why}. Choose another place.")


def check_folder(path: Path) -> None:
    """Refuse a path that neither is a folder nor can become one."""
    path = expand(path)
    existing = next((p for p in (path, *path.resolve().parents) if p.exists()), path)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = f"no permission in {existing}" if existing.is_dir() else f"{existing} is a file"
        raise OutputError(f"{path} cannot be written: {why}. Choose another folder with -o.")
    if (path / "config.json").exists():
        raise OutputError(f"{path} is a checkpoint, which must stay as it is. Choose another folder with -o.")


def _is_ours(path: Path, kind: str) -> bool:
    """True for a file of this kind that one of our commands wrote, and for a picture."""
    if kind == "plan":
        from ..plan.file import is_plan

        plan = is_plan(path)  # None: it cannot be read, so it is a damaged plan, or nothing that could be lost
        return path.suffix == ".safetensors" if plan is None else plan
    if kind == "results":
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return False
        return isinstance(results, dict) and bool({"kind", "command"} & set(results))
    if kind == "page":
        from ..lab.report.page import is_page

        return is_page(path)
    if kind == "trace":
        from ..engines.traces.file import is_trace

        return is_trace(path)
    with path.open("rb") as file:
        return file.read(5).startswith(PICTURES)
