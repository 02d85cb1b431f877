"""The kernels as torch operators: a compiler sees one node each, with the right shapes and the counters it changes."""

import pytest
import torch
from kernel_cases import DEVICE, text
from plain_rule import FORMS, Setting
from torch._subclasses import FakeTensorMode

from ace_moe.kernels import decide, gemv, ops
from ace_moe.kernels.routing import TopK

EXPERTS, K, TOKENS = 12, 4, 3
RULE, KIND = text(FORMS["two tables max"], Setting()), TopK(K, False, True)


@pytest.fixture(params=[False, True], ids=["", "restores"])
def given(request):
    """What both operators take, on the device."""
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(1)[:, :K].contiguous()
    parts = {
        "ids": ids, "gates": torch.rand(TOKENS, K, generator=g).softmax(-1), "rows": torch.tensor([1, 0, 2]).char(),
        "tau": torch.tensor([0.0, 0.25, 0.4]), "factor": torch.ones(2), "logits": torch.randn(TOKENS, EXPERTS, generator=g),
    }  # fmt: skip
    made = {name: tensor.to(DEVICE) for name, tensor in parts.items()}
    made["tables"] = [torch.rand(EXPERTS, generator=g).add(0.5).to(DEVICE) for _ in range(2)]
    made["counts"] = torch.zeros(3, 3, dtype=torch.int64, device=DEVICE)
    free, reads = torch.tensor([0, 0, 1]).char(), torch.zeros(2, 2, dtype=torch.int64)
    made["voting"] = [free.to(DEVICE), reads.to(DEVICE)] if request.param else []
    return made


def arguments(given, operator):
    names = ("rows", "tau", "factor", "tables", "counts")
    common = (*(given[name] for name in names), EXPERTS, RULE)
    if operator is decide.rule:
        return given["ids"], given["gates"], *common, given["voting"], EXPERTS
    return given["logits"], *common, *KIND, torch.bfloat16, torch.int32, given["voting"]


@pytest.mark.parametrize("operator", [decide.rule, decide.route], ids=["rule", "route"])
def test_a_compiled_step_decides_and_counts_the_same(given, operator):
    """fullgraph: no break; counts are a buffer that each call adds to."""

    def step():
        ids, gates = operator(*arguments(given, operator))
        return ids + 0, gates * 2

    expected = step()
    once = given["counts"].clone()
    assert once[:, 0].tolist() == [0, K, K] and 0 < once[1:, 1].sum() < 2 * K
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for calls in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(compiled(), expected, strict=True))
        assert torch.equal(given["counts"], calls * once)


def test_what_a_compiler_is_told_of_results_is_what_they_are():
    """Of tokens that lie column by column too: results do not."""
    x = torch.randn(16, 3).t().to(DEVICE)
    ids, gates = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE), torch.ones(3, 1, device=DEVICE)
    w_in, w_out = torch.randn(2, 16, 16, device=DEVICE), torch.randn(2, 16, 8, device=DEVICE)
    calls = (
        lambda x, ids, gates, *w: [ops.run_experts(x, ids, gates, *w, None, None, True, False, False, 0, 1.0, 0.0)],
        lambda x, ids, gates, *w: gemv.gemv(x, [w[0][0]], keep=True, scale=w[0][0, 0]),
    )
    for call in calls:
        real = call(x, ids, gates, w_in, w_out)
        with FakeTensorMode() as mode:
            told = call(*(mode.from_tensor(t) for t in (x, ids, gates, w_in, w_out)))
        assert [(t.shape, t.stride(), t.dtype) for t in told] == [(t.shape, t.stride(), t.dtype) for t in real]


@pytest.mark.long
def test_a_layer_compiles_as_a_whole(given):
    """Rule and experts; the number of tokens may change."""
    g = torch.Generator().manual_seed(1)
    w_in, w_out = (torch.randn(EXPERTS, 8, n, generator=g).to(DEVICE) for n in (8, 4))

    def step(x, ids, gates, rows):
        ids, gates = decide.rule(*arguments(given | {"ids": ids, "gates": gates, "rows": rows}, decide.rule))
        return ops.run_experts(x, ids, gates, w_in, w_out, None, None, True, False, False, 0, 1.0, 0.0)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    x = torch.randn(TOKENS, 8, generator=g).to(DEVICE)
    for tokens in (TOKENS, 2):
        inputs = [t[:tokens] for t in (x, given["ids"], given["gates"], given["rows"])]
        assert torch.equal(compiled(*inputs), step(*inputs))


@pytest.mark.parametrize("operator", [decide.rule, decide.route], ids=["rule", "route"])
def test_what_a_compiler_is_told_is_true(given, operator):
    """Shapes, strides, types and mutation, also for slots that do not lie side by side."""
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, arguments(given, operator), test_utils=checks)
    across = {name: given[name].t().contiguous().t() for name in ("ids", "gates", "logits")}
    torch.library.opcheck(operator, arguments(given | across, operator), test_utils=checks)
