"""The experts' kernels in Triton's interpreter against dense float64."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import DEVICE

from ace_moe.kernels import experts
from ace_moe.kernels.activation import GELU_TANH, RELU_SQUARED, SILU, SWIGLU_OAI, Activation, reference
from ace_moe.kernels.layout import Near

EXPERTS = 12


def random_routing(tokens, k, kind, seed=0):
    """ids, gates [T, k] in any order; gates that sum to 1 or not."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :k]
    gates = torch.rand(tokens, k, generator=g)
    gates = gates / gates.sum(1, keepdim=True) if kind == "sum" else 3 * gates
    return ids.to(DEVICE), gates.to(DEVICE)


def make_weights(e, d, m, kind, *, transposed=False, interleaved=False, bias=False, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    gated = kind != RELU_SQUARED
    rows = 2 * m if gated else m
    w_in, w_out = torch.randn(e, rows, d, generator=g) / d**0.5, torch.randn(e, d, m, generator=g) / m**0.5
    if transposed:
        w_in, w_out = w_in.mT.contiguous(), w_out.mT.contiguous()
    biases = (torch.randn(e, rows, generator=g), torch.randn(e, d, generator=g)) if bias else (None, None)
    activation = Activation(kind, 1.702 if kind == SWIGLU_OAI else 1.0, 2.0 if kind == SWIGLU_OAI else 0.0)
    layout = experts.Layout(gated, interleaved, transposed, activation)
    tensors = [None if t is None else t.to(DEVICE, dtype) for t in (w_in, w_out, *biases)]
    return experts.Weights(*tensors, layout)


def dense(x, ids, gates, weights):
    """Slot by slot in float64."""
    e, layout = weights.shape[0], weights.layout
    w_in, w_out = (w.double().mT if layout.transposed else w.double() for w in (weights.w_in, weights.w_out))
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t, j in (ids < e).nonzero().tolist():
        expert = int(ids[t, j])
        z = w_in[expert] @ x[t].double()
        z = z if weights.b_in is None else z + weights.b_in[expert].double()
        gate, up = (z, None) if not layout.gated else (z[::2], z[1::2]) if layout.interleaved else z.chunk(2)
        out = w_out[expert] @ reference(layout.activation, gate, up)
        out = out if weights.b_out is None else out + weights.b_out[expert].double()
        y[t] += gates[t, j].double() * out
    return y


@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
@pytest.mark.parametrize(
    "case",
    [
        {"kind": SILU}, {"kind": GELU_TANH}, {"kind": RELU_SQUARED}, {"kind": SILU, "transposed": True},
        {"kind": SWIGLU_OAI, "transposed": True, "interleaved": True, "bias": True},
    ],
    ids=["silu", "gelu", "relu2", "transposed", "gpt-oss"],
)  # fmt: skip
@pytest.mark.long
def test_experts_on_odd_shapes(tokens, case):
    """Widths that fill no tile, experts with all tokens or none, tokens with all slots, one or none."""
    d, m = (20, 12) if tokens == 1 else (40, 24)  # a program is a slot's two columns there, and each takes its time
    weights = make_weights(EXPERTS, d, m, **case)
    ids, gates = random_routing(tokens, 3, "free")
    x = torch.randn(tokens, d, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    skipped = torch.where(
        torch.rand(tokens, 3, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.4, EXPERTS, ids
    )
    crowded = ids.clone()
    crowded[:, 0] = 5
    crowded[:, 1:] = torch.where(crowded[:, 1:] == 5, EXPERTS, crowded[:, 1:])
    nothing = torch.full_like(ids, EXPERTS)
    for routed in (ids, skipped, crowded, nothing):
        y = experts.run(x, routed, gates, weights)
        torch.testing.assert_close(y.double(), dense(x, routed, gates, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beside", [False, True])
def test_more_tiles_than_a_grid_takes(beside, monkeypatch):
    """A prompt of hundreds of thousands of tokens goes in parts."""
    weights, (ids, gates) = make_weights(EXPERTS, 20, 12, SILU), random_routing(25, 3, "sum")
    x, add = (torch.randn(25, 20, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (2, 3))
    given = x, ids, gates, weights, add if beside else None
    whole = experts.run(*given)
    monkeypatch.setattr(experts, "GRID", EXPERTS + 4)
    torch.testing.assert_close(experts.run(*given), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("types", [(torch.float32, torch.float16), (torch.float16, torch.float32)])
def test_tokens_of_another_type_than_the_weights(tokens, types):
    """As autocast leaves them: transformers' own product casts them, and its result back."""
    weights, (ids, gates) = make_weights(EXPERTS, 20, 12, SILU, dtype=types[1]), random_routing(tokens, 3, "sum")
    x, add = (torch.randn(tokens, 20, generator=torch.Generator().manual_seed(n)).to(DEVICE, types[0]) for n in (2, 3))
    found = experts.run(x, ids, gates, weights, add)
    assert found.dtype == types[0]
    wide = replace(weights, w_in=weights.w_in.float(), w_out=weights.w_out.float())
    torch.testing.assert_close(found.double(), dense(x, ids, gates, wide) + add.double(), rtol=1e-2, atol=1e-2)


def test_a_layer_that_is_copied_whole_keeps_its_products_apart():
    """Of experts without a gate that are as wide as the model both have one shape."""
    weights = make_weights(EXPERTS, 16, 16, RELU_SQUARED)
    staged = experts._staged(weights, torch.device(DEVICE))
    assert torch.equal(staged.w_in, weights.w_in) and torch.equal(staged.w_out, weights.w_out)
    again = experts._staged(replace(weights, w_in=weights.w_out, w_out=weights.w_in), torch.device(DEVICE))
    assert again.w_in.data_ptr() == staged.w_in.data_ptr(), "one place for all layers"


@pytest.mark.parametrize("k", [1, 2, 5])
def test_any_number_of_slots_a_token(k):
    """Also fewer than the down product takes at a time, and numbers that are no power of two."""
    weights = make_weights(EXPERTS, 20, 12, SILU)
    ids, gates = random_routing(2, k, "free")
    x = torch.randn(2, 20, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for routed in (ids, torch.where(torch.arange(k, device=DEVICE) == 0, -1, ids)):
        expected = dense(x, torch.where(routed < 0, EXPERTS, routed), gates, weights)
        torch.testing.assert_close(experts.run(x, routed, gates, weights).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [0, 1024], ids=["two launches", "one launch"])
@pytest.mark.parametrize("tokens", [6, 200])
def test_sorted_slots_and_their_tiles(tokens, limit, monkeypatch):
    """Every kept slot once, beside its expert's others, in tiles that hold no more than they say."""
    monkeypatch.setattr(experts, "SORTED", limit)
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, EXPERTS + 1, (tokens, 5), generator=g).to(DEVICE)
    ids[:, 0] = 7
    order, used, expert, start, rows = (t.cpu() for t in experts._sorted(ids, EXPERTS, 16))
    flat, seen = ids.flatten().cpu(), []
    for i in range(int(used[0])):
        slots = order[start[i] : start[i] + rows[i]].tolist()
        assert 0 < len(slots) <= 16 and set(flat[slots].tolist()) == {int(expert[i])}
        seen += slots
    assert sorted(seen) == [i for i, e in enumerate(flat.tolist()) if 0 <= e < EXPERTS]


@pytest.mark.parametrize("kind", [SILU, RELU_SQUARED])
def test_the_copy_engine_changes_nothing(kind, monkeypatch):
    """Weights through a descriptor: rows past an expert's last are its neighbour's and must not show."""
    weights = make_weights(EXPERTS, 40, 24, kind)
    ids, gates = random_routing(90, 3, "sum")
    ids = torch.where(torch.rand(90, 3, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.4, EXPERTS, ids)
    x = torch.randn(90, 40, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    plain, bulk = (
        (monkeypatch.setattr(experts, "BULK", bulk), experts.run(x, ids, gates, weights))[1] for bulk in (False, True)
    )
    torch.testing.assert_close(bulk, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bulk.double(), dense(x, ids, gates, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 9])
def test_copies_beside_the_gpu_are_what_is_read(tokens):
    """An expert with a copy is not read where all of them are, one without never from the copies: what is not read is spoilt."""
    weights, near = make_weights(EXPERTS, 20, 12, SILU), torch.tensor([3, 0, 7], device=DEVICE)
    ids, gates = random_routing(tokens, 3, "free")
    x = torch.randn(tokens, 20, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    row = torch.full((EXPERTS,), -1, dtype=torch.int32, device=DEVICE)
    row[near] = torch.arange(3, dtype=torch.int32, device=DEVICE)
    copies = Near(
        row, *(torch.cat([w[near], torch.full_like(w[:1], torch.nan)]) for w in (weights.w_in, weights.w_out))
    )
    far = [w.index_fill(0, near, torch.nan) for w in (weights.w_in, weights.w_out)]
    found = experts.run(x, ids, gates, replace(weights, w_in=far[0], w_out=far[1], near=copies))
    assert torch.equal(found, experts.run(x, ids, gates, weights))


def fp8_weights(e, d, m, block):
    """Weights as FP8 with factors, and the same numbers widened."""
    weights = make_weights(e, d, m, SILU)
    quantised, widened = [], []
    for w in (weights.w_in, weights.w_out):
        rows, columns = -(-w.shape[1] // block[0]), -(-w.shape[2] // block[1])
        s = torch.rand(e, rows, columns, generator=torch.Generator().manual_seed(4)) + 0.5
        every = s.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)[:, : w.shape[1], : w.shape[2]]
        q = (w.cpu() / every).to(torch.float8_e4m3fn)
        quantised += [(q.to(DEVICE), s.to(DEVICE))]
        widened += [(q.float() * every).to(DEVICE)]
    (w_in, s_in), (w_out, s_out) = quantised
    layout = experts.Layout(True, False, False, weights.layout.activation, block)
    return experts.Weights(w_in, w_out, None, None, layout, s_in, s_out), experts.Weights(
        *widened, None, None, weights.layout
    )


@pytest.mark.parametrize(("tokens", "d", "m"), [(1, 160, 64), (3, 128, 64), (12, 160, 128), (60, 320, 64)])
@pytest.mark.parametrize("rows", [64, 4])
@pytest.mark.long
def test_fp8_weights_are_read_as_they_are(tokens, d, m, rows, tried):
    """Block factors, also where the last block of columns is a part, and where a block has fewer rows than a tile."""
    tried("qwen3_moe", "kernels", "decode" if tokens < 5 else "prefill", stored="fp8 block")
    stored, widened = fp8_weights(EXPERTS, d, m, (rows, 64))
    ids, gates = random_routing(tokens, 3, "sum")
    ids = torch.where(torch.rand(tokens, 3, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.4, EXPERTS, ids)
    x = torch.randn(tokens, d, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    y = experts.run(x, ids, gates, stored)
    torch.testing.assert_close(y.double(), dense(x, ids, gates, widened), rtol=1e-4, atol=1e-5)


def test_uninitialised_memory_never_leaks(monkeypatch):
    """Every workspace starts as NaN."""
    stock = torch.empty

    def poisoned(*size, **options):
        made = stock(*size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made.fill_(-7)

    monkeypatch.setattr(torch, "empty", poisoned)
    weights = make_weights(EXPERTS, 20, 12, SILU)
    for tokens in (3, 40):
        ids, gates = random_routing(tokens, 3, "sum")
        ids = torch.where(torch.arange(3, device=DEVICE) == 1, EXPERTS, ids)
        x = torch.randn(tokens, 20, device=DEVICE)
        y = experts.run(x, ids, gates, weights)
        torch.testing.assert_close(y.double(), dense(x, ids, gates, weights), rtol=1e-4, atol=1e-5)
