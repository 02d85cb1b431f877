"""Tables against float64 evaluations of the paper's equations, written with d×d products and the model's own modules."""

import pytest
import torch
from torch import nn

import zoo
from ace_moe import build_plan
from ace_moe.checkpoint import MoELayer, MoEModel, records
from ace_moe.errors import StructureError
from ace_moe.tables import PAPER, TABLES, gsp, rcr, tables_of

TOLERANCE = 1e-4  # relative, the bar of this project
EPS = 1e-8
ALL = slice(None)


def random_layer(e, d, m, *, transposed=False, interleaved=False, dtype=torch.float32, seed=0):
    """A SwiGLU layer of any size in any layout, and its gate, up [E, d, m], down [E, m, d] in float64."""
    g = torch.Generator().manual_seed(seed)
    gate, up = (torch.randn(e, d, m, generator=g) * (0.5 + torch.rand(e, 1, 1, generator=g)) for _ in range(2))
    down = torch.randn(e, m, d, generator=g)
    fused = torch.stack([gate, up], -1).flatten(2) if interleaved else torch.cat([gate, up], 2)
    w_in, w_out = (fused, down) if transposed else (fused.mT, down.mT)
    w_in, w_out = w_in.contiguous().to(dtype), w_out.contiguous().to(dtype)

    def activate(z):
        a, b = (z[..., ::2], z[..., 1::2]) if interleaved else z.chunk(2, -1)
        return nn.functional.silu(a) * b

    layer = MoELayer(
        key="0", path="x", top_k=2, w_in=w_in, w_out=w_out, b_in=None, b_out=None, gated=True, transposed=transposed,
        interleaved=interleaved, activate=activate, finish=lambda y: y, norm_scale=torch.rand(d, generator=g) + 0.5,
        router_rows=torch.randn(e, d, generator=g), undefined={},
    )  # fmt: skip
    return layer, gate.to(dtype).double(), up.to(dtype).double(), down.to(dtype).double()


def paper_gsp(gamma, gate, up, down):
    """Equations 5–8 as they stand: gate, up [E, d, m], down [E, m, d]."""
    gamma_gate, gamma_up = gamma[:, None] * gate, gamma[:, None] * up
    a_up = gamma_up.norm(dim=(1, 2)) * (gamma_gate @ down).norm(dim=(1, 2))
    a_gate = gamma_gate.norm(dim=(1, 2)) * (gamma_up @ down).norm(dim=(1, 2))
    raw = (a_up * a_gate).sqrt()
    return raw / (raw.mean() + EPS)


def paper_rcr(rows, respond):
    """Equations 12–16: rows [E, d]; respond maps [E, d] to [E, d], expert e on row e."""
    centred = rows - rows.mean(0)
    q = centred / (centred.square().mean(1, keepdim=True).sqrt() + EPS)
    raw = respond(q).norm(dim=1) / (q.norm(dim=1) + EPS)
    return raw / (raw.mean() + EPS)


def table(name, layer):
    return tables_of(layer, [name])[0][name]


def assert_close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("e", "d", "m"), [(1, 3, 2), (7, 33, 17), (5, 96, 130), (3, 257, 8)])
def test_random_experts_of_odd_sizes(e, d, m, transposed, interleaved, dtype):
    layer, gate, up, down = random_layer(e, d, m, transposed=transposed, interleaved=interleaved, dtype=dtype)
    assert_close(table("gsp", layer), paper_gsp(layer.norm_scale.double(), gate, up, down))

    def respond(q):
        z = [torch.einsum("ed,edm->em", q, w) for w in (gate, up)]
        return torch.einsum("em,emd->ed", nn.functional.silu(z[0]) * z[1], down)

    if e > 1:
        assert_close(table("rcr", layer), paper_rcr(layer.router_rows.double(), respond))


def test_nearly_orthogonal_gate_and_down_need_fp64():
    """The Gram identity cancels there; the fp32 sum alone misses by percents, the guarded one does not."""
    layer, gate, up, down = random_layer(4, 64, 48, seed=3)
    q, _ = torch.linalg.qr(torch.randn(48, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    gate = gate @ (q[:, :24] @ q[:, :24].mT)
    down = (q[:, 24:] @ q[:, 24:].mT) @ down + 1e-6 * down
    up = gate.clone()
    w_in = torch.cat([gate, up], 2).mT.float().contiguous()
    layer = MoELayer(**{**vars(layer), "w_in": w_in, "w_out": down.mT.float().contiguous()})
    gate, up = (t.double().mT for t in w_in.chunk(2, 1))
    expected = paper_gsp(layer.norm_scale.double(), gate, up, layer.w_out.double().mT)
    assert_close(table("gsp", layer), expected)
    unguarded = gsp._paths(*(t.float() for t in (gate.mT, up.mT, layer.w_out)), layer.norm_scale)
    assert not unguarded[1].any(), "the case must trip the guard, or this test shows nothing"
    off = (unguarded[0] / unguarded[0].mean()).double() / expected - 1
    assert off.abs().max() > 10 * TOLERANCE


def reference_rows(name, layer_module, experts_module):
    """Router rows in the experts' input space, from the modules of a family, in float64."""
    if name != "gemma4":
        router = layer_module.mlp.gate if hasattr(layer_module.mlp, "gate") else layer_module.mlp.router
        return router.weight.detach().double()
    router, gamma = layer_module.router.double(), layer_module.pre_feedforward_layernorm_2.weight.detach().double()
    x = torch.zeros(gamma.shape[0], dtype=torch.float64, requires_grad=True)  # the experts' input γ ∘ u

    def logits(x):
        return router.proj(x / gamma * router.scale * router.scalar_root_size)

    return torch.autograd.functional.jacobian(logits, x).detach()


EFFECTIVE_SCALE = {"qwen3_5_moe": 1.0, "qwen3_next": 1.0}  # zero-centred norms: 1 + w


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe", "qwen3_next", "gemma4", "deepseek_v3"]
)
def test_real_families(name):
    """Fused, transposed and interleaved with biases and clamps, zero-centred, gelu: equations in float64."""
    model = zoo.build(name)
    plan = build_plan(model, PAPER)
    assert not plan.undefined
    site = MoEModel.of(model).sites[-1]
    layer_module = model.model.layers[int(site.key)].double()
    experts = model.get_submodule(site.path)
    norm = layer_module.pre_feedforward_layernorm_2 if name == "gemma4" else layer_module.post_attention_layernorm
    gamma = norm.weight.detach() + EFFECTIVE_SCALE.get(name, 0.0)
    gate, up, down = native_projections(name, experts)
    assert_close(plan.tables[site.key]["gsp"], paper_gsp(gamma, gate, up, down))
    model.set_experts_implementation("eager")

    def respond(q):
        e = q.shape[0]
        return experts(q, torch.arange(e)[:, None], torch.ones(e, 1, dtype=torch.float64)).detach()

    assert_close(plan.tables[site.key]["rcr"], paper_rcr(reference_rows(name, layer_module, experts), respond))


def native_projections(name, experts):
    w_in, w_out = experts.gate_up_proj.detach(), experts.down_proj.detach()
    if name == "gpt_oss":
        return w_in[..., ::2], w_in[..., 1::2], w_out
    gate, up = w_in.mT.chunk(2, -1)
    return gate, up, w_out.mT


def test_squared_relu_without_a_gate_uses_up_twice():
    model = zoo.build("nemotron_h")
    plan = build_plan(model, PAPER)
    site = MoEModel.of(model).sites[0]
    experts = model.get_submodule(site.path).double()
    up, down = experts.up_proj.detach().mT, experts.down_proj.detach().mT
    gamma = model.get_submodule(site.norm_path).weight.detach().double()
    assert_close(plan.tables[site.key]["gsp"], paper_gsp(gamma, up, up, down))


def test_what_has_no_meaning_is_said_by_name():
    plan = build_plan(zoo.build("zaya"), PAPER)
    assert "ZayaRouter" in plan.undefined["rcr"] and set(plan.tables["0"]) == {"gsp"}
    plan = build_plan(zoo.build("axk2"), PAPER)
    assert "AXK2GatedRMSNorm" in plan.undefined["gsp"] and set(plan.tables["1"]) == {"rcr"}
    layer, *_ = random_layer(2, 8, 4)
    ungated = MoELayer(**{**vars(layer), "gated": False, "activate": torch.tanh})
    with pytest.raises(StructureError, match="no gate projection"):
        gsp.part(ungated, ALL)


def test_tables_do_not_depend_on_chunking(monkeypatch):
    layer, *_ = random_layer(7, 32, 24)
    whole = {n: table(n, layer) for n in ("gsp", "rcr")}
    monkeypatch.setattr(records, "CHUNK_BYTES", 1)
    for name, values in whole.items():
        torch.testing.assert_close(table(name, layer), values, rtol=1e-6, atol=0)


def test_experts_are_read_once_for_all_tables(monkeypatch):
    """Also where a chunk is one expert: reading and decoding is what tables on a GPU cost."""
    layer, *_ = random_layer(5, 32, 24)
    monkeypatch.setattr(records, "CHUNK_BYTES", 1)
    reads = []

    def stack(matrices):
        return records.Stack(lambda e, device: reads.append(e) or matrices[e], matrices.shape)

    found, _ = tables_of(
        MoELayer(**{**vars(layer), "w_in": stack(layer.w_in), "w_out": stack(layer.w_out)}), list(TABLES)
    )
    assert sorted(reads) == sorted([*range(5)] * 2)
    for name, values in found.items():
        torch.testing.assert_close(values, table(name, layer), rtol=1e-6, atol=0)


def test_router_translation_changes_nothing():
    """RCR centres the rows: a vector added to all of them has no effect."""
    layer, *_ = random_layer(6, 32, 24)
    moved = MoELayer(**{**vars(layer), "router_rows": layer.router_rows + torch.randn(32)})
    torch.testing.assert_close(rcr.part(layer, ALL), rcr.part(moved, ALL), rtol=1e-4, atol=1e-6)
