"""The front door of the offline side: a MoE model whose layers can be listed, streamed and fingerprinted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ..errors import AceError, CheckpointError, brief
from ..files import expand, irregular
from ..plan import Fingerprint
from . import identity
from .layers import assemble
from .records import MoELayer, Site
from .source import CheckpointSource, ModelSource
from .structure import find_sites, hollow_twin, is_registered

WANTED_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def resolve(model: str | Path) -> Path:
    """A folder stays itself; anything else is a hub repository, downloaded without code and without pickles."""
    path = expand(model)
    if os.path.isdir(path):  # unlike Path's, these take a name the file system refuses for one that is not there
        _refuse_irregular(path)
        return path
    if os.path.exists(path) or str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
        raise CheckpointError(f"{model} is not a checkpoint folder. Give a folder with config.json, or owner/name.")
    try:
        return Path(snapshot_download(str(model), allow_patterns=WANTED_FILES))
    except Exception as error:
        raise CheckpointError(
            f"{model} is no folder here and could not be fetched from the hub ({type(error).__name__}). "
            "Check the name and the network, log in for gated models, or give the path of a downloaded folder."
        ) from error


def _refuse_irregular(folder: Path) -> None:
    """Before anything in the folder is opened: safetensors would wait on a pipe for ever, deaf to Ctrl-C."""
    found = irregular(folder)
    if found:
        raise CheckpointError(
            f"{folder} holds {found[0]}, which is neither a file nor a folder (a pipe or a device). Remove it, or download "
            "the checkpoint again."
        )


def load_config(folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a damaged configuration raises whatever its class raises
        raise CheckpointError(
            f"{folder} has no usable config.json ({brief(error)}). The folder must be a transformers "
            "checkpoint of an architecture this release knows; code from the checkpoint is not run."
        ) from error


def _twin(folder: Path, config: PretrainedConfig) -> PreTrainedModel:
    try:
        return hollow_twin(config)
    except AceError:
        raise
    except Exception as error:  # any modelling code may run here
        raise CheckpointError(
            f"{folder}/config.json describes a model that cannot be built ({type(error).__name__}: {brief(error)}). "
            "It was edited or is damaged; download it again."
        ) from error


class MoEModel:
    """The MoE layers of a checkpoint or of a loaded model."""

    def __init__(self, name: str, twin: PreTrainedModel, source: CheckpointSource | ModelSource):
        self.name, self.source, self.twin, self.architecture = name, source, twin, type(twin).__name__
        self.sites, self.not_covered = find_sites(twin)
        if any(site.top_k < 1 for site in self.sites):
            raise CheckpointError(
                f"{name} runs no expert for a token (num_experts_per_tok is 0 in config.json). It was edited or is damaged; "
                "download it again."
            )

    @classmethod
    def open(cls, model: str | Path) -> MoEModel:
        """A checkpoint: nothing but its configuration and its file headers is read yet."""
        folder = resolve(model)
        config = load_config(folder)
        _refuse_quantised(folder, config)
        twin = _twin(folder, config)
        return cls(called(folder), twin, CheckpointSource(folder, twin))

    @classmethod
    def of(cls, model: PreTrainedModel) -> MoEModel:
        """A model in memory."""
        made = cls(
            called(model.config._name_or_path or type(model).__name__),
            hollow_twin(model.config, type(model)),
            ModelSource(model),
        )
        made.sites = [_as_it_is(site, model) for site in made.sites]
        return made

    @property
    def missing_head(self) -> str | None:
        """The output head's parameter if it is not tied to the embeddings and the checkpoint has no tensor for it."""
        head = self.twin.get_output_embeddings()
        if head is None or getattr(self.twin.config.get_text_config(), "tie_word_embeddings", False):
            return None
        names = [name for name, module in self.twin.named_modules() if module is head]
        found = getattr(self.source, "recipes", None)
        return None if found is None or f"{names[0]}.weight" in found else f"{names[0]}.weight"

    def __len__(self) -> int:
        return len(self.sites)

    def layers(self) -> Iterator[MoELayer]:
        """Each MoE layer in turn. The caller drops a layer before it takes the next."""
        for site in self.sites:
            yield self.layer(site)

    def layer(self, site: Site) -> MoELayer:
        names = site.parameter_names()
        read = self.source.read(names)
        for name, short in names.items():
            if not short.startswith("experts."):  # the tables notice bad experts; a bad norm would look like no norm
                _check_finite(site, name, read[name])
        return assemble(site, {short: read[name] for name, short in names.items()})

    def structure(self) -> dict[str, Any]:
        """What a plan must agree with: layers, experts, k, d, m, router kind."""
        return {site.key: describe(site) for site in self.sites}

    def content(self) -> str:
        """sha256 over all router rows as bf16: the short name of these weights."""
        return identity.routers(self.sites, self.source).exact

    def fingerprint(self) -> Fingerprint:
        """Reads router rows and a few rows of the experts, nothing else."""
        routers = identity.routers(self.sites, self.source)
        return Fingerprint(self.structure(), routers, identity.experts(self.sites, self.source))


def called(model: str | Path) -> str:
    """A model's name: its folder's, or its repository's where the folder is a snapshot in the hub's cache."""
    path = expand(model)
    parts = path.resolve().parts if path.is_dir() else path.parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].rpartition("--")[2]
    return parts[-1] if parts else str(model)


def _as_it_is(site: Site, model: PreTrainedModel) -> Site:
    """The site with the slots a token really has: a router may have been changed since its model was built."""
    if site.router_path is None:
        return site
    built, here = vars(site.router), vars(model.get_submodule(site.router_path))
    slots = [here[n] for n, v in built.items() if type(v) is int and v == site.top_k and type(here.get(n)) is int]
    changed = [value for value in slots if value != site.top_k]
    return replace(site, top_k=changed[0]) if changed else site


def _check_finite(site: Site, name: str, tensor: Tensor) -> None:
    if not tensor.float().isfinite().all():
        raise CheckpointError(
            f"Layer {site.key}: {name} has NaN or infinite values. The checkpoint is damaged or was saved after a diverged "
            "training step; download it again."
        )


def describe(site: Site) -> dict[str, Any]:
    """One layer's part of the fingerprint."""
    experts = site.experts
    w_out = getattr(experts, "down_proj", None)
    shape = tuple(w_out.shape) if isinstance(w_out, Tensor) and is_registered(experts) else ()
    hidden, middle = shape[1:] if len(shape) == 3 else (0, 0)
    if shape and experts.is_transposed:
        hidden, middle = middle, hidden
    shapes = [] if site.router is None else [tuple(p.shape) for _, p in sorted(site.router.named_parameters())]
    return {
        "experts": site.num_experts,
        "top_k": site.top_k,
        "hidden": hidden,
        "intermediate": middle,
        "router": f"{site.router_input}:" + ",".join("x".join(map(str, s)) for s in shapes),
    }


def _refuse_quantised(folder: Path, config: PretrainedConfig) -> None:
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if found:
        method = found.get("quant_method", "unknown") if isinstance(found, dict) else found.quant_method
        raise CheckpointError(
            f"{folder} is quantised ({method}), which the table builder does not read yet. Build the plan from the "
            "unquantised checkpoint and attach it with allow_other_weights=True: routers are usually left unquantised."
        )
