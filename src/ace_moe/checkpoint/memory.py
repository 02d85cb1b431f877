"""Parameters of a model in memory, or parked elsewhere by accelerate."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import CheckpointError
from .formats import Facts, Header, Stored, config_of, understand
from .records import Stack
from .shards import Rows
from .structure import Site

DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int8: "I8",
    torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
# called as experts are, but their tensors are blocks of other libraries' kernels
FOREIGN = {"GgufExperts": "GgufConfig(dequantize=True)", "Mxfp4GptOssExperts": "Mxfp4Config(dequantize=True)"}


class ModelSource:
    """Plain parameters as they are; packed ones go through the formats of checkpoints, or are refused."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.tensors = model, {**dict(model.named_buffers()), **dict(model.named_parameters())}
        self.modules: dict[str, dict[str, Header]] = {}
        for name, tensor in self.tensors.items():
            header = Header(DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            self.modules.setdefault(name.rpartition(".")[0], {})[name] = header
        self.facts = Facts(config_of(model.config))

    def check(self, sites: Iterable[Site]) -> None:
        """Refuse experts whose numbers cannot be read, by name, before any work."""
        for site in sites:
            module = self.model.get_submodule(site.path)
            name = type(module).__name__
            if name in FOREIGN or isinstance(module, nn.ModuleList):
                how = f"quantization_config={FOREIGN[name]}" if name in FOREIGN else "unfused experts joined"
                raise CheckpointError(
                    f"{site.path} is {name}: its weights belong to another library's kernels, which neither tables nor skipping "
                    f"reach. Load the model with {how}, or with load_model(…, expand=True)."
                )
            for name in self.tensors.keys() & site.parameter_names().keys():  # adapters hide some under other names
                self._stored(name)

    def _stored(self, name: str) -> Stored:
        """The parameter with whatever lies beside it in its module."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise self._missing(name)
        kind = type(tensor)
        if kind in (Tensor, nn.Parameter):
            stored = understand(self.modules[name.rpartition(".")[0]], self.facts).get(name)
            if stored is None or stored.problem:
                raise CheckpointError(
                    f"{stored.problem if stored else name} in the loaded model. Its tables would be of codes, not of weights: "
                    "load it with load_model(…, expand=True), or build the plan from the checkpoint."
                )
            return stored
        if not kind.__module__.startswith("torchao"):
            raise CheckpointError(
                f"{name} is a {kind.__name__}, not a plain tensor, and what its numbers mean is not known. Load the "
                "model without it, or build the plan from the checkpoint."
            )
        # torchao's tensors say they are bf16 and are not; they can tell what they mean
        return Stored(name, f"torchao {kind.__name__}", (name,), lambda t: t.dequantize().float(), tensor.shape[0])

    def _missing(self, name: str) -> CheckpointError:
        """Say that a parameter is not there, or hidden by an adapter."""
        module = name.rpartition(".")[0]
        adapted = next((n for n in self.tensors if n.startswith(f"{module}.base_layer.")), None)
        if adapted is None:
            return CheckpointError(f"The loaded model has no {name}. Load it with load_model(…, expand=True).")
        return CheckpointError(
            f"{module} has an adapter ({adapted}), which a plan of the plain model knows nothing of. Merge it "
            "(`merge_and_unload`) and build a plan of the merged model, or leave routers and experts out of target_modules."
        )

    def formats(self, names: Iterable[str]) -> set[str]:
        """Name the formats that parameters are stored in."""
        return {self._stored(name).format for name in names}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named parameters, whole: as they are where they are plain, else in fp32."""
        stored = {name: self._stored(name) for name in names}
        return {name: tensor.read(self._parts(tensor).__getitem__) for name, tensor in stored.items()}

    def stack(self, name: str) -> Tensor | Stack:
        """Experts' matrices [E, a, b]; packed ones are decoded when they are asked for."""
        stored, tensor = self._stored(name), self.tensors[name]
        if stored.format == "plain":
            return self._tensor(name)
        first = self._expert(stored, 0)
        return Stack(partial(self._expert, stored), torch.Size((tensor.shape[0], *first.shape)), tensor.device)

    def _expert(self, stored: Stored, number: int, device: torch.device | None = None) -> Tensor:
        """Read one expert's matrix [a, b]."""
        return stored.expert(self._parts(stored).__getitem__, number, device)

    def _parts(self, stored: Stored) -> dict[str, Tensor]:
        """The tensors that make up a parameter, each fetched once."""
        return {key: self._tensor(key) for key in stored.keys}

    def _tensor(self, name: str) -> Tensor:
        """A parameter, or a copy of one that accelerate has parked elsewhere."""
        tensor = self.tensors[name].detach()
        if not tensor.is_meta:
            return tensor
        from accelerate.utils import align_module_device

        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        with align_module_device(module, "cpu"):  # one module's weights, for as long as it takes
            return getattr(module, leaf).detach().clone()

    def rows(self) -> AbstractContextManager[Rows]:
        """A reader of single rows of stacked experts; None where a parameter is spread or not in memory."""
        return nullcontext(self._rows)

    def _rows(self, name: str, expert: int, wanted: range) -> Tensor | None:
        tensor = self.tensors.get(name)
        if tensor is None or tensor.is_meta or tensor.dim() != 3:
            return None
        return self._expert(self._stored(name), expert)[list(wanted)]
