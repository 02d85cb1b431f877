"""The decode loop against transformers' own, and layers that share one compilation."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from transformers import DynamicCache, masking_utils
from transformers.cache_utils import DynamicSlidingWindowLayer

import zoo
from ace_moe import ACE, build_plan
from ace_moe.checkpoint.loading import load_model
from ace_moe.decoding import Decoder, attention, static
from ace_moe.decoding.layerwise import build_of, compiled_layers, decoder_layers
from ace_moe.engines.transformers import attached_to
from ace_moe.errors import IntegrationError, OptionError
from ace_moe.lab.bench.latency import WHOLE


@pytest.fixture(scope="module")
def model(demo_folder):
    return load_model(demo_folder, device="cpu").float()  # exact enough for one likeliest token


def prompt(batch=2, length=9):
    return torch.randint(5, 1000, (batch, length), generator=torch.Generator().manual_seed(0))


def test_decoder_says_what_generate_says(model):
    ids = prompt()
    decoder = Decoder(model, 2, 40)
    for _ in range(2):  # a second prompt starts from an empty cache
        found = decoder.generate(ids, 12, stop=())
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        assert torch.equal(found, model.generate(ids, max_new_tokens=12, **options))
        ids = ids.flip(1)


GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
WINDOW = zoo.SIZES["sliding_window"]
SHARED = ["sliding_attention", "full_attention"] * 2  # the last two with keys of the first two, of the same kinds
HYBRIDS = ("gemma4", "qwen3_5_moe")  # windows beside full attention; recurrent states beside full attention


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request):
    return zoo.build(request.param)


def hybrid_prompt(batch, length, seed=0):
    return torch.randint(5, zoo.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_hybrids_have_what_they_are_here_for():
    kinds = {name: Decoder(zoo.build(name), 1, 64) for name in HYBRIDS}
    for decoder in kinds.values():
        decoder.prefill(hybrid_prompt(1, 4))
    rooms = [view.room for view in kinds["gemma4"].cache.layers]
    assert rooms == [WINDOW, WINDOW, WINDOW, 64]
    assert [type(view) for view in kinds["qwen3_5_moe"].cache.layers] == [static.Recurrent] * 3 + [static.Attended]


@pytest.mark.parametrize("batch", [1, 3])
def test_windows_and_states_decode_as_generate_does(hybrid, batch):
    """Unskipped, without a plan and with one at threshold 0; steps beyond the window; a second prompt knows nothing of the
    first, though it is shorter and the buffers are the same."""
    decoder, ace = Decoder(hybrid, batch, 64), ACE(build_plan(hybrid))
    for ids, steps in ((hybrid_prompt(batch, WINDOW + 5), 5), (hybrid_prompt(batch, 3, seed=1), WINDOW + 2)):
        expected = hybrid.generate(ids, max_new_tokens=steps, **GREEDY)
        assert torch.equal(decoder.generate(ids, steps, stop=()), expected)
        with ace(hybrid):
            assert torch.equal(decoder.generate(ids, steps, stop=()), expected)


@pytest.mark.parametrize("batch", [1, 3])
def test_windows_and_states_skip_as_generate_does(hybrid, batch):
    ids, ace, steps = hybrid_prompt(batch, WINDOW - 4), ACE(build_plan(hybrid)), 16
    dense = Decoder(hybrid, batch, 64).prefill(ids)
    with ace(hybrid):
        ace.set_threshold(0.24)
        assert not torch.allclose(Decoder(hybrid, batch, 64).prefill(ids), dense, atol=1e-3), (
            "skipping changes what it says"
        )
        ace.reset()
        expected, counts = hybrid.generate(ids, max_new_tokens=steps, **GREEDY), ace.report()
        ace.reset()
        assert torch.equal(Decoder(hybrid, batch, 64).generate(ids, steps, stop=()), expected)
        assert ace.report() == counts
    assert 0.1 < counts["decode"]["realised"] < 0.7


def test_what_steps_overwrite_is_rewound_to_the_prompt_alone(hybrid, model):
    decoder, tokens = Decoder(hybrid, 1, 64), hybrid_prompt(1, WINDOW)
    decoder.prefill(hybrid_prompt(1, 7))
    runs = []
    for _ in range(2):
        decoder.rewind(7)
        runs.append([decoder.step(tokens[:, i : i + 1]).clone() for i in range(WINDOW)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    with pytest.raises(OptionError, match="to the prompt's 7 tokens alone"):
        decoder.rewind(5)
    decoder.rewind(7)
    for view in decoder.cache.layers[:3]:
        view.fill(emptied(view), 7)
    assert not torch.allclose(decoder.step(tokens[:, :1]), runs[0][0], atol=1e-4), "what is remembered matters here"
    whole = Decoder(model, 2, 32)
    whole.prefill(prompt())
    after = [whole.step(torch.tensor([[n], [n]])).clone() for n in (7, 8, 9)]
    whole.rewind(10)
    assert torch.equal(whole.step(torch.tensor([[8], [8]])), after[1]), "full attention goes back to any token"


def emptied(view):
    """A prompt's layer of zeros, of the shapes this view takes."""
    if isinstance(view, static.Attended):
        return SimpleNamespace(keys=view.keys[:, :, :7] * 0, values=view.values[:, :, :7] * 0)
    states = {name: {0: getattr(view.state, name)[0] * 0} for name in ("conv_states", "recurrent_states")}
    return SimpleNamespace(**states)


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(2, 9),
    length=st.integers(2, 24),
    prompt=st.integers(1, 20),
    steps=st.integers(1, 20),
    data=st.data(),
)
def test_a_window_sees_what_transformers_window_sees(window, length, prompt, steps, data):
    """Whatever the window, the cache and the prompt: the same keys, in another order."""
    prompt = min(prompt, length - 1)
    cache = DynamicCache()
    cache.layers = [DynamicSlidingWindowLayer(window)]
    stream = torch.arange(1.0, prompt + steps + 1).view(1, 1, -1, 1)
    cache.update(stream[:, :, :prompt], -stream[:, :, :prompt], 0)
    ours = static.StepCache(cache, length, torch.device("cpu"))
    ours.fill(cache, prompt)
    for n in range(prompt, min(prompt + steps, length)):
        new = stream[:, :, n : n + 1]
        expected, _ = cache.update(new, -new, 0)
        ours.begin(1)
        view = ours.layers[0]
        keys, values = view.update(new, -new, 0)
        seen = ours.masks[view.room].flatten()
        assert sorted(keys.flatten()[seen].tolist()) == expected.flatten()[-window:].tolist()
        assert torch.equal(keys, -values)
        ours.written.add_(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.families())
def test_every_family_decodes_as_generate_does_or_is_refused(name):
    model, ids = zoo.build(name), hybrid_prompt(2, 9)
    if model.get_output_embeddings() is None or all(kind == "linear_attention" for kind in _kinds(model)):
        pytest.skip("it generates nothing, or transformers' generate does not run it")
    found, refusal = None, ""
    try:
        found = Decoder(model, 2, 64).generate(ids, WINDOW + 6, stop=())
    except IntegrationError as error:
        refusal = str(error)
    if found is None:
        assert "`generate`" in refusal, "with advice"
    else:
        assert torch.equal(found, model.generate(ids, max_new_tokens=WINDOW + 6, **GREEDY))


def _kinds(model):
    return getattr(model.config, "layer_types", None) or ["full_attention"]


@pytest.mark.slow
def test_hybrids_compile_by_build(hybrid):
    """No step compiles anew, however far it goes, and skipping is in the code."""
    ids, ace = hybrid_prompt(2, 9), ACE(build_plan(hybrid))
    with ace(hybrid), torch.no_grad():
        ace.set_threshold(0.24)
        decoder = Decoder(hybrid, 2, 64)
        expected = decoder.generate(ids, WINDOW + 6, stop=())
        torch._dynamo.reset()
        counters.clear()
        out, logits = [ids], decoder.prefill(ids)
        with compiled_layers(hybrid, decoder.cache):
            for _ in range(WINDOW + 6):
                out.append(logits.argmax(-1, keepdim=True))
                decoder.token.copy_(out[-1])
                logits = decoder._advance(decoder.cache)
    assert torch.equal(torch.cat(out, 1), expected)
    builds = {
        (build_of(layer), view.build())
        for layer, view in zip(decoder_layers(hybrid), decoder.cache.layers, strict=True)
    }
    angles = len(set(_kinds(hybrid))) if hybrid.config.model_type.startswith("gemma4") else 1
    assert counters["stats"]["unique_graphs"] == len(builds) + angles + 1, "the layers', the angles', the last norm's"


@pytest.mark.long
def test_layers_share_one_compilation(model):
    """Six layers with tables and counters of their own, one graph, the same logits and counts as uncompiled."""
    ace, token = ACE(build_plan(model)), torch.tensor([[7], [9]])
    with ace(model), torch.no_grad():
        ace.set_threshold(0.1)
        decoder = Decoder(model, 2, 32)
        decoder.prefill(prompt())
        ace.reset()
        expected = decoder.step(token).clone()
        kept = ace.deciders.counts()
        torch._dynamo.reset()
        counters.clear()
        decoder.rewind(9)
        ace.reset()
        with compiled_layers(model, decoder.cache):
            found = decoder._advance(decoder.cache)
        assert counters["stats"]["unique_graphs"] == 3, "the layers', the angles', the last norm's"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(kept[key], counts) for key, counts in ace.deciders.counts().items())
    assert "forward" not in vars(decoder_layers(model)[0]), "layers are as they were"


def test_different_layers_do_not_share():
    """A model whose first layer has no experts."""
    layers = decoder_layers(zoo.build("deepseek_v3"))
    assert len({build_of(layer) for layer in layers}) == 2


def test_what_does_not_fit_is_refused(model):
    decoder = Decoder(model, 2, 16)
    with pytest.raises(OptionError, match="sequences of 1 to 15 tokens"):
        decoder.prefill(prompt(batch=1))
    with pytest.raises(OptionError, match="do not fit"):
        decoder.generate(prompt(), 10)
    with pytest.raises(OptionError, match="run a prompt first"):
        decoder.step(torch.ones(2, 1, dtype=torch.long))
    for wrong in ([1, 2], torch.ones(9, dtype=torch.long), torch.ones(2, 9)):
        with pytest.raises(OptionError, match="a tensor of token ids"):
            decoder.generate(wrong, 2)
    for sizes in ((0, 16), (-1, 16), (2, 0), (1.5, 16), (2, "16")):
        with pytest.raises(OptionError, match="a whole number of at least 1"):
            Decoder(model, *sizes)
    with pytest.raises(IntegrationError, match="no memory for DynamicIndexedLayer"):
        Decoder(zoo.build("deepseek_v32"), 1, 32).prefill(zoo.inputs(1)["input_ids"])
    with pytest.raises(IntegrationError, match="share their keys"):
        Decoder(zoo.build("gemma4", num_kv_shared_layers=2, layer_types=SHARED), 1, 32)
    spread = zoo.build("qwen3_moe")
    spread.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(IntegrationError, match=r"spread over several places \(0, 1\)"):
        Decoder(spread, 1, 32)


def test_steps_and_rewinds_stay_within_the_cache(model):
    """A token too many would take the first one's place."""
    decoder, token = Decoder(model, 2, 11), torch.ones(2, 1, dtype=torch.long)
    decoder.prefill(prompt())
    for _ in range(2):
        decoder.step(token)
    with pytest.raises(OptionError, match="room for 11 tokens"):
        decoder.step(token)
    for place in (-1, 12):
        with pytest.raises(OptionError, match="none of their places"):
            decoder.rewind(place)
    decoder.rewind(10)
    decoder.step(token)
    with pytest.raises(OptionError, match="room for 11 tokens"):
        decoder.step(token)


def test_a_graph_is_recorded_again_for_another_plan(model, monkeypatch):
    """With the next prompt: one recorded with a plan would go on skipping without it, by tables that are gone."""
    decoder, ace, seen = Decoder(model, 2, 32, captured=True), ACE(build_plan(model)), []

    def record(self, cache):
        self.graph, self.logits = SimpleNamespace(replay=lambda: None), torch.zeros(2, 4)
        seen.append(attached_to(model))

    monkeypatch.setattr(Decoder, "_capture", record)

    def say():
        for _ in range(2):
            decoder.prefill(prompt())
            decoder.step(prompt()[:, :1])

    with ace(model):
        first = attached_to(model)
        say()
    say()
    with ace(model):
        say()
        assert seen == [first, None, attached_to(model)]


def test_attention_is_sdpa_but_for_one_token(model):
    """Prompts with and without padding, on a CPU: the same numbers, and the model's own implementation back afterwards."""
    ids, padded = prompt(), torch.ones(2, 9, dtype=torch.long)
    padded[0, :4] = 0
    for attention_mask in (None, padded):
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=attention_mask).logits
            model.set_attn_implementation(attention.IMPLEMENTATION)
            found = model(input_ids=ids, attention_mask=attention_mask).logits
            model.set_attn_implementation("sdpa")
        assert torch.equal(found, expected)


def test_a_whole_prompt_needs_no_mask(demo_folder, monkeypatch):
    """Not even where transformers makes one: under a compiler, or while a CUDA graph is recorded."""
    model, seen, found = load_model(demo_folder, device="cpu").float(), [], []
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)
    model.model.layers[0].register_forward_pre_hook(
        lambda *given: seen.append(given[2]["attention_mask"]), with_kwargs=True
    )
    for implementation in ("sdpa", WHOLE):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(input_ids=prompt(), use_cache=False).logits)
    assert seen[0] is not None, "the case this is about"
    assert seen[1] is None
    assert torch.allclose(*found, atol=1e-5)


def test_a_failure_leaves_the_model_as_it_was(model):
    with pytest.raises(RuntimeError, match="midway"), compiled_layers(model):
        raise RuntimeError("midway")
    assert all("forward" not in vars(module) for module in model.modules())


def test_compiled_code_finds_the_workspace():
    """One that is there already: a compiled layer that made its own would pay a launch for it."""
    pytest.importorskip("triton")
    graphs, device = [], torch.device("cpu")
    there = attention.workspace(device)
    compiled = torch.compile(
        lambda x: x + attention.workspace(x.device)[:1], backend=lambda graph, _: graphs.append(graph) or graph
    )
    assert compiled(torch.ones(1)).item() == 1
    assert not any("zeros" in str(node.target) for node in graphs[0].graph.nodes)
    assert attention.workspace(device) is there
