"""Plans in the cache: those fetched from the hub, and those made for models that were given none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import OptionError, OutputError
from ..files import cache_folder


@dataclass(frozen=True)
class Kept:
    """A plan in the cache; `commit` is None for one that was made here."""

    name: str
    path: Path
    size: int
    changed: float
    commit: str | None = None

    @property
    def label(self) -> str:
        return f"{self.name}@{self.commit[:8]}" if self.commit else self.name


def hub_folder() -> Path:
    return cache_folder() / "hub"


def kept() -> list[Kept]:
    """List the plans in the cache: those made here first, each group by name."""
    here = [Kept(p.stem, p, p.stat().st_size, p.stat().st_mtime) for p in sorted(cache_folder().glob("*.safetensors"))]
    return here + sorted(_fetched(), key=lambda k: k.label)


def _fetched() -> list[Kept]:
    """List the plans that were fetched from the hub."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(hub_folder()).repos
    except (CacheNotFound, ValueError):
        return []
    return [
        Kept(repo.repo_id, file.file_path, file.size_on_disk, file.blob_last_modified, revision.commit_hash)
        for repo in repositories
        for revision in repo.revisions
        for file in revision.files
        if file.file_name.endswith(".safetensors")
    ]


def clear(name: str | None = None) -> list[Kept]:
    """Delete the plans that a name means, or all; return them."""
    from huggingface_hub import scan_cache_dir

    meant = [k for k in kept() if name in (None, k.name, k.label)]
    if name is not None and not meant:
        raise OptionError(f"No plan {name!r} is kept. `ace plans` lists those that are.")
    commits = [k.commit for k in meant if k.commit]
    if commits:
        scan_cache_dir(hub_folder()).delete_revisions(*commits).execute()
    for plan in meant:
        plan.path.unlink(missing_ok=True)
        Path(f"{plan.path}.lock").unlink(missing_ok=True)
    return meant


def check_own(path: Path) -> None:
    """Refuse to write into a fetched plan, which stays as it was published."""
    folder = hub_folder().absolute()
    if folder in path.absolute().parents:
        name = path.absolute().relative_to(folder).parts[0].removeprefix("models--").replace("--", "/")
        raise OutputError(
            f"{name} is a plan of the hub, which stays as it was published. Take a copy with `ace plans get {name} -o "
            "plan.safetensors`, and give that."
        )
