"""The decode loop against transformers' own, and layers that share one compilation."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import masking_utils

import zoo
from ace_moe import ACE, build_plan
from ace_moe.bench.latency import WHOLE
from ace_moe.decoding import Decoder, attention
from ace_moe.decoding.layerwise import build_of, compiled_layers, decoder_layers
from ace_moe.errors import IntegrationError, OptionError
from ace_moe.loading import load_model


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


def test_layers_share_one_compilation(model):
    """Six layers with tables and counters of their own, one graph, the same logits and counts as uncompiled."""
    ace, token = ACE(build_plan(model)), torch.tensor([[7], [9]])
    with ace(model), torch.no_grad():
        ace.set_threshold(0.1)
        decoder = Decoder(model, 2, 32)
        decoder.prefill(prompt())
        ace.reset()
        expected = decoder.step(token).clone()
        kept = ace.runtime.counts()
        torch._dynamo.reset()
        counters.clear()
        decoder.rewind(9)
        ace.reset()
        with compiled_layers(model, decoder.cache):
            found = decoder._advance()
        assert counters["stats"]["unique_graphs"] == 3, "the layers', the angles', the last norm's"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(kept[key], counts) for key, counts in ace.runtime.counts().items())
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
    with pytest.raises(IntegrationError, match="without plain attention"):
        decoder_layers(zoo.build("nemotron_h"))


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
