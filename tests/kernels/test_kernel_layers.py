"""Layers that decide by kernel, against the same layers in torch; whole models; which layers the kernels run at all."""

import pytest
import torch
from kernel_cases import DEVICE

import zoo
from ace_moe import ACE, build_plan
from ace_moe.checkpoint import MoEModel
from ace_moe.decider import Decider, row_of
from ace_moe.decider.rows import Same
from ace_moe.decider.state import State
from ace_moe.engines.transformers.experts import Kernels, choose_executor, kernels_for
from ace_moe.errors import IntegrationError
from ace_moe.kernels import foreign, usable
from ace_moe.kernels.activation import GELU_TANH, RELU_SQUARED, SILU, SWIGLU_OAI, recognise
from ace_moe.kernels.launch import hopper
from ace_moe.kernels.routing import TopK, reference
from ace_moe.lab.policies import LAB_POLICIES
from ace_moe.policies import POLICIES, make

EXPERTS, BUDGETS = 12, 2
WRITTEN = [name for name in sorted({**POLICIES, **LAB_POLICIES}) if make(name).kernel_rule() is not None]
FURTHER = [
    make("ace", gain="kept", fusion="min"), make("ace", fusion="mean", min_active=3, min_mass=0.5),
    make("gsp", gain="none", min_active=2), make("rcr", min_mass=0.7), make("share", squared=True, gain="none"),
    make("share", factor="factor_x"), make("modes", factor="factor_x"), make("top_p", squared=True, gain="kept"),
    make("share", gain=0.9), make("top_p", gain="gain_x", min_active=2),
]  # fmt: skip


class Mixed(Same):
    """Tokens of all phases, padding and a request's budget in turn."""

    kinds = (row_of("prefill"), 0, row_of("decode"), row_of("verify"), row_of("decode", 1))

    def __init__(self):
        super().__init__(0)

    def rows(self, tokens, device):
        return torch.tensor(self.kinds, dtype=torch.int8, device=device).repeat(tokens)[:tokens]


def make_layers(policy, guarded=False):
    """The same layer by kernel, as a plain launch and as an operator, and in torch; each with counters of its own."""
    g, state = torch.Generator().manual_seed(1), State(BUDGETS)
    state.set(torch.tensor([0.0, 0.0, 0.21, 0.09, 0.12, 0.3, 2.0]))
    single = {"modes_alpha", "factor_x", "gain_x"}
    tables = {
        n: torch.rand((), generator=g) if n in single else torch.rand(EXPERTS, generator=g) + 0.5 for n in policy.tables
    }
    ways = ({"kernels": True, "opaque": False}, {"kernels": True}, {})
    made = [Decider("0", policy, tables, state, experts=EXPERTS, device=DEVICE, guarded=guarded, **way) for way in ways]
    for layer in made:
        layer.tokens = Mixed()
    return made


def random_routing(tokens, k, kind, seed=0):
    """ids, gates [T, k] in any order; equal gates, zero gates, gates that do not sum to 1."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :k]
    gates = torch.rand(tokens, k, generator=g)
    gates = {"sum": gates / gates.sum(1, keepdim=True), "free": 3 * gates, "equal": torch.ones_like(gates)}.get(
        kind, gates
    )
    gates = torch.where(torch.rand(tokens, k, generator=g) < 0.5, 0.0, gates) if kind == "zeros" else gates
    return ids.to(DEVICE), gates.to(DEVICE)


@pytest.mark.parametrize(
    "policy", [*map(make, WRITTEN), *FURTHER], ids=lambda p: f"{p.name}-{p.gain}-{p.min_active}-{p.min_mass}"
)
@pytest.mark.parametrize(("tokens", "k", "kind"), [(0, 4, "sum"), (1, 8, "equal"), (13, 6, "free"), (24, 5, "zeros")])
def test_a_policy_decides_the_same_by_kernel(policy, tokens, k, kind):
    """Every policy that can be written down; padding apart, which stays the router's own in torch and is left out here."""
    ids, gates = random_routing(tokens, k, kind)
    plain, operator, torch_layer = make_layers(policy)
    assert plain.kernel is not None and operator.kernel is not None and torch_layer.kernel is None
    real = (Mixed().rows(tokens, ids.device) > 0)[:, None]
    expected_ids, expected = torch_layer.decide(ids, gates)
    for layer in (plain, operator):
        new_ids, new_gates = layer.decide(ids, gates)
        assert torch.equal(new_ids, torch.where(real, expected_ids, EXPERTS))
        torch.testing.assert_close(new_gates, expected * real, rtol=2e-6, atol=1e-7)
        assert torch.equal(layer.counts, torch_layer.counts)


def test_a_guarded_layer_is_the_routers_own():
    ids, gates = random_routing(5, 4, "sum")
    for layer in make_layers(make("share", factor="factor_x"), guarded=True):
        new_ids, new_gates = layer.decide(ids, gates)
        real = layer.tokens.rows(5, ids.device) > 0
        assert torch.equal(new_ids[real], ids[real]) and torch.equal(new_gates[real], gates[real])


def test_a_layer_routes_as_it_decides():
    """At the router, from logits, or behind it: the same slots, counted the same."""
    logits, kind = torch.randn(11, EXPERTS, generator=torch.Generator().manual_seed(2)).to(DEVICE), TopK(5, False, True)
    for policy in (make("ace"), make("top_p"), make("share", squared=True)):
        routing, deciding, _ = make_layers(policy)
        expected = deciding.decide(*reference(kind, logits))
        found = routing.route(logits, kind, torch.float32)
        assert torch.equal(found[0], expected[0]) and torch.equal(routing.counts, deciding.counts)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.fixture
def another_gpu(monkeypatch):
    """A GPU that is not there: AMD's, whose name is the same and whose capability looks like Hopper's, or an old one."""

    def make(hip, capability):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        for cached in (foreign, hopper):
            cached.cache_clear()
        return torch.device("cuda:0")

    yield make
    monkeypatch.undo()
    for cached in (foreign, hopper):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("hip", "capability", "why"), [("7.1", (9, 4), "NVIDIA"), (None, (7, 5), "older"), (None, (9, 0), "")]
)
def test_only_gpus_the_kernels_were_made_for_get_them(another_gpu, hip, capability, why):
    device = another_gpu(hip, capability)
    assert why in foreign(device) and usable(device) == hopper(device) == (not why)
    module = MoEModel.of(zoo.build("qwen3_moe")).sites[0].experts
    chosen = choose_executor(module, device, "auto", "here")
    assert (chosen.executor.name == "kernels") == (not why) and why in chosen.refused.get("kernels", "")


def test_kernels_say_that_they_have_no_backward_pass():
    model, ids = zoo.build("qwen3_moe").to(DEVICE).eval(), zoo.inputs(1)["input_ids"].to(DEVICE)
    with ACE(build_plan(model), dispatch="kernels")(model), pytest.raises(IntegrationError, match='dispatch="torch"'):
        model(input_ids=ids, labels=ids).loss.backward()


QUICK = [("qwen3_moe", 1), ("gemma4", 5), ("gpt_oss", 5), ("nemotron_h", 5)]
EVERY = [(name, tokens) for name in zoo.families() for tokens in (1, 5) if (name, tokens) not in QUICK]


@pytest.mark.parametrize(("name", "tokens"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in EVERY)])
@pytest.mark.long
def test_whole_models_through_the_kernels(name, tokens, tried):
    """τ = 0 and a middle τ equal the torch path, with the same counts; by slots for one token, by experts for five."""
    if DEVICE == "cpu" and tokens > 1 and (name, tokens) not in QUICK:
        pytest.skip("minutes in Triton's interpreter")
    model = zoo.build(name, num_hidden_layers=1) if name == "qwen3_moe" else zoo.build(name)
    model, plan = model.to(DEVICE), build_plan(model)
    refused = kernels_refuse(model)
    tried(name, "kernels", "decode" if tokens == 1 else "prefill", why=refused)
    if refused:
        with pytest.raises(IntegrationError), ACE(plan, policy="share", dispatch="kernels")(model):
            pass
        return
    given = {k: v.to(DEVICE) for k, v in zoo.inputs(batch=1, tokens=tokens).items()}
    for tau in (0.0, 0.25):
        outputs, reports = [], []
        for choice in ("torch", "kernels"):
            with ACE(plan, policy="share" if plan.undefined else "ace", dispatch=choice)(model) as ace:
                ace.set_threshold(tau)
                outputs.append(zoo.run(model, **given))
                reports.append(ace.report()["layers"])
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
        assert reports[0] == reports[1]


def kernels_refuse(model):
    """Why they do not run some layer of the model; nothing if they run them all."""
    every = [kernels_for(site.experts, torch.device(DEVICE), forced=True) for site in MoEModel.of(model).sites]
    return next((found for found in every if isinstance(found, str)), "")


def test_activations_are_recognised_by_behaviour():
    """And what the kernels cannot compute takes another executor, with a reason."""
    expected = {"qwen3_moe": SILU, "gemma4": GELU_TANH, "gpt_oss": SWIGLU_OAI, "nemotron_h": RELU_SQUARED}
    for name, kind in expected.items():
        module, cpu = next(m for m in zoo.build(name).modules() if hasattr(m, "has_gate")), torch.device("cpu")
        assert recognise(module).kind == kind
        assert isinstance(kernels_for(module, cpu, forced=True), Kernels | str)
        module._apply_gate, module.act_fn = torch.tanh, torch.nn.Tanh()
        assert recognise(module) is None
        assert choose_executor(module, cpu, "auto", "here").refused["kernels"] == "the layer is on cpu"
        with pytest.raises(IntegrationError, match="activation"):
            choose_executor(module, torch.device(DEVICE), "kernels", "here")
