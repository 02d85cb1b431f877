"""The front door of the offline side: a MoE model whose layers can be listed, streamed and fingerprinted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ..errors import CheckpointError, brief
from ..files import expand, irregular
from ..plan import Fingerprint
from . import identity
from .identity import Source
from .layers import assemble
from .memory import ModelSource
from .records import MoELayer
from .source import CheckpointSource
from .structure import Site, find_sites, hollow_twin

NO_WEIGHTS = 2.0  # codes of four bits have an rms of about 3, of eight bits 30 and more; trained experts 0.01 to 0.5
LOADED = {  # what transformers makes right numbers of, by quant_method
    "fp8": {"fp8 by block", "fp8 per tensor", "mxfp4"},
    "mxfp8": {"mxfp8"},
    "mxfp4": {"mxfp4"},
    "compressed-tensors": {"fp8 per channel", "fp8 per tensor", "int packed", "mxfp4"},
}
WANTED_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def resolve(model: str | Path) -> Path:
    """Find a model's folder; anything else is a hub repository, downloaded without code and without pickles."""
    if not isinstance(model, (str, os.PathLike)):
        raise CheckpointError(
            f"A model is a folder with config.json, owner/name or a loaded transformers model, not {type(model).__name__}."
        )
    path = expand(model)
    if os.path.isdir(path):  # unlike Path's, these take a name the file system refuses for one that is not there
        if odd := irregular(path):  # safetensors would wait on a pipe for ever, deaf to Ctrl-C
            raise CheckpointError(
                f"{path} holds {odd[0]}, which is neither a file nor a folder (a pipe or a device). Remove it, or download "
                "the checkpoint again."
            )
        return path
    if os.path.exists(path) or str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
        embedded = " The embedded model is `ace_moe.demo.MODEL` in Python." if str(model) == "demo" else ""
        raise CheckpointError(
            f"{model} is not a checkpoint folder. Give a folder with config.json, or owner/name.{embedded}"
        )
    try:
        return Path(snapshot_download(str(model), allow_patterns=WANTED_FILES))
    except Exception as error:
        offline = "HF_HUB_OFFLINE is set: nothing is fetched while it is. " if constants.HF_HUB_OFFLINE else ""
        raise CheckpointError(
            f"{model} is not a folder here and could not be fetched from the hub ({type(error).__name__}). {offline}"
            "Check the name and the network, log in for gated models, or give the path of a downloaded folder."
        ) from error


def load_config(folder: Path) -> PretrainedConfig:
    """The configuration of a checkpoint folder."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a damaged configuration raises whatever its class raises
        raise CheckpointError(
            f"{folder} has no usable config.json ({brief(error)}). The folder must be a transformers "
            "checkpoint of an architecture this release knows; code from the checkpoint is not run."
        ) from error


class MoEModel:
    """The MoE layers of a checkpoint or of a loaded model."""

    def __init__(self, name: str, twin: PreTrainedModel, source: Source):
        self.name, self.source, self.twin, self.architecture = name, source, twin, type(twin).__name__
        self.sites, self.not_covered = find_sites(twin)
        if any(site.top_k < 1 for site in self.sites):
            raise CheckpointError(
                f"{name} runs no expert for a token (num_experts_per_tok is 0 in config.json). It was edited or is damaged; "
                "download it again."
            )
        source.check(self.sites)

    @classmethod
    def open(cls, model: str | Path | PreTrainedModel | MoEModel) -> MoEModel:
        """Open a checkpoint, reading no more than its configuration and file headers, or a model in memory."""
        if isinstance(model, MoEModel):
            return model
        if isinstance(model, PreTrainedModel):
            return cls.of(model)
        folder = resolve(model)
        twin = hollow_twin(load_config(folder))
        return cls(called(folder), twin, CheckpointSource(folder, twin))

    @classmethod
    def of(cls, model: PreTrainedModel) -> MoEModel:
        """Open a model in memory."""
        name = called(model.config._name_or_path or type(model).__name__)
        moe = cls(name, hollow_twin(model.config, type(model)), ModelSource(model))
        moe.sites = [_with_slots_of(model, site) for site in moe.sites]
        return moe

    @property
    def missing_head(self) -> str | None:
        """The output head's parameter if it is not tied to the embeddings and the checkpoint has no tensor for it."""
        head = self.twin.get_output_embeddings()
        if head is None or getattr(self.twin.config.get_text_config(), "tie_word_embeddings", False):
            return None
        names = [name for name, module in self.twin.named_modules() if module is head]
        on_disk = getattr(self.source, "recipes", None)
        return None if on_disk is None or f"{names[0]}.weight" in on_disk else f"{names[0]}.weight"

    def layers(self) -> Iterator[MoELayer]:
        """Each MoE layer in turn. The caller drops a layer before it takes the next."""
        for site in self.sites:
            yield self.layer(site)

    def layer(self, site: Site) -> MoELayer:
        """Read norm and router; experts are read when they are asked for, a few at a time."""
        names, stacks = site.parameter_names(), site.stacks()
        read = self.source.read([name for name in names if name not in stacks])
        for name, tensor in read.items():  # the tables notice bad experts; a bad norm would look like no norm
            if not names[name].startswith("experts.") and not tensor.float().isfinite().all():
                raise CheckpointError(
                    f"Layer {site.key}: {name} has NaN or infinite values. The checkpoint is damaged or was saved after a "
                    "diverged training step; download it again."
                )
        experts = {name: self.source.stack(name) for name in stacks}
        return assemble(site, {names[name]: tensor for name, tensor in {**read, **experts}.items()})

    def structure(self) -> dict[str, Any]:
        """Describe what a plan must agree with: layers, experts, k, d, m, router kind."""
        return {site.key: site.describe() for site in self.sites}

    def content(self) -> str:
        """Hash all router rows as bf16: the short name of these weights."""
        return identity.routers(self.sites, self.source).exact

    def fingerprint(self) -> Fingerprint:
        """Read router rows and a few rows of the experts, nothing else."""
        routers = identity.routers(self.sites, self.source)
        return Fingerprint(self.structure(), routers, identity.experts(self.sites, self.source))

    def formats(self) -> dict[str, list[str]]:
        """Name the formats that the experts of each layer are stored in."""
        return {site.key: sorted(self.source.formats(site.stacks())) for site in self.sites}


def how_it_runs(moe: MoEModel) -> str:
    """Say what transformers makes of a checkpoint's experts."""
    formats = {name for names in moe.formats().values() for name in names}
    if formats == {"plain"}:
        return "as it is"
    method = moe.source.facts.method if isinstance(moe.source, CheckpointSource) else ""
    if formats <= LOADED.get(method, set()) | {"plain"}:
        return (
            "transformers loads this format, and what it loads is checked; --expand decodes it without other libraries"
        )
    return "with --expand, which decodes it into an unquantised model; transformers loads it not at all or with other numbers"


def check_sizes(fingerprint: Fingerprint) -> None:
    """Refuse experts whose numbers are not weights: some loaders drop the factors of a format without a word."""
    if large := outliers(fingerprint):
        key, size = next(iter(large.items()))
        raise CheckpointError(
            f"Layer {key}: its experts have an rms of {size:.3g}, where weights have less than 1. Factors of a quantised "
            "format were lost when the model was loaded. Load it with load_model(…, expand=True), or build the plan from the "
            "checkpoint."
        )


def outliers(fingerprint: Fingerprint) -> dict[str, float]:
    """The largest rms of sampled experts, by layer, where no weights are that large."""
    sizes = {key: max(sample.rms) for key, sample in fingerprint.experts.items()}
    return {key: size for key, size in sizes.items() if size > NO_WEIGHTS}


def called(model: str | Path) -> str:
    """A model's name: its folder's, or its repository's where the folder is a snapshot in the hub's cache."""
    path = expand(model)
    parts = path.resolve().parts if path.is_dir() else path.parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].rpartition("--")[2]
    return parts[-1] if parts else str(model)


def _with_slots_of(model: PreTrainedModel, site: Site) -> Site:
    """The site with the slots a token has in this model: its router may have been changed since it was built."""
    if site.router_path is None:
        return site
    built, here = vars(site.router), vars(model.get_submodule(site.router_path))
    slots = [here[n] for n, v in built.items() if type(v) is int and v == site.top_k and type(here.get(n)) is int]
    changed = [value for value in slots if value != site.top_k]
    return replace(site, top_k=changed[0]) if changed else site
