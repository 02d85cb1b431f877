"""Tensors of a folder of safetensors, under the names the model in memory has, read one layer or one expert at a time."""

from __future__ import annotations

import json
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import core_model_loading as core
from transformers.conversion_mapping import get_model_conversion_mapping

from ..errors import CheckpointError, brief
from .formats import facts_of, strays, understand
from .records import Stack
from .shards import Rows, Shards, open_shard, read_headers, stacked_rows
from .structure import Site

Recipe = list[tuple[str, str | None]]  # (name on disk, converter pattern or None) that make one parameter
Keys = Callable[[int], list[str]]  # expert → names on disk of the matrices that lie above each other in its matrix
STACKING = (
    [(core.MergeModulelist, 0)],
    [(core.MergeModulelist, 0), (core.Concatenate, 1)],
)  # experts over each other, gate above up


class CheckpointSource:
    """Parameters of a checkpoint folder under the names the model in memory has.

    Renames, merges of per-expert tensors and layout changes are transformers' own, so every layout it loads is
    read here too; formats come before them, so that they see tensors as if nothing were quantised. Nothing is kept
    between calls: one call's parameters are all that is in memory.
    """

    def __init__(self, folder: Path, twin: PreTrainedModel):
        self.folder, self.twin = folder, twin
        self.files = locate(folder)
        self.headers, metadata = read_headers(self.files)
        self.facts = facts_of(folder, twin.config, metadata)
        self.stored = understand(self.headers, self.facts)
        self.shapes = {name: tensor.shape for name, tensor in twin.state_dict().items()}
        mapping = get_model_conversion_mapping(twin)
        self.converters = {p: c for c in mapping if isinstance(c, core.WeightConverter) for p in c.source_patterns}
        self.recipes = self._match([m for m in mapping if isinstance(m, core.WeightRenaming)])

    def _match(self, renamings: list[core.WeightRenaming]) -> dict[str, Recipe]:
        """Sort tensors on disk by the parameter they make, as transformers' loader does."""
        model, wanted = self.twin, self.twin.state_dict()
        converters = list({id(c): c for c in self.converters.values()}.values())
        recipes: dict[str, Recipe] = defaultdict(list)
        for key in sorted(self.stored, key=core.dot_natural_key):
            name, pattern = core.rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
            if name not in wanted and key in wanted:
                name, pattern = core.rename_source_key(key, [], [], model.base_model_prefix, wanted)
            if name in wanted:
                recipes[name].append((key, pattern))
        return recipes

    # ---- what can be read -------------------------------------------------------------------------------------------

    def check(self, sites: Sequence[Site]) -> None:
        """Refuse tensors of the MoE layers whose numbers mean nothing known, by name, before any work."""
        self._check_names(name for site in sites for name in site.parameter_names())
        self._check_config(sites)

    def check_all(self) -> None:
        """Check the whole model in the same way; whole numbers may be stored as such."""
        self._check_names(name for name, t in self.twin.state_dict().items() if t.is_floating_point())

    def _check_names(self, names: Iterable[str]) -> None:
        """Refuse parameters that no format explains, or beside which lies a tensor that no format explains."""
        used = {key for recipe in self.recipes.values() for key, _ in recipe}
        loose = {path: [n for n in beside if n not in used] for path, beside in strays(self.stored).items()}
        for key in (key for name in names for key, _ in self.recipes.get(name, ())):
            problem, beside = self.stored[key].problem, loose.get(key, []) + loose.get(key.rpartition(".")[0], [])
            if beside and not problem:
                problem = f"{beside[0]} {self.headers[beside[0]]} lies beside {key} and belongs to no known format"
            if problem:
                raise CheckpointError(
                    f"{self.folder}: {problem}. A plan of it would be silently wrong. Check that the download is complete; if "
                    "it is, build the plan from the unquantised checkpoint: with the same routers it serves this one too."
                )

    def _check_config(self, sites: Sequence[Site]) -> None:
        """Say where config.json disagrees with how numbers are stored; they are read as they are stored."""
        config = self.facts.config
        if not config or config.get("dequantize") or self.formats(n for s in sites for n in s.stacks()) != {"plain"}:
            return
        said = f"{self.folder}: config.json says the model is quantised ({self.facts.method or 'unknown method'})"
        if all(stored.format == "plain" for stored in self.stored.values()):
            stacks = [key for s in sites for n in s.stacks() for key, _ in self.recipes.get(n, ())]
            example = stacks[0] if stacks else "the experts"
            raise CheckpointError(
                f"{said}, but no tensor is: {example} is {self.headers.get(example, 'missing')}. Take quantization_config "
                "out of config.json if the weights are the original ones; else download the folder again."
            )
        warnings.warn(f"{said}; its experts are not, and are read as they are.", stacklevel=2)

    def formats(self, names: Iterable[str]) -> set[str]:
        """Name the formats that parameters are stored in."""
        return {self.stored[key].format for name in names for key, _ in self.recipes.get(name, ())}

    # ---- whole parameters -------------------------------------------------------------------------------------------

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named parameters; a name that the checkpoint lacks is an error."""
        tensors: dict[str, Tensor] = {}
        with Shards(self.files) as shards:
            for name in names:
                if name not in tensors:
                    tensors |= self._build(name, lambda key: self.stored[key].read(shards.slice))
                self._check_shape(name, tensors[name].shape)
        return tensors

    def _check_shape(self, name: str, shape: torch.Size) -> None:
        """Refuse another shape than the model's. An expert that is missing on disk shows here: the merge is one short."""
        wanted = self.shapes[name]
        if shape != wanted:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(shape)} in the files, {list(wanted)} by config.json. Tensors "
                "are missing or the configuration is of another model; download the folder again."
            )

    def _build(self, name: str, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Make a parameter, and those that come out of the same conversion."""
        recipe = self.recipes.get(name) or self._sibling(name)
        if recipe[0][1] is None:
            return {name: get(recipe[0][0])}
        converter = deepcopy(self.converters[recipe[0][1]])
        for key, pattern in recipe:
            converter.add_tensor(name, key, pattern, lambda key=key: get(key))
        try:
            tensors = converter.convert(name, model=self.twin, config=self.twin.config)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # tensors that do not fit together
            raise CheckpointError(
                f"{self.folder}: the tensors of {name} do not fit together ({brief(error)}). The files are damaged or of another "
                "model; download the folder again."
            ) from error
        tensors = {k: v[0] if isinstance(v, list) else v for k, v in tensors.items()}
        if name not in tensors:
            raise self._missing(name)
        return tensors

    def _sibling(self, name: str) -> Recipe:
        """Find the recipe that also makes `name`: a one-to-many conversion is filed under its first target only."""
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

    # ---- experts one at a time --------------------------------------------------------------------------------------

    def stack(self, name: str) -> Tensor | Stack:
        """Experts' matrices [E, a, b], read when they are asked for; at once where transformers mixes experts."""
        places = self._places(name)
        if places is None:
            return self.read([name])[name]
        shards = Shards(self.files)  # open for as long as the stack is kept
        return Stack(partial(self._expert, shards, name, *places), self.shapes[name])

    def _expert(
        self,
        shards: Shards,
        name: str,
        keys_of: Keys,
        turned: bool,
        expert: int,
        device: torch.device | None = None,
    ) -> Tensor:
        """Read one expert's matrix [a, b] in the model's layout; a fused one may lie turned on disk."""
        get, stored = shards.slice, [self.stored[key] for key in keys_of(expert)]
        parts = [s.read(get, device) if s.experts is None else s.expert(get, expert, device) for s in stored]
        matrix = torch.cat(parts) if len(parts) > 1 else parts[0]
        if matrix.shape != self.shapes[name][1:] and turned:
            matrix = matrix.mT
        self._check_shape(name, torch.Size((self.shapes[name][0], *matrix.shape)))
        return matrix

    def _places(self, name: str) -> tuple[Keys, bool] | None:
        """Find the matrices of each expert, and if they lie turned; None where transformers does more than stack them."""
        recipe = self.recipes.get(name) or self._sibling(name)
        key, pattern = recipe[0]
        converter = None if pattern is None else self.converters[pattern]
        operations = [] if converter is None else [(type(o), getattr(o, "dim", None)) for o in converter.operations]
        turned = operations == [(core.Transpose, None)]
        if converter is None or turned:
            keys = [[key] * (self.stored[key].experts or 0)]
        elif operations in STACKING:
            keys = [[k for k, p in recipe if p == source] for source in converter.source_patterns]
        else:
            return None
        for part in keys:
            self._check_shape(name, torch.Size((len(part), *self.shapes[name][1:])))
        return (lambda expert: [part[expert] for part in keys]), turned

    @contextmanager
    def rows(self) -> Iterator[Rows]:
        """A reader of single rows of stacked experts in the model's layout; None where the files do not have them so."""
        with Shards(self.files) as shards:
            yield partial(self._rows, shards)

    def _rows(self, shards: Shards, name: str, expert: int, wanted: range) -> Tensor | None:
        """Read rows [rows, b] of one expert's matrix; where it is packed, all of it is decoded."""
        places = self._places(name) if self.recipes.get(name) else None
        if places is None:
            return None
        keys_of, turned = places
        stored = [self.stored[key] for key in keys_of(expert)]
        if turned or any(s.format != "plain" for s in stored):
            return self._expert(shards, name, keys_of, turned, expert)[list(wanted)]
        keys = [(s.keys[0], () if s.experts is None else (expert,)) for s in stored]
        pieces = [(shards.slice(key), self.headers[key].shape, index) for key, index in keys]
        return stacked_rows(pieces, tuple(self.shapes[name][1:]), wanted)


def locate(folder: Path) -> dict[str, Path]:
    """Map each tensor's name to the file that holds it, for a single file or a sharded checkpoint."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _from_index(folder, index)
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(
            f"{folder} holds no .safetensors file. ACE reads safetensors checkpoints; convert others with "
            "`model.save_pretrained(folder)`, which never needs pickle again."
        )
    files: dict[str, Path] = {}
    for shard in shards:
        with open_shard(shard) as handle:
            files |= dict.fromkeys(handle.keys(), shard)
    return files


def _from_index(folder: Path, index: Path) -> dict[str, Path]:
    """Read an index, and refuse one that leads out of its folder or names files that are not there."""
    try:
        entries: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = {file: folder / file for file in set(entries.values())}
        outside = sorted(f for f in shards if os.path.isabs(f) or os.path.normpath(f).split(os.sep)[0] == os.pardir)
        missing = sorted(file for file, path in shards.items() if not path.is_file())
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
            f"{folder} misses {len(missing)} of {len(shards)} shards: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}. Finish the download, then run the command again."
        )
    return {key: shards[file] for key, file in entries.items()}
