"""Every kernel once on small shapes, for a memory checker.

compute-sanitizer --tool memcheck  python benchmarks/sanitize.py
compute-sanitizer --tool racecheck python benchmarks/sanitize.py
TRITON_INTERPRET=1 python benchmarks/sanitize.py rule     # without a GPU
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ace_moe.decider.rows import PADDING, row_of, rows_for
from ace_moe.kernels import decide, experts
from ace_moe.kernels.activation import GELU_TANH, SILU, SWIGLU_OAI, Activation
from ace_moe.kernels.attend import attend, attend_token, workspace
from ace_moe.kernels.gemv import gemv
from ace_moe.kernels.routing import TopK
from ace_moe.kernels.track import launch_track
from ace_moe.rule import GAINS, Form

EXPERTS, HIDDEN, MIDDLE, TOP_K = 12, 160, 72, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = rows_for(4)
KINDS = [PADDING, row_of("prefill"), row_of("decode"), row_of("verify"), row_of("decode", 3)]
FORMS = [
    Form(), Form(power=2), Form(("a",)), *(Form(("a", "b"), how) for how in ("max", "min", "mean")), Form(norm="max"),
    Form(("a",), norm="max"), Form(norm="rank"), Form(cumulative=True), Form(power=2, cumulative=True), Form(factor="own"),
    Form(("a", "b"), "mean", 2, "sum", True, "own"),
]  # fmt: skip


# ---- experts ---------------------------------------------------------------------------------------------------------


def weights(layout: experts.Layout) -> experts.Weights:
    w_in, w_out = torch.randn(EXPERTS, 2 * MIDDLE, HIDDEN), torch.randn(EXPERTS, HIDDEN, MIDDLE)
    if layout.transposed:
        w_in, w_out = w_in.mT.contiguous(), w_out.mT.contiguous()
    w_in, w_out = (w.to(DEVICE, torch.bfloat16) for w in (w_in, w_out))
    b_in, b_out = (torch.randn(EXPERTS, n, device=DEVICE).bfloat16() for n in (2 * MIDDLE, HIDDEN))
    made = experts.Weights(w_in, w_out, b_in, b_out, layout)
    return made if layout.interleaved else replace(made, b_in=None, b_out=None)


def fp8_weights() -> experts.Weights:
    w_in, w_out = torch.randn(EXPERTS, 256, 256), torch.randn(EXPERTS, 256, 128)
    w_in, w_out = (w.to(torch.float8_e4m3fn).to(DEVICE) for w in (w_in, w_out))
    s_in, s_out = (torch.rand(EXPERTS, w.shape[1] // 128, w.shape[2] // 128, device=DEVICE) for w in (w_in, w_out))
    layout = experts.Layout(True, False, False, Activation(SILU), (128, 128))
    return experts.Weights(w_in, w_out, None, None, layout, s_in, s_out)


def run_experts() -> None:
    """Half of the slots are skipped, under either mark."""
    layouts = [
        experts.Layout(True, False, False, Activation(SILU)),
        experts.Layout(True, False, True, Activation(GELU_TANH)),
        experts.Layout(True, True, True, Activation(SWIGLU_OAI, 1.702, 7.0)),
    ]
    for made, mark in itertools.product((*map(weights, layouts), fp8_weights()), (EXPERTS, -1)):
        for tokens in (1, 3, 11, 40, 150):
            ids = torch.rand(tokens, EXPERTS, device=DEVICE).argsort(1)[:, :TOP_K]
            ids = torch.where(torch.rand(tokens, TOP_K, device=DEVICE) < 0.5, mark, ids)
            x = torch.randn(tokens, made.shape[1], device=DEVICE).bfloat16()
            experts.run(x, ids, torch.rand(tokens, TOP_K, device=DEVICE), made)


# ---- rule ------------------------------------------------------------------------------------------------------------


def rules() -> Iterator[decide.Rule]:
    """Every form, bare and with all safeguards and a layer's factor; gains in turn; each safeguard alone once."""
    around = [(1, 0.0, False), (3, 0.3, True)]
    for number, (form, (active, mass, weighed)) in enumerate(itertools.product(FORMS, around)):
        yield decide.Rule(form, GAINS[number % 3], active, mass, weighed or form.factor is not None)
    yield from (decide.Rule(Form(), "power", 2), decide.Rule(Form(), "power", 1, 0.5))


def rows_of(tokens: int) -> Iterator[Tensor]:
    """Kinds of tokens mixed in a program, and padding alone."""
    mixed = torch.tensor(KINDS)[torch.randint(len(KINDS), (tokens,))]
    for rows in (mixed, torch.full((tokens,), row_of("decode")), torch.full((tokens,), PADDING)):
        yield rows.to(DEVICE, torch.int8)


def routed(logits: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """ids, gates [T, k]; −1 at single slots, and at padding anything, which must index no table."""
    ids = logits.argsort(1)[:, :TOP_K]
    gates = logits.gather(1, ids).softmax(-1)
    yield ids, gates
    ids = torch.where(torch.rand(ids.shape, device=DEVICE) < 0.3, -1, ids)
    yield torch.where((rows == PADDING)[:, None], 1 << 30, ids).int(), gates.bfloat16()


def run_rule(sizes: tuple[int, ...], forms: int) -> None:
    tau = torch.rand(ROWS, device=DEVICE) * 0.6
    tables = [torch.rand(EXPERTS, device=DEVICE) + 0.5 for _ in range(2)]
    for rule, tokens in itertools.product(list(rules())[-forms:], sizes):
        counts = torch.zeros(ROWS, 3, dtype=torch.int64, device=DEVICE)
        logits, views = torch.randn(tokens, EXPERTS, device=DEVICE), tables[: len(rule.form.tables)]
        factor = torch.tensor([0.5, torch.inf if tokens == 1 else 0.7, 1.1], device=DEVICE)
        free = torch.ones(ROWS, dtype=torch.int8, device=DEVICE)
        voting = [free, torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)]
        restores = rule.min_active == 2  # how slots come back does not depend on the form
        for rows, votes in itertools.product(rows_of(tokens), ([], voting) if restores else ([],)):
            common, kind = (rows, tau, factor, views, counts), TopK(TOP_K, False, True)
            for ids, gates in routed(logits, rows):
                decide.launch_rule(ids, gates, *common, EXPERTS, str(rule), votes, EXPERTS)
            types, vectors = (torch.bfloat16, torch.int32), [torch.randn(EXPERTS, device=DEVICE) for _ in range(2)]
            for both in ([], vectors):
                decide.launch_route(logits, *common, -1, str(rule), *kind, *types, votes, *both)


def run_tracking() -> None:
    counts = [torch.randint(0, 9, (ROWS, 3), device=DEVICE) for _ in range(5)]
    tau, target = torch.rand(ROWS, device=DEVICE), torch.full((ROWS,), 0.5, device=DEVICE)
    seen = torch.zeros(ROWS, 2, dtype=torch.int64, device=DEVICE)
    launch_track(counts, tau, target, seen, 40, 0.2, 1e-5, 4.0)


# ---- attention and products --------------------------------------------------------------------------------------------


def run_attention() -> None:
    for batch, positions in ((1, 40), (2, 700)):
        k, v = (torch.randn(batch, 2, positions, 64, device=DEVICE).bfloat16() for _ in range(2))
        mask = (torch.arange(positions, device=DEVICE) < positions - 3).expand(batch, 1, 1, -1)
        attend(torch.randn(batch, 8, 1, 64, device=DEVICE).bfloat16(), k, v, mask, workspace(k.device), 0.1)
        heads, scale = [torch.randn(batch, n * 64, device=DEVICE).bfloat16() for n in (8, 2, 2)], k[0, 0, 0].clone()
        place = torch.tensor([positions - 5], device=DEVICE)
        attend_token(
            *heads, k[:1, 0, :1], k[:1, 0, 1:2], k, v, place, mask, workspace(k.device), 0.1, scale, scale, 1e-6
        )


def run_products() -> None:
    for tokens, columns in ((1, 2100), (1, 40), (3, 2100), (4, 40)):
        x, weights = (
            torch.randn(tokens, columns, device=DEVICE).bfloat16(),
            [torch.randn(n, columns) for n in (40, 7, 1)],
        )
        matrices = [w.to(x) for w in weights]
        gemv(x, matrices, x[0], 1e-6, keep=True)
        gemv(x, matrices, add=torch.zeros(tokens * 48, device=DEVICE).bfloat16())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", default=["experts", "rule", "tracking", "attention", "products"],
        metavar="experts | rule | tracking | attention | products",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 7, 60, 1000], help="sizes the rule is run at")
    parser.add_argument("--rules", type=int, default=0, help="only the last so many of the rules; 0 is all")
    options = parser.parse_args()
    steps = {"experts": run_experts, "tracking": run_tracking, "attention": run_attention, "products": run_products}
    steps["rule"] = lambda: run_rule(tuple(options.tokens), options.rules)
    for part in options.parts:
        steps[part]()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"every kernel ran: {', '.join(options.parts)}")


if __name__ == "__main__":
    main()
