"""What tests of the rule's kernels share: where they run, launches among poison, and the same by `rule.py`."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from plain_rule import Setting

from ace_moe import rule
from ace_moe.kernels import decide
from ace_moe.rule import Form

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # relative, of a rescaled gate
FRAME = 32  # elements of poison on either side: a multiple of what Triton calls aligned


def framed(tensor: Tensor) -> Tensor:
    """The same numbers on the device, in the middle of poison: NaN, or −1 and the like for whole numbers."""
    poison = torch.nan if tensor.is_floating_point() else 77
    flat = torch.full((tensor.numel() + 2 * FRAME,), poison, dtype=tensor.dtype, device=DEVICE)
    flat[FRAME : FRAME + tensor.numel()] = tensor.flatten().to(DEVICE)
    return flat[FRAME : FRAME + tensor.numel()].view(tensor.shape)


def frame_is_whole(tensor: Tensor) -> bool:
    """Whether nothing was written around a framed tensor of whole numbers."""
    around = tensor.as_strided((FRAME,), (1,), 0), tensor.as_strided((FRAME,), (1,), FRAME + tensor.numel())
    return all(bool((part == 77).all()) for part in around)


def text(form: Form, setting: Setting) -> str:
    weighed = form.factor is not None or setting.common is not None
    gain = setting.gain if setting.gain in rule.GAINS else rule.CONSTANT
    return str(decide.Rule(form, gain, setting.min_active, setting.min_mass, weighed))


def factor(form: Form, setting: Setting, tables: dict[str, Tensor]) -> Tensor:
    """[3], as a layer has it."""
    own = float(tables[form.factor]) if form.factor else 1.0
    gain = 1.0 if setting.gain in rule.GAINS else float(setting.gain)
    return framed(torch.tensor([own, 1.0 if setting.common is None else setting.common, gain]))


def launch_rule(
    form: Form, setting: Setting, ids: Tensor, gates: Tensor, rows: Tensor, tau: Tensor, tables: dict[str, Tensor], mark: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """ids, gates [T, k] and counts [R, 3] by the kernel, every input among poison."""
    views, counts = [framed(tables[name]) for name in form.tables], framed(torch.zeros(len(tau), 3, dtype=torch.int64))
    given = (framed(ids), framed(gates), framed(rows), framed(tau), factor(form, setting, tables), views, counts, mark)
    new_ids, new_gates = decide.launch_rule(*given, text(form, setting))
    assert frame_is_whole(counts)
    return new_ids.cpu(), new_gates.cpu(), counts.cpu()


def by_rule(
    form: Form, setting: Setting, ids: Tensor, gates: Tensor, tau: Tensor, tables: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """keep, gates [T, k] by `rule.py`; τ [T]."""
    c = rule.contribution(form, gates, ids, tables)
    c = rule.protect(c, gates, ids, setting.min_active, setting.min_mass)
    if setting.common is not None:
        c = rule.weigh(c, torch.tensor(setting.common))
    return rule.decide(c, gates, tau.unsqueeze(-1), setting.gain)


def counted(rows: Tensor, slots: Tensor, keep: Tensor, length: int) -> Tensor:
    """counts [R, 3] of slots that are there and slots kept, [T, k] each."""
    each = torch.stack([slots.sum(-1), (keep & slots).sum(-1), torch.zeros(len(rows), dtype=torch.int64)], -1)
    counts = torch.zeros(length, 3, dtype=torch.int64).index_add_(0, rows.long(), each)
    counts[0] = 0
    return counts
