"""Every kernel once on small shapes, for a memory checker.

compute-sanitizer --tool memcheck  python benchmarks/sanitize.py
compute-sanitizer --tool racecheck python benchmarks/sanitize.py
"""

from __future__ import annotations

import torch

from ace_moe.dispatch import FastPath
from ace_moe.dispatch import experts as dispatch
from ace_moe.kernels.activation import GELU_TANH, SILU, SWIGLU_OAI, Activation
from ace_moe.kernels.attend import attend, workspace
from ace_moe.kernels.routing import TopK
from ace_moe.policies import Routing, make

EXPERTS, HIDDEN, MIDDLE, TOP_K = 12, 160, 72, 3


def weights(layout: dispatch.Layout) -> dispatch.Weights:
    w_in, w_out = torch.randn(EXPERTS, 2 * MIDDLE, HIDDEN), torch.randn(EXPERTS, HIDDEN, MIDDLE)
    if layout.transposed:
        w_in, w_out = w_in.mT.contiguous(), w_out.mT.contiguous()
    tensors = [t.to("cuda", torch.bfloat16) for t in (w_in, w_out)]
    biases = [torch.randn(EXPERTS, n, device="cuda").bfloat16() for n in (2 * MIDDLE, HIDDEN)]
    return dispatch.Weights(*tensors, *(biases if layout.interleaved else (None, None)), layout)


def fp8_weights() -> dispatch.Weights:
    w_in, w_out = torch.randn(EXPERTS, 256, 256), torch.randn(EXPERTS, 256, 128)
    stored = [w.to(torch.float8_e4m3fn).cuda() for w in (w_in, w_out)]
    factors = [torch.rand(EXPERTS, w.shape[1] // 128, w.shape[2] // 128, device="cuda") for w in (w_in, w_out)]
    layout = dispatch.Layout(True, False, False, Activation(SILU), (128, 128))
    return dispatch.Weights(*stored, None, None, layout, *factors)


def run_experts() -> None:
    layouts = [
        dispatch.Layout(True, False, False, Activation(SILU)),
        dispatch.Layout(True, False, True, Activation(GELU_TANH)),
        dispatch.Layout(True, True, True, Activation(SWIGLU_OAI, 1.702, 7.0)),
    ]
    for made in (*map(weights, layouts), fp8_weights()):
        for tokens in (1, 3, 11, 40, 150):
            ids = torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :TOP_K]
            ids = torch.where(torch.rand(tokens, TOP_K, device="cuda") < 0.5, EXPERTS, ids)
            x = torch.randn(tokens, made.shape[1], device="cuda").bfloat16()
            dispatch.run(x, ids, torch.rand(tokens, TOP_K, device="cuda"), made)


def run_rule_and_attention() -> None:
    tables = {n: torch.rand(EXPERTS, device="cuda") for n in ("gsp", "rcr")}
    threshold, counts = torch.tensor(0.3, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    fast = FastPath(None, make("ace", min_active=2, min_mass=0.3))
    fast.top_k = TopK(TOP_K, False, True)
    for tokens in (1, 70):
        logits = torch.randn(tokens, EXPERTS, device="cuda")
        ids = logits.argsort(1)[:, :TOP_K]
        fast.rule(Routing(ids, logits.gather(1, ids).softmax(-1), tables, threshold), counts, EXPERTS)
        fast.route(logits, tables, threshold, None, counts)
    for batch, positions in ((1, 40), (2, 700)):
        k, v = (torch.randn(batch, 2, positions, 64, device="cuda").bfloat16() for _ in range(2))
        mask = (torch.arange(positions, device="cuda") < positions - 3).expand(batch, 1, 1, -1)
        attend(torch.randn(batch, 8, 1, 64, device="cuda").bfloat16(), k, v, mask, workspace(k.device), 0.1)


if __name__ == "__main__":
    run_experts()
    run_rule_and_attention()
    torch.cuda.synchronize()
    print("every kernel ran")
