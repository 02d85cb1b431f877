"""A file is read from the outside in: what is wrong with it is said before anything large is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import edited, plan_of
from safetensors.torch import save_file

from ace_moe.errors import PlanError
from ace_moe.plan import Plan, file


class Closed:
    """A file whose header can be read and whose tensors cannot."""

    def __init__(self, handle: Any):
        self.handle = handle

    def __enter__(self) -> Closed:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        assert name != "get_tensor", "a tensor was read"
        return getattr(self.handle, name)


@pytest.fixture
def _no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = file.safe_open
    monkeypatch.setattr(file, "safe_open", lambda *how: Closed(opened(*how)))


@pytest.mark.usefixtures("_no_tensors")
def test_a_file_that_is_no_plan_is_not_read(tmp_path: Path) -> None:
    """A checkpoint of many gigabytes given as plan."""
    path = tmp_path / "p.safetensors"
    save_file({"weight": torch.ones(3)}, path, metadata={"format": "pt"})
    with pytest.raises(PlanError, match=r"not a plan \(no `ace` metadata\).*ace plan MODEL -o FILE"):
        Plan.load(path)


@pytest.mark.usefixtures("_no_tensors")
@pytest.mark.parametrize(
    "tensors", [{"weight": torch.ones(3)}, {"layers.0.gsp": torch.ones(9)}, {"layers.5.gsp": torch.ones(8)}]
)
def test_tensors_that_do_not_fit_are_not_read(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Names, layers and shapes are in the header."""
    path = edited(plan_of(), tmp_path / "p.safetensors", lambda meta: None, tensors)
    with pytest.raises(PlanError, match="ace plan"):
        Plan.load(path)


@pytest.mark.usefixtures("_no_tensors")
def test_a_structure_that_is_wrong_is_found_first(tmp_path: Path) -> None:
    path = edited(plan_of(), tmp_path / "p.safetensors", lambda meta: meta["fingerprint"].update(structure={}))
    with pytest.raises(PlanError, match="no layers"):
        Plan.load(path)


def test_too_much_metadata(tmp_path: Path) -> None:
    """Refused by its length alone; the file is never parsed."""
    path = tmp_path / "p.safetensors"
    path.write_bytes((5 << 20).to_bytes(8, "little") + b"{}")
    with pytest.raises(PlanError, match=r"5 MiB of metadata, more than the 4 MiB of a plan.*build it again"):
        Plan.load(path)


def test_much_metadata_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is on the whole header, at a byte."""
    path = edited(plan_of(), tmp_path / "p.safetensors", lambda meta: meta.update(model="x" * 100_000))
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert len(Plan.load(path).model) == 100_000
    monkeypatch.setattr(file, "MOST_BYTES", length)
    Plan.load(path)
    monkeypatch.setattr(file, "MOST_BYTES", length - 1)
    with pytest.raises(PlanError, match="of metadata"):
        Plan.load(path)
