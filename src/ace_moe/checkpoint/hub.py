"""A hub repository read layer by layer: a shard at a time on disk, the bytes of one layer in memory, one commit throughout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import CheckpointError, brief
from ..files import file_hash
from .formats import Header
from .records import Site
from .shards import Shards
from .source import CheckpointSource

TRIES, PAUSE = 5, 1.0
SMALL = (".json", ".txt", ".model", ".jinja")


class Repository:
    """A model repository at one commit. `folder` holds its small files, and the shard that was asked for last."""

    def __init__(self, name: str, folder: Path, revision: str | None = None):
        self.name, self.folder = name, folder
        try:
            info = HfApi().model_info(name, revision=revision, files_metadata=True)
        except Exception as error:
            raise _unreachable(name, error) from error
        files = info.siblings or []
        self.commit = str(info.sha)
        self.sizes = {f.rfilename: f.size or 0 for f in files}
        self.hashes = {f.rfilename: f.lfs.sha256 for f in files if f.lfs}
        self.shards = sorted(f for f in self.sizes if f.endswith(".safetensors"))
        self.held: Path | None = None
        for file in self.sizes:
            if file.endswith(SMALL) and "/" not in file:
                self._download(file)

    def headers(self) -> Iterator[tuple[str, Any]]:
        """Each shard with what its first bytes say: metadata, and every tensor's dtype and shape."""
        for shard in self.shards:
            yield shard, self._asked(shard, HfApi().parse_safetensors_file_metadata)

    def fetch(self, shard: str) -> Path:
        """The shard on disk, whole and of this commit; the one before it is gone."""
        if self.held is not None and self.held.name == Path(shard).name:
            return self.held
        self.drop()
        self.held = self._download(shard)
        self._check(shard, self.held)
        return self.held

    def drop(self) -> None:
        if self.held is not None:
            self.held.unlink(missing_ok=True)
            self.held = None

    def _download(self, file: str) -> Path:
        return Path(self._asked(file, hf_hub_download, local_dir=self.folder))

    def _asked(self, file: str, question: Callable[..., Any], **how: Any) -> Any:
        """Of this commit; connections that break are tried again, what is not there is not."""
        for left in reversed(range(TRIES)):
            try:
                return question(self.name, file, revision=self.commit, **how)
            except Exception as error:
                if not left or isinstance(error, EntryNotFoundError | RepositoryNotFoundError):
                    raise _unreachable(f"{self.name}/{file}", error) from error
                time.sleep(PAUSE)

    def _check(self, file: str, path: Path) -> None:
        """The client files what it is sent under the commit it is told: another revision would go unnoticed."""
        told = get_hf_file_metadata(hf_hub_url(self.name, file, revision=self.commit))
        other = told.commit_hash != self.commit
        if not other and file in self.hashes:
            other = file_hash(path) != self.hashes[file]
        if other:
            self.drop()
            raise CheckpointError(
                f"{self.name}/{file} is not the file of commit {self.commit[:12]}: the repository changed, or the download is "
                "damaged. Run the command again; layers that are done are kept."
            )


def _unreachable(what: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{what} could not be fetched from the hub ({type(error).__name__}: {brief(error)}). Check the name and the network, and "
        "log in for gated models; then run the command again: layers that are done are kept."
    )


class Held(Shards):
    """Tensors of one layer in memory, as files have them."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__({})
        self.tensors = tensors

    def slice(self, key: str) -> Any:
        return self.tensors[key]


class StreamedSource(CheckpointSource):
    """A repository's parameters, of the layer that was prepared."""

    def __init__(self, repository: Repository, twin: PreTrainedModel):
        self.repository, self.held = repository, Held({})
        super().__init__(repository.folder, twin)

    def _headers(self) -> tuple[dict[str, Header], dict[str, str]]:
        self.shard_of, headers, metadata = dict[str, str](), dict[str, Header](), dict[str, str]()
        for shard, said in self.repository.headers():
            self.shard_of |= dict.fromkeys(said.tensors, shard)
            headers |= {key: Header(t.dtype, tuple(t.shape)) for key, t in said.tensors.items()}
            metadata |= said.metadata
        return headers, metadata

    def _open(self) -> Shards:
        return self.held

    def prepare(self, site: Site) -> None:
        """Everything of this layer is read, shard by shard; the layer before it is dropped."""
        keys = self._keys(site.parameter_names())
        if keys <= self.held.tensors.keys():
            return
        self.held = Held({})
        tensors: dict[str, Tensor] = {}
        held = (
            self.repository.held
        )  # what is on disk already comes first: the last one is the likeliest to be asked for next
        shards = {self.shard_of[key] for key in keys}
        for shard in sorted(shards, key=lambda s: (held is None or held.name != Path(s).name, s)):
            with safe_open(self.repository.fetch(shard), "pt") as file:
                tensors |= {key: file.get_tensor(key) for key in keys if self.shard_of[key] == shard}
        self.held = Held(tensors)

    def _keys(self, names: Iterable[str]) -> set[str]:
        recipes = (self.recipes.get(name) or self._sibling(name) for name in names)
        return {key for recipe in recipes for name, _ in recipe for key in self.stored[name].keys}

    def sizes(self, sites: Iterable[Site]) -> dict[str, int]:
        """Bytes of the shards that these layers are in."""
        shards = {self.shard_of[key] for site in sites for key in self._keys(site.parameter_names())}
        return {shard: self.repository.sizes[shard] for shard in sorted(shards)}
