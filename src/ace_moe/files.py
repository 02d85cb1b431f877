"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def expand(path: str | Path) -> Path:
    """`~` as the home folder. A user that does not exist stays as typed, so that "there is no file" follows."""
    return Path(os.path.expanduser(path))


def irregular(folder: Path) -> list[str]:
    """Names in a folder that are neither files nor folders: reading a pipe or a device may never end.

    A link that leads nowhere is a file that is missing, not one of these.
    """
    found = []
    for entry in os.scandir(folder):
        try:
            mode = entry.stat().st_mode
        except OSError:
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            found.append(entry.name)
    return sorted(found)


def replace_whole(path: Path, data: bytes) -> None:
    """Write beside the target, flush, move over it in one step: a kill leaves the old file or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
