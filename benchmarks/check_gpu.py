"""Correctness of the kernels on a GPU against float64, beside stock grouped_mm on the same inputs; the rule against `rule.py`.

    python benchmarks/check_gpu.py

Error = max |out − reference| over the RMS of its row. Bars: at most 1.5 × stock's; workspaces are poisoned with NaN. No slot
may be decided otherwise than by `rule.py`, but for those whose contribution is τ to within rounding.
TRITON_INTERPRET=1 checks the rule alone where there is no GPU.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ace_moe import rule
from ace_moe.kernels import decide, experts
from ace_moe.kernels.attend import attend, workspace
from ace_moe.rule import Form

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((128, 2048, 768, 8), (60, 1408, 1000, 4), (16, 96, 40, 6), (5, 64, 48, 3))
RULES = [
    decide.Rule(Form()), decide.Rule(Form(power=2), "none"), decide.Rule(Form(("a",)), "kept", 2, 0.3),
    decide.Rule(Form(("a", "b"))), decide.Rule(Form(("a", "b"), "mean", norm="max"), min_active=3),
    decide.Rule(Form(norm="rank")), decide.Rule(Form(cumulative=True)), decide.Rule(Form(power=2, cumulative=True)),
]  # fmt: skip


def experts_module(e: int, d: int, m: int, dtype: torch.dtype) -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(hidden_size=d, moe_intermediate_size=m, num_experts=e)
    config._experts_implementation = "grouped_mm"
    module = Qwen3MoeExperts(config).to("cuda", dtype)
    with torch.no_grad():
        module.gate_up_proj.normal_(0, d**-0.5)
        module.down_proj.normal_(0, m**-0.5)
    if hasattr(module, "_is_expert_parallel"):
        module._is_expert_parallel = True
    return module


def kernel_weights(module: Qwen3MoeExperts) -> experts.Weights:
    layout = experts.Layout.of(module.cpu())
    assert isinstance(layout, experts.Layout), layout
    module.cuda()
    return experts.Weights(module.gate_up_proj.data, module.down_proj.data, None, None, layout)


def routed(tokens: int, e: int, k: int) -> tuple[Tensor, Tensor]:
    """ids and gates [T, k] of uniform routing."""
    ids = torch.rand(tokens, e, device="cuda").argsort(1)[:, :k].contiguous()
    return ids, torch.rand(tokens, k, device="cuda").softmax(-1)


def reference(x: Tensor, ids: Tensor, gates: Tensor, module: Qwen3MoeExperts) -> Tensor:
    """Every kept slot in float64, expert by expert."""
    w_in, w_out = module.gate_up_proj.detach(), module.down_proj.detach()
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in range(w_in.shape[0]):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if len(token):
            gate, up = (x[token].double() @ w_in[e].double().mT).chunk(2, -1)
            out = (torch.nn.functional.silu(gate) * up) @ w_out[e].double().mT
            y.index_add_(0, token, out * gates[token, slot].double()[:, None])
    return y


def error(out: Tensor, ref: Tensor) -> float:
    rms = ref.square().mean(1, keepdim=True).sqrt().clamp(min=1e-30)
    return float(((out.double() - ref).abs() / rms).max())


def poison() -> None:
    """Freed memory that the next allocations get is full of NaN."""
    junk = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 14, 1 << 18, 1 << 22, 1 << 24)]
    del junk


def check_rule(tokens: int = 20000, e: int = 60, k: int = 6) -> tuple[int, float, int]:
    """(slots decided otherwise than by `rule.py` and not at τ, largest relative error of a gate, wrong counts)."""
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, e, generator=g).argsort(1)[:, :k].to(DEVICE)
    gates = torch.randn(tokens, k, generator=g).softmax(-1).to(DEVICE)
    tables = {name: torch.rand(e, generator=g).add(0.5).to(DEVICE) for name in ("a", "b")}
    rows = torch.randint(0, 7, (tokens,), generator=g).to(DEVICE, torch.int8)
    tau = torch.tensor([0.0, 0.0, 0.05, 0.1, 0.17, 0.4, 2.0], device=DEVICE)
    found = [_decided_otherwise(made, ids, gates, rows, tau, tables) for made in RULES]
    return sum(f[0] for f in found), max(f[1] for f in found), sum(f[2] for f in found)


def _decided_otherwise(
    made: decide.Rule, ids: Tensor, gates: Tensor, rows: Tensor, tau: Tensor, tables: dict[str, Tensor]
) -> tuple[int, float, int]:
    counts = torch.zeros(len(tau), 3, dtype=torch.int64, device=DEVICE)
    views, factor = [tables[name] for name in made.form.tables], torch.ones(3, device=DEVICE)
    new_ids, new = decide.launch_rule(ids, gates, rows, tau, factor, views, counts, -1, str(made))
    c, own = rule.contribution(made.form, gates, ids, tables), tau[rows.long()].unsqueeze(-1)
    keep, expected = rule.decide(rule.protect(c, gates, ids, made.min_active, made.min_mass), gates, own, made.gain)
    real = (rows > 0).unsqueeze(-1)
    wrong = ((new_ids >= 0) != keep) & real & ((c - own).abs() > 1e-6)
    same = real & ((new_ids >= 0) == keep).all(-1, keepdim=True)
    off = ((new - expected).abs() / expected.abs().clamp(min=1e-6) * same).max()
    kept = torch.zeros_like(counts[:, 1]).index_add_(0, rows.long(), ((new_ids >= 0) & real).sum(-1))
    return int(wrong.sum() + ((new_ids >= 0) & ~real).sum()), float(off), int((counts[:, 1] != kept).sum())


def check_restore(tokens: int, e: int = 128, k: int = 8) -> tuple[int, float, int]:
    """(slots run otherwise than by `rule.py`, largest relative error of a gate, counters and reads that differ)."""
    g = torch.Generator().manual_seed(tokens)
    logits = (2 * torch.randn(tokens, e, generator=g)).to(DEVICE)
    gates, ids = logits.softmax(-1).topk(k)
    gates = gates / gates.sum(-1, keepdim=True)
    rows = torch.randint(0, 4, (tokens,), generator=g).to(DEVICE, torch.int8)
    tau, free = torch.tensor([0.0, 0.1, 0.16, 0.13], device=DEVICE), torch.tensor([0, 0, 1, 1], device=DEVICE).char()
    counts = torch.zeros(4, 3, dtype=torch.int64, device=DEVICE)
    reads, factor = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE), torch.ones(3, device=DEVICE)
    common = (rows, tau, factor, list[Tensor](), counts, -1, str(decide.Rule(Form())))
    new_ids, new = decide.launch_rule(ids, gates, *common, [free, reads], e)
    real = (rows > 0).unsqueeze(-1)
    kept = ~(rule.protect(rule.share(gates), gates, ids) < tau[rows.long()].unsqueeze(-1)) & real
    read, asked = rule.union(ids, kept, e), rule.union(ids, real.expand_as(ids), e)
    runs = rule.restore(kept, ids, read, free[rows.long()] > 0) & real
    expected = rule.rescale(gates, runs, "power") * real
    wanted = torch.stack([real.expand_as(ids).sum(-1), kept.sum(-1), (runs & ~kept).sum(-1)], -1)
    differ = int((counts != torch.zeros_like(counts).index_add_(0, rows.long(), wanted)).sum())
    differ += int((reads.sum(0) != torch.stack([read.sum(), asked.sum()])).sum())
    route = decide.launch_route(logits, *common, k, False, True, 1.0, torch.float32, torch.int64, [free, reads])[0]
    wrong = int(((new_ids >= 0) != runs).sum() + (route.sort(-1).values != new_ids.sort(-1).values).any(-1).sum())
    return wrong, float(((new - expected).abs() / expected.abs().clamp(min=1e-6)).max()), differ


def check_fp8() -> float:
    """FP8 weights with a factor per 128 × 128 block, read as they are, against the same numbers in float64."""
    worst = 0.0
    e, d, m, k = 64, 2048, 768, 8
    module = experts_module(e, d, m, torch.bfloat16)
    layout = dataclasses.replace(kernel_weights(module).layout, block=(128, 128))
    stored, factors = [], []
    for w in (module.gate_up_proj, module.down_proj):
        blocks = w.detach().float().cuda().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
        s = blocks.abs().amax((2, 4)) / 448
        stored.append((blocks / s[:, :, None, :, None]).to(torch.float8_e4m3fn).flatten(3, 4).flatten(1, 2))
        factors.append(s.contiguous())
    wide = [
        (q.float().unflatten(2, (-1, 128)).unflatten(1, (-1, 128)) * s[:, :, None, :, None]).flatten(3, 4).flatten(1, 2)
        for q, s in zip(stored, factors, strict=True)
    ]
    module.gate_up_proj, module.down_proj = (torch.nn.Parameter(w, False) for w in wide)
    weights = experts.Weights(stored[0], stored[1], None, None, layout, factors[0], factors[1])
    for tokens in (1, 3, 8, 16, 64, 300, 2048):
        x = torch.randn(tokens, d, device="cuda").bfloat16()
        ids, gates = routed(tokens, e, k)
        ids[:, 5:] = e
        worst = max(worst, error(experts.run(x, ids, gates, weights), reference(x, ids, gates, module)))
    return worst


def check_attention() -> float:
    """Decode attention against SDPA in float64, over the largest value."""
    worst = 0.0
    for batch, positions in ((1, 1), (1, 272), (4, 1000), (16, 1040), (64, 300), (2, 20000)):
        q = torch.randn(batch, 32, 1, 128, device="cuda").bfloat16()
        k, v = (torch.randn(batch, 4, positions, 128, device="cuda").bfloat16() for _ in range(2))
        mask = (torch.arange(positions, device="cuda") <= positions // 2)[None, None, None].expand(batch, 1, 1, -1)
        mask = mask.contiguous()
        y = attend(q, k, v, mask, workspace(torch.device("cuda")), 128**-0.5)
        k, v = (t.double().repeat_interleave(8, 1) for t in (k, v))
        ref = torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, attn_mask=mask).transpose(1, 2)
        worst = max(worst, float((y.double() - ref).abs().max() / ref.abs().max()))
    return worst


def main() -> None:
    wrong, off, counts = check_rule(20000 if DEVICE == "cuda" else 40)
    print(f"rule: {wrong} slots decided otherwise than in torch, gates within {off:.1e}, {counts} rows counted wrongly")
    found = [check_restore(n) for n in ((1, 3, 4, 16, 17, 64, 256, 300, 5000) if DEVICE == "cuda" else (4, 20))]
    wrong, off, differ = sum(f[0] for f in found), max(f[1] for f in found), sum(f[2] for f in found)
    print(f"restore: {wrong} slots run otherwise than in torch, gates within {off:.1e}, {differ} counters differ")
    if DEVICE == "cpu":
        return
    print(
        f"FP8: max error over the row's RMS {check_fp8():.4f}; attention: {check_attention():.4f} of the largest value"
    )
    worst = 0.0
    for dtype, shapes in ((torch.bfloat16, SHAPES), (torch.float16, SHAPES[1:3])):
        for e, d, m, k in shapes:
            module = experts_module(e, d, m, dtype)
            weights = kernel_weights(module)
            for tokens, skip in itertools.product((1, 3, 7, 16, 33, 100, 257, 1500), (0.0, 0.6, "one")):
                ratio, same = compare(module, weights, tokens, (e, d, k), skip, dtype)
                worst, said = max(worst, ratio), "" if same else "NOT DETERMINISTIC"
                if ratio > 1.5 or said:
                    print(f"{dtype} E{e} d{d} m{m} k{k} T{tokens} skip {skip}: {ratio:.2f}", said)
    print(f"worst ratio of errors, ours over stock: {worst:.2f}")


def compare(
    module: Qwen3MoeExperts, weights: experts.Weights, tokens: int, sizes: tuple[int, int, int], skip: object,
    dtype: torch.dtype,
) -> tuple[float, bool]:  # fmt: skip
    """(our largest error over stock's, whether two runs agree to the bit), over enough draws for 64 rows."""
    e, d, k = sizes
    mine = stock = 0.0
    same = True
    for _ in range(max(1, 64 // tokens)):
        x, (ids, gates) = torch.randn(tokens, d, device="cuda").to(dtype), routed(tokens, e, k)
        gates = gates.to(dtype)
        drop = torch.rand(tokens, k, device="cuda") < (0.6 if skip == 0.6 else 0.0)
        if skip == "one":
            drop = torch.ones_like(drop)
            drop[:, k // 2] = False
        ids, gates = torch.where(drop, e, ids), torch.where(drop, 0, gates)
        poison()
        ours = experts.run(x, ids, gates, weights)
        same = same and torch.equal(ours, experts.run(x, ids, gates, weights))
        ref = reference(x, ids, gates, module)
        stock = max(stock, error(grouped_mm_experts_forward(module, x, ids, gates).detach(), ref))
        mine = max(mine, error(ours, ref))
    return mine / max(stock, 1e-9), same


if __name__ == "__main__":
    main()
