"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def expand(path: str | Path) -> Path:
    """`~` as the home folder. A user that does not exist stays as typed, so that "there is no file" follows."""
    return Path(os.path.expanduser(path))


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
