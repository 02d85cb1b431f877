"""Where tensors come from: a folder of safetensors, read one layer at a time, or a model in memory."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ..errors import CheckpointError, brief
from .shards import Rows, Shards, open_shard, stacked_rows

Recipe = list[tuple[str, str | None]]  # (key on disk, converter pattern or None) that make one parameter
STACKING = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])  # experts over each other, gate above up


class CheckpointSource:
    """Parameters of a checkpoint folder under the names the model in memory has.

    Renames, merges of per-expert tensors and layout changes are transformers' own, so every layout it loads is
    read here too. Nothing is kept between calls: one call's parameters are all that is in memory.
    """

    def __init__(self, folder: Path, twin: PreTrainedModel):
        self.folder, self.twin = folder, twin
        self.files = locate(folder)
        self.shapes = {name: tensor.shape for name, tensor in twin.state_dict().items()}
        mapping = get_model_conversion_mapping(twin)
        self.converters = {p: c for c in mapping if isinstance(c, WeightConverter) for p in c.source_patterns}
        self.recipes = self._match([m for m in mapping if isinstance(m, WeightRenaming)])

    def _match(self, renamings: list[WeightRenaming]) -> dict[str, Recipe]:
        model, wanted = self.twin, self.twin.state_dict()
        converters = list({id(c): c for c in self.converters.values()}.values())
        recipes: dict[str, Recipe] = defaultdict(list)
        for key in sorted(self.files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
            if name not in wanted and key in wanted:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
            if name in wanted:
                recipes[name].append((key, pattern))
        return recipes

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named parameters; a name that the checkpoint lacks is an error."""
        out: dict[str, Tensor] = {}
        with Shards(self.files) as shards:
            for name in names:
                if name not in out:
                    out |= self._build(name, shards.get)
                self._check_shape(name, out[name])
        return out

    @contextmanager
    def rows(self) -> Iterator[Rows]:
        """A reader of single rows of stacked experts in the model's layout; None where the files do not have them so."""
        with Shards(self.files) as shards:
            yield lambda name, expert, wanted: self._rows(shards, name, expert, wanted)

    def _rows(self, shards: Shards, name: str, expert: int, wanted: range) -> Tensor | None:
        recipe, shape = self.recipes.get(name), tuple(self.shapes[name][1:])
        if not recipe:
            return None
        key, pattern = recipe[0]
        if pattern is None:
            return stacked_rows([(shards.slice(key), (expert,))], shape, wanted)
        operations = [(type(o), getattr(o, "dim", None)) for o in self.converters[pattern].operations]
        if operations in STACKING:
            sources = [[k for k, p in recipe if p == source] for source in self.converters[pattern].source_patterns]
            parts = [(shards.slice(keys[expert]), ()) for keys in sources if len(keys) > expert]
            return stacked_rows(parts, shape, wanted)
        if operations == [(Transpose, None)]:  # rows here are columns there: the expert is read whole
            turned = shards.slice(key)[expert]
            turned = turned if tuple(turned.shape) == shape else turned.mT
            return turned[wanted.start : wanted.stop : wanted.step] if tuple(turned.shape) == shape else None
        return None

    def _check_shape(self, name: str, found: Tensor) -> None:
        """One expert that is missing on disk shows here: the merge is one short."""
        wanted = self.shapes[name]
        if found.shape != wanted:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(found.shape)} in the files, {list(wanted)} by config.json. Tensors "
                "are missing or the configuration is of another model; download the folder again."
            )

    def _build(self, name: str, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        recipe = self.recipes.get(name) or self._sibling(name)
        if recipe[0][1] is None:
            return {name: get(recipe[0][0])}
        converter = deepcopy(self.converters[recipe[0][1]])
        for key, pattern in recipe:
            converter.add_tensor(name, key, pattern, lambda key=key: get(key))
        try:
            made = converter.convert(name, model=self.twin, config=self.twin.config)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # tensors that do not fit together
            raise CheckpointError(
                f"{self.folder}: the tensors of {name} do not fit together ({brief(error)}). The files are damaged or of another "
                "model; download the folder again."
            ) from error
        made = {k: v[0] if isinstance(v, list) else v for k, v in made.items()}
        if name not in made:
            raise self._missing(name)
        return made

    def _sibling(self, name: str) -> Recipe:
        """A one-to-many conversion is filed under its first target only: find the recipe that also makes `name`."""
        stem = name.rpartition(".")[0]
        for other, recipe in self.recipes.items():
            pattern = recipe[0][1]
            targets = self.converters[pattern].target_patterns if pattern else ()
            if len(targets) > 1 and other.startswith(stem.rpartition(".")[0]) and any(t in name for t in targets):
                return recipe
        raise self._missing(name)

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder} has no tensor for {name}. A shard may be missing, or the format is one this release of "
            "transformers does not convert; check the folder against its index, or download it again."
        )


class ModelSource:
    """Parameters of a model in memory, or parked elsewhere by accelerate."""

    def __init__(self, model: nn.Module):
        self.model, self.parameters = model, dict(model.named_parameters())

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._parameter(name) for name in names}

    def _parameter(self, name: str) -> Tensor:
        found = self.parameters[name].detach()
        if not found.is_meta:
            return found
        from accelerate.utils import align_module_device

        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        with align_module_device(module, "cpu"):  # one module's weights, for as long as it takes
            return getattr(module, leaf).detach().clone()

    @contextmanager
    def rows(self) -> Iterator[Rows]:
        """A reader of single rows of stacked experts; None where a parameter is packed, spread or not in memory."""
        yield self._rows

    def _rows(self, name: str, expert: int, wanted: range) -> Tensor | None:
        found = self.parameters.get(name)
        if type(found) is not nn.Parameter or found.is_meta or found.dim() != 3:
            return None
        return found.detach()[expert, wanted.start : wanted.stop : wanted.step]


def locate(folder: Path) -> dict[str, Path]:
    """Tensor name → file that holds it, for a single file or a sharded checkpoint."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _from_index(folder, index)
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(
            f"{folder} holds no .safetensors file. ACE reads safetensors checkpoints; convert others with "
            "`model.save_pretrained(folder)`, which never needs pickle again."
        )
    return {key: shard for shard in shards for key in keys_of(shard)}


def _from_index(folder: Path, index: Path) -> dict[str, Path]:
    try:
        entries: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        outside = sorted({file for file in entries.values() if _leaves(file)})
        missing = sorted({file for file in entries.values() if not (folder / file).is_file()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is not a safetensors index ({type(error).__name__}: {brief(error)}). It is damaged; download it again."
        ) from error
    if outside:
        raise CheckpointError(
            f"{index} names {outside[0]}, which is outside the folder. A checkpoint's shards lie beside its index; download "
            "it again, from a source you trust."
        )
    if missing:
        raise CheckpointError(
            f"{folder} misses {len(missing)} of {len(set(entries.values()))} shards: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}. Finish the download, then run the command again."
        )
    return {key: folder / file for key, file in entries.items()}


def _leaves(file: str) -> bool:
    """Whether a shard's name leads out of the folder its index lies in."""
    return os.path.isabs(file) or os.path.normpath(file).split(os.sep)[0] == os.pardir


def keys_of(shard: Path) -> list[str]:
    with open_shard(shard) as handle:
        return list(handle.keys())
