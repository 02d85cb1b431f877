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
        """Experts whose numbers cannot be read, by name, before any work."""
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

    def _missing(self, name: str) -> str:
        """An adapter hides a weight under another name."""
        module = name.rpartition(".")[0]
        adapted = next((n for n in self.tensors if n.startswith(f"{module}.base_layer.")), None)
        if adapted is None:
            return f"The loaded model has no {name}. Load it with load_model(…, expand=True)."
        return (
            f"{module} has an adapter ({adapted}), which a plan of the plain model knows nothing of. Merge it "
            "(`merge_and_unload`) and build a plan of the merged model, or leave routers and experts out of target_modules."
        )

    def _stored(self, name: str) -> Stored:
        """The parameter with whatever lies beside it in its module."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(self._missing(name))
        if type(tensor) not in (Tensor, nn.Parameter):
            return self._subclass(name, tensor)
        found = understand(self.modules[name.rpartition(".")[0]], self.facts).get(name)
        if found is None or found.problem:
            raise CheckpointError(
                f"{found.problem if found else name} in the loaded model. Its tables would be of codes, not of weights: load it "
                "with load_model(…, expand=True), or build the plan from the checkpoint."
            )
        return found

    def _subclass(self, name: str, tensor: Tensor) -> Stored:
        """torchao's tensors say they are bf16 and are not; they can tell what they mean."""
        if not type(tensor).__module__.startswith("torchao"):
            raise CheckpointError(
                f"{name} is a {type(tensor).__name__}, not a plain tensor, and what its numbers mean is not known. Load the "
                "model without it, or build the plan from the checkpoint."
            )
        kind = f"torchao {type(tensor).__name__}"
        return Stored(name, kind, (name,), lambda t: t.dequantize().float(), tensor.shape[0])

    def formats(self, names: Iterable[str]) -> set[str]:
        return {self._stored(name).format for name in names}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._read(self._stored(name)) for name in names}

    def _read(self, stored: Stored) -> Tensor:
        parts = {key: self._tensor(key) for key in stored.keys}
        return stored.read(parts.__getitem__)

    def _expert(self, stored: Stored, number: int, device: torch.device | str | None = None) -> Tensor:
        parts = {key: self._tensor(key) for key in stored.keys}
        return stored.expert(parts.__getitem__, number, device)

    def stack(self, name: str) -> Tensor | Stack:
        stored = self._stored(name)
        if stored.format == "plain":
            return self._tensor(name)
        whole, device = self.tensors[name].shape, self.tensors[name].device
        first = self._expert(stored, 0)
        return Stack(partial(self._expert, stored), torch.Size((whole[0], *first.shape)), device)

    def _tensor(self, name: str) -> Tensor:
        found = self.tensors[name].detach()
        if not found.is_meta:
            return found
        from accelerate.utils import align_module_device

        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        with align_module_device(module, "cpu"):  # one module's weights, for as long as it takes
            return getattr(module, leaf).detach().clone()

    def rows(self) -> AbstractContextManager[Rows]:
        """A reader of single rows of stacked experts; None where a parameter is spread or not in memory."""
        return nullcontext(self._rows)

    def _rows(self, name: str, expert: int, wanted: range) -> Tensor | None:
        found = self.tensors.get(name)
        if found is None or found.is_meta or found.dim() != 3:
            return None
        return self._expert(self._stored(name), expert)[list(wanted)]
