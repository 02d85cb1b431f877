"""Files that are there whole or not at all."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import OptionError, OutputError, brief

try:
    import fcntl
except ImportError:  # Windows: files are whole there too, but two writers are not told of each other
    fcntl = None  # type: ignore[assignment]

UNFINISHED = ".part"
PATIENCE = 30.0  # seconds to wait for another process's write, which takes a moment


def expand(path: str | Path) -> Path:
    """Replace `~` by the home folder. An unknown user stays as typed, so that "there is no file" follows."""
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"A file is named by its path, not by {type(path).__name__}.")
    return Path(os.path.expanduser(path))


def file_hash(path: str | Path) -> str:
    """Hash a file's bytes with sha256."""
    digest = hashlib.sha256()
    with expand(path).open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def hashes(paths: Iterable[str | Path]) -> dict[str, str]:
    """Hash files by name; where several have one name, by name and number."""
    by_name: dict[str, str] = {}
    times: Counter[str] = Counter()
    for path in paths:
        name = Path(path).name
        times[name] += 1
        by_name[name if times[name] == 1 else f"{name} ({times[name]})"] = file_hash(path)
    return by_name


def cache_folder() -> Path:
    """The folder of plans that nobody named a place for: ACE_CACHE, or ace-moe in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ACE_CACHE") or Path(base) / "ace-moe")


def irregular(folder: Path) -> list[str]:
    """List names in a folder that are neither files nor folders: reading a pipe or a device may never end.

    A link that leads nowhere is a file that is missing, not one of these.
    """
    odd = []
    for entry in os.scandir(folder):
        with suppress(OSError):
            mode = entry.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                odd.append(entry.name)
    return sorted(odd)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Keep other processes of ours from writing into a folder; False where it cannot be locked (some network drives).

    The lock is on the folder itself, so that it leaves no file behind, and the system lets go of it when a process ends.
    """
    if fcntl is None:
        yield False
        return
    handle, end = os.open(folder, os.O_RDONLY), time.monotonic() + PATIENCE
    try:
        alone = False
        while not alone and time.monotonic() < end:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield alone
    finally:
        os.close(handle)


def replace_whole(path: Path, data: bytes, private: bool = False) -> None:
    """Write beside the target, flush, move over it in one step: a kill leaves the old file or the new one.

    A link stays, and what it leads to is replaced; a file that was there keeps its permissions, and a private one is its
    owner's alone.
    """
    path = Path(os.path.realpath(path))
    with locked(path.parent) as alone:
        if alone:
            clear_unfinished(path)
        replace_here(path, data, private)


def clear_unfinished(path: Path) -> None:
    """Remove what killed writers of a file left; the caller has locked its folder, so nobody is at work on it."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{UNFINISHED}"):
        left.unlink(missing_ok=True)


def replace_here(path: Path, data: bytes, private: bool = False) -> None:
    """`replace_whole` of a path that is not a link, for a caller that has locked its folder."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{UNFINISHED}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists() and not private:
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: str | Path, data: bytes, what: str, private: bool = False) -> Path:
    """`replace_whole`, with an error that says what could not be written."""
    path = expand(path)
    try:
        replace_whole(path, data, private)
    except OSError as error:
        raise unwritable(path, error, what) from error
    return path


def unwritable(path: Path, error: OSError, what: str) -> OutputError:
    return OutputError(
        f"{what} could not be written to {path} ({error.strerror or brief(error)}). What was there is unchanged; choose "
        "another place, or free space and run again."
    )
