"""Compile every kernel for a GPU that need not be here. Run as a program: a test that reads TRITON_INTERPRET cannot.

python tests/kernels/compile_kernels.py 90
python tests/kernels/compile_kernels.py 90 builds    # compiles nothing: which sizes need builds of their own
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ace_moe.kernels import attend, decide, experts, gemv, launch
from ace_moe.kernels.activation import SILU, SWIGLU_OAI, Activation
from ace_moe.rule import Form

TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32",
    torch.int8: "i8", torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
ROOMY = (90, 100)  # of later GPUs others have less shared memory
PLAIN = experts.Layout(True, False, False, Activation(SILU))
RULES = [
    decide.Rule(Form()), decide.Rule(Form(("gsp", "rcr"))), decide.Rule(Form(power=2), "kept", 2, 0.3),
    decide.Rule(Form(("gsp", "rcr"), "mean", norm="max"), "none", weighed=True), decide.Rule(Form(norm="rank")),
    decide.Rule(Form(("gsp",), cumulative=True), min_active=3, min_mass=0.5), decide.Rule(Form(), "constant"),
]  # fmt: skip
compiled: dict[str, int] = {}
builds: set[tuple] = set()


def type_of(value: object) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def aligned(self: JITFunction, bound: inspect.BoundArguments) -> dict[tuple[int], list[list[object]]]:
    """What a launch tells the compiler: without it nothing is fetched ahead, and shared memory is hardly used."""
    found: dict[tuple[int], list[list[object]]] = {}
    for place, parameter in enumerate(self.params):
        value, told = bound.arguments[parameter.name], not parameter.is_constexpr and not parameter.do_not_specialize
        whole = isinstance(value, torch.Tensor) and not parameter.do_not_specialize_on_alignment
        if told and (whole or (isinstance(value, int) and value % 16 == 0)):
            found[place,] = [["tt.divisibility", 16]]
    return found


def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
    """In place of a launch."""
    names = {p.name for p in self.params}
    bound = inspect.signature(self.fn).bind(*args, **{k: v for k, v in options.items() if k in names})
    bound.apply_defaults()
    ones = {p.name for p in self.params if type(bound.arguments[p.name]) is int and bound.arguments[p.name] == 1}
    constants = {p.name for p in self.params if p.is_constexpr or (p.name in ones and not p.do_not_specialize)}
    signature = {n: "constexpr" if n in constants else type_of(v) for n, v in bound.arguments.items()}
    source = ASTSource(
        self, signature, {n: v for n, v in bound.arguments.items() if n in constants}, aligned(self, bound)
    )
    own = {k: v for k, v in options.items() if k not in names}
    made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=own)
    room = launch.ROOM if int(sys.argv[1]) in ROOMY else 101376
    assert made.metadata.shared <= room, (self.fn.__name__, made.metadata.shared)
    compiled[self.fn.__name__] = compiled.get(self.fn.__name__, 0) + 1


def build(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
    """In place of a launch: what Triton would look a compiled kernel up by."""
    names = {p.name for p in self.params}
    given = inspect.signature(self.fn).bind(*args, **{k: v for k, v in options.items() if k in names})
    given.apply_defaults()
    key = [self.fn.__name__, *sorted((k, v) for k, v in options.items() if k not in names)]
    for parameter in self.params:
        value = given.arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            key.append((value.dtype, parameter.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0))
        elif isinstance(value, TensorDescriptor):
            key.append(tuple(value.block_shape))
        elif isinstance(value, int) and not parameter.is_constexpr:
            key.append(parameter.do_not_specialize or (value == 1, value % 16 == 0))
        else:
            key.append(value)
    builds.add(tuple(key))


def common(tokens: int, rule: decide.Rule, start: int = 0) -> tuple:
    """What both launches take; rows from anywhere in an engine's buffer, as a rank with its part of a batch sees them."""
    rows, tables = torch.zeros(start + tokens, dtype=torch.int8)[start:], [torch.ones(128) for _ in rule.form.tables]
    return rows, torch.zeros(49), torch.ones(3), tables, torch.zeros(49, 3, dtype=torch.int64), 128, str(rule)


def voting(restores: bool) -> list[torch.Tensor]:
    return [torch.zeros(49, dtype=torch.int8), torch.zeros(2, 2, dtype=torch.int64)] if restores else []


def decide_slots(*given: int | decide.Rule, restores: bool = False) -> None:
    """For 128 experts of which 8 are routed."""
    ids, gates = torch.zeros(given[0], 8, dtype=torch.int64), torch.zeros(given[0], 8, dtype=torch.bfloat16)
    decide.launch_rule(ids, gates, *common(*given), voting(restores), 128)


def route_tokens(
    *given: int | decide.Rule, restores: bool = False, times: float = 1.0, **vectors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.zeros(given[0], 128, dtype=torch.bfloat16)
    kind = (8, False, True, times, torch.bfloat16, torch.int64)
    return decide.launch_route(logits, *common(*given), *kind, voting(restores), **vectors)


def builds_of(sizes: Iterable[int]) -> set[tuple]:
    """For one layer of Qwen3-30B-A3B's kind, routing and rule included."""
    builds.clear()
    w_in, w_out = torch.empty(128, 32, 16, dtype=torch.bfloat16), torch.empty(128, 16, 16, dtype=torch.bfloat16)
    weights = experts.Weights(w_in, w_out, None, None, PLAIN)
    for tokens in sizes:
        decide_slots(tokens, RULES[0], tokens % 7)
        decide_slots(tokens, RULES[0], tokens % 7, restores=True)
        route_tokens(tokens, RULES[0], tokens % 7, restores=True)
        ids, gates = route_tokens(tokens, RULES[0], tokens % 7)
        experts.run(torch.zeros(tokens, 16, dtype=torch.bfloat16), ids, gates, weights)
    return set(builds)


def all_experts() -> None:
    e, d, m, k = 128, 2048, 768, 8
    oai = experts.Layout(True, True, True, Activation(SWIGLU_OAI, 1.702, 7.0))
    blocks = experts.Layout(True, False, False, Activation(SILU), (128, 128))

    def make_tensor(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)  # never touched, so it takes no memory

    small = torch.empty(e, 512, 512, dtype=torch.bfloat16), torch.empty(e, 512, 256, dtype=torch.bfloat16)
    f8 = torch.float8_e4m3fn
    layers = [
        experts.Weights(make_tensor(e, 2 * m, d), make_tensor(e, d, m), None, None, PLAIN),
        experts.Weights(*small, None, None, PLAIN),  # contiguous, so that the copy engine may read them
        experts.Weights(make_tensor(e, d, 2 * m), make_tensor(e, m, d), make_tensor(e, 2 * m), make_tensor(e, d), oai),
        experts.Weights(
            make_tensor(e, 2 * m, d, dtype=f8), make_tensor(e, d, m, dtype=f8), None, None, blocks,
            make_tensor(e, 12, 16, dtype=torch.float32), make_tensor(e, 16, 6, dtype=torch.float32),
        ),
    ]  # fmt: skip
    for weights in layers if int(sys.argv[1]) >= 89 else layers[:-1]:  # older chips have no FP8
        for tokens in (1, 4, 8, 64, 1024, 4096) if weights is layers[0] else (1, 16, 1024):
            x = torch.zeros(tokens, weights.shape[1], dtype=torch.bfloat16)
            given = x, torch.zeros(tokens, k, dtype=torch.int64), torch.zeros(tokens, k, dtype=x.dtype), weights
            experts.run(*given)
            if weights is layers[0] and tokens in (1, 64):
                experts.run(*given, x)


def the_rest() -> None:
    for tokens in (1, 300):
        for rule in RULES:
            decide_slots(tokens, rule)
        for rule in (RULES[1], *RULES[-2:]):
            route_tokens(tokens, rule)
        route_tokens(tokens, RULES[0], times=2.5, bias=torch.zeros(128), scale=torch.ones(128, dtype=torch.bfloat16))
    decide_slots(16, RULES[-1], restores=True)
    for tokens in (1, 16, 64, 300):
        decide_slots(tokens, RULES[0], restores=True)
        route_tokens(tokens, RULES[0], restores=True)
    for columns, rows in ((2048, (4096, 512, 512)), (4096, (2048,)), (2816, (96, 7))):
        matrices = [torch.zeros(n, columns).bfloat16() for n in rows]
        for tokens in (1, 3):
            x = torch.zeros(tokens, columns, dtype=torch.bfloat16)
            gemv.gemv(x, matrices, x[0], 1e-6, True, True, True)
            gemv.gemv(x, matrices, add=torch.zeros(tokens * sum(rows), dtype=x.dtype))
    for batch, positions in ((1, 272), (1, 8192), (16, 1040)):
        k = torch.zeros(batch, 4, positions, 128, dtype=torch.bfloat16)
        mask = torch.ones(batch, 1, 1, positions, dtype=torch.bool)
        arrived = attend.workspace(torch.device("cpu"))
        attend.attend(torch.zeros(batch, 32, 1, 128, dtype=k.dtype), k, k, mask, arrived, 0.1)
        heads = [torch.zeros(batch, n * 128, dtype=k.dtype) for n in (32, k.shape[1], k.shape[1])]
        turn, place = torch.zeros(1, 1, 128, dtype=k.dtype), torch.zeros(1, dtype=torch.int64)
        attend.attend_token(
            *heads, turn, turn, k.clone(), k.clone(), place, mask, arrived, 0.1, turn[0, 0], turn[0, 0], 1e-6
        )


if __name__ == "__main__":
    only_builds = sys.argv[2:] == ["builds"]
    JITFunction.run = build if only_builds else compile_only
    hopper = int(sys.argv[1]) >= 90
    experts.hopper = launch.hopper = lambda device: hopper
    experts.roomy = lambda device: int(sys.argv[1]) in ROOMY
    if only_builds:  # what an engine runs before it serves: the sizes of its CUDA graphs, and its largest step
        before = builds_of([1, 2, 4, *range(8, 513, 8), 8192])
        later = builds_of(
            [*range(1, 1100), *range(1100, 8193, 7)]
        )  # past every change of tiles, 7 meets all alignments
        print(len(before), "builds,", len(later - before), "met later")
    else:
        all_experts()
        the_rest()
        print(compiled)
