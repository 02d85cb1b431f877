"""The kernels in Triton's interpreter: the rule against rule.py, the experts against dense float64, whole models."""

import os

import pytest
import torch

import zoo

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from ace_moe import ACE, build_plan
from ace_moe.dispatch import FastPath, fast_path, ops
from ace_moe.dispatch import experts as dispatch
from ace_moe.errors import IntegrationError
from ace_moe.kernels.activation import GELU_TANH, RELU_SQUARED, SILU, SWIGLU_OAI, Activation, recognise, reference
from ace_moe.policies import Routing, make

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS = 12


def random_routing(tokens, k, kind, seed=0):
    """ids, gates [T, k]: in any order; equal gates, zero gates, gates that do not sum to 1."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :k]
    gates = torch.rand(tokens, k, generator=g)
    gates = {"sum": gates / gates.sum(1, keepdim=True), "free": 3 * gates, "equal": torch.ones_like(gates)}.get(
        kind, gates
    )
    if kind == "zeros":
        gates = torch.where(torch.rand(tokens, k, generator=g) < 0.5, 0.0, gates)
    return ids.to(DEVICE), gates.to(DEVICE)


POLICIES = [
    make("ace"), make("ace", gain="kept", fusion="min"), make("ace", fusion="mean", min_active=3, min_mass=0.5),
    make("gsp", gain="none", min_active=2), make("rcr", min_mass=0.7), make("share"),
    make("share", squared=True, gain="none"),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{p.gain}-{p.min_active}-{p.min_mass}")
@pytest.mark.parametrize("kind", ["sum", "free", "equal", "zeros"])
@pytest.mark.parametrize(("tokens", "k"), [(0, 4), (1, 8), (3, 6), (70, 5)])
def test_rule_kernel_is_the_rule(policy, kind, tokens, k):
    ids, gates = random_routing(tokens, k, kind)
    tables = {
        n: (torch.rand(EXPERTS, generator=torch.Generator().manual_seed(1)) + 0.5).to(DEVICE) for n in ("gsp", "rcr")
    }
    mask = (torch.arange(tokens) % 3 != 0).to(DEVICE)
    for tau in (0.0, 1.03 / k, 2.0):
        routing = Routing(ids, gates, tables, torch.tensor(tau, device=DEVICE), token_mask=mask)
        c = policy.contribution(routing)
        tau = tau + 1e-4 if tokens and bool(((c - tau).abs() < 1e-6).any()) else tau
        routing = routing._replace(threshold=torch.tensor(tau, device=DEVICE))
        counts = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        new_ids, new_gates = FastPath(None, policy).rule(routing, counts, EXPERTS)
        expected = policy.route(routing)
        assert torch.equal(new_ids, torch.where(expected.keep, ids, EXPERTS))
        torch.testing.assert_close(new_gates, expected.gates, rtol=2e-6, atol=1e-7)
        assert tau > 0 or torch.equal(new_gates, gates)
        assert counts.tolist() == [int(mask.sum()) * k, int((expected.keep & mask[:, None]).sum())]


def make_weights(e, d, m, kind, *, transposed=False, interleaved=False, bias=False, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    gated = kind != RELU_SQUARED
    rows = 2 * m if gated else m
    w_in, w_out = torch.randn(e, rows, d, generator=g) / d**0.5, torch.randn(e, d, m, generator=g) / m**0.5
    if transposed:
        w_in, w_out = w_in.mT.contiguous(), w_out.mT.contiguous()
    biases = (torch.randn(e, rows, generator=g), torch.randn(e, d, generator=g)) if bias else (None, None)
    activation = Activation(kind, 1.702 if kind == SWIGLU_OAI else 1.0, 2.0 if kind == SWIGLU_OAI else 0.0)
    layout = dispatch.Layout(gated, interleaved, transposed, activation)
    tensors = [None if t is None else t.to(DEVICE, dtype) for t in (w_in, w_out, *biases)]
    return dispatch.Weights(*tensors, layout)


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
def test_experts_on_odd_shapes(tokens, case):
    """Widths that fill no tile, experts with all tokens or none, tokens with all slots, one or none."""
    weights = make_weights(EXPERTS, 40, 24, **case)
    ids, gates = random_routing(tokens, 3, "free")
    x = torch.randn(tokens, 40, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    skipped = torch.where(
        torch.rand(tokens, 3, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.4, EXPERTS, ids
    )
    crowded = ids.clone()
    crowded[:, 0] = 5
    crowded[:, 1:] = torch.where(crowded[:, 1:] == 5, EXPERTS, crowded[:, 1:])
    nothing = torch.full_like(ids, EXPERTS)
    for routed in (ids, skipped, crowded, nothing):
        y = dispatch.run(x, routed, gates, weights)
        torch.testing.assert_close(y.double(), dense(x, routed, gates, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_any_number_of_slots_a_token(k):
    """Also fewer than the down product takes at a time, and numbers that are no power of two."""
    weights = make_weights(EXPERTS, 40, 24, SILU)
    ids, gates = random_routing(2, k, "free")
    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for routed in (ids, torch.where(torch.arange(k, device=DEVICE) == 0, -1, ids)):
        expected = dense(x, torch.where(routed < 0, EXPERTS, routed), gates, weights)
        torch.testing.assert_close(dispatch.run(x, routed, gates, weights).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [0, 1024], ids=["two launches", "one launch"])
@pytest.mark.parametrize("tokens", [6, 200])
def test_sorted_slots_and_their_tiles(tokens, limit, monkeypatch):
    """Every kept slot once, beside its expert's others, in tiles that hold no more than they say."""
    monkeypatch.setattr(dispatch, "SORTED", limit)
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, EXPERTS + 1, (tokens, 5), generator=g).to(DEVICE)
    ids[:, 0] = 7
    order, used, expert, start, rows = (t.cpu() for t in dispatch._sorted(ids, EXPERTS, 16))
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
        (monkeypatch.setattr(dispatch, "BULK", bulk), dispatch.run(x, ids, gates, weights))[1] for bulk in (False, True)
    )
    torch.testing.assert_close(bulk, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bulk.double(), dense(x, ids, gates, weights), rtol=1e-4, atol=1e-5)


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
    layout = dispatch.Layout(True, False, False, weights.layout.activation, block)
    return dispatch.Weights(w_in, w_out, None, None, layout, s_in, s_out), dispatch.Weights(
        *widened, None, None, weights.layout
    )


@pytest.mark.parametrize("tokens", [1, 3, 12, 60])
@pytest.mark.parametrize(("d", "m"), [(256, 128), (320, 64)])
def test_fp8_weights_are_read_as_they_are(tokens, d, m):
    """Block factors, also where the last block of columns is a part."""
    stored, widened = fp8_weights(EXPERTS, d, m, (64, 64))
    ids, gates = random_routing(tokens, 3, "sum")
    ids = torch.where(torch.rand(tokens, 3, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.4, EXPERTS, ids)
    x = torch.randn(tokens, d, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    y = dispatch.run(x, ids, gates, stored)
    torch.testing.assert_close(y.double(), dense(x, ids, gates, widened), rtol=1e-4, atol=1e-5)


def test_uninitialised_memory_never_leaks(monkeypatch):
    """Every workspace starts as NaN."""
    stock = torch.empty

    def poisoned(*size, **options):
        made = stock(*size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made.fill_(-7)

    monkeypatch.setattr(torch, "empty", poisoned)
    weights = make_weights(EXPERTS, 40, 24, SILU)
    for tokens in (3, 40):
        ids, gates = random_routing(tokens, 3, "sum")
        ids = torch.where(torch.arange(3, device=DEVICE) == 1, EXPERTS, ids)
        x = torch.randn(tokens, 40, device=DEVICE)
        y = dispatch.run(x, ids, gates, weights)
        torch.testing.assert_close(y.double(), dense(x, ids, gates, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4", "gpt_oss", "nemotron_h"])
def test_whole_models_through_the_kernels(name):
    """τ = 0 and a middle τ equal the torch path, with the same counts."""
    model = zoo.build(name, num_hidden_layers=2) if name in ("qwen3_moe", "deepseek_v3") else zoo.build(name)
    model, plan = model.to(DEVICE), build_plan(model)
    given = {k: v.to(DEVICE) for k, v in zoo.inputs(batch=1, tokens=3).items()}
    for tau in (0.0, 0.25):
        outputs, reports = [], []
        for choice in ("torch", "kernels"):
            with ACE(plan, dispatch=choice)(model) as ace:
                ace.set_threshold(tau)
                outputs.append(zoo.run(model, **given))
                reports.append(ace.report()["layers"])
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
        assert reports[0] == reports[1]


def test_activations_are_recognised_by_behaviour():
    """And what the kernels cannot compute takes the torch path with a reason."""
    expected = {"qwen3_moe": SILU, "gemma4": GELU_TANH, "gpt_oss": SWIGLU_OAI, "nemotron_h": RELU_SQUARED}
    for name, kind in expected.items():
        module = next(m for m in zoo.build(name).modules() if hasattr(m, "has_gate"))
        assert recognise(module).kind == kind
        module._apply_gate, module.act_fn = torch.tanh, torch.nn.Tanh()
        assert recognise(module) is None
        assert "the layer is on cpu" in fast_path(module, make("ace"))
        with pytest.raises(IntegrationError, match="activation"):
            fast_path(module, make("ace"), "kernels")


def test_operators_compile():
    ids, gates = random_routing(3, 4, "sum")
    weights, counts = make_weights(EXPERTS, 32, 16, SILU), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    x = torch.randn(3, 32, device=DEVICE)

    def step(x, ids, gates, tau):
        ids, gates = ops.rule(ids, gates, None, None, tau, None, counts, EXPERTS, 0, 2, 1, 0.0)
        return ops.run_experts(x, ids, gates, weights.w_in, weights.w_out, None, None, True, False, False, 0, 1.0, 0.0)

    tau = torch.tensor(0.25, device=DEVICE)
    expected = step(x, ids, gates, tau)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(x, ids, gates, tau)
    assert torch.equal(found, expected)
    assert counts.tolist()[0] == 24
