"""A token's phase is what the token is, however it is decoded: counts exact, and the same tokens as greedy decoding.

In fp32: how wide a pass is changes rounding, with us as without.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from transformers import PreTrainedModel, StaticCache

import zoo
from ace_moe import ACE, build_plan
from ace_moe.plan import Plan

LAYERS, K, PROMPT, NEW = 6, 8, 21, 24
DECODED = NEW - 1  # the first new token comes from the prompt's pass
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": -1, "pad_token_id": 0}  # no end, as in `batched`
Counts = dict[str, int]


@pytest.fixture(scope="module")
def model(demo_model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(demo_model).float()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    """A prompt that repeats itself, so that looking tokens up in it finds some."""
    part = torch.randint(5, 4000, (1, 7), generator=torch.Generator().manual_seed(3))
    return part.repeat(1, 3)


@pytest.fixture(scope="module")
def ace(demo_plan: Plan) -> ACE:
    return ACE(demo_plan)


def tokens(ace: ACE) -> Counts:
    """Tokens by phase: routed slots over layers and slots of each."""
    report = ace.report()
    return {p: report[p]["routed"] // (LAYERS * K) for p in ("prefill", "decode", "verify") if p in report}


def decoded(ace: ACE, model: PreTrainedModel, run: Callable[[], Any]) -> tuple[Any, Counts]:
    """With {prefill: 0, decode and verify: a lot}: what `run` returns, and its tokens by phase."""
    with ace(model):
        ace.set_threshold([0.0, 0.13])
        ace.reset()
        found = run()
        report = ace.report()
        assert report["prefill"]["realised"] == 0
        assert all(report[p]["realised"] > 0.3 for p in ("decode", "verify") if p in report and report[p]["routed"])
        return found, tokens(ace)


@pytest.fixture(scope="module")
def greedy(ace: ACE, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    found, counts = decoded(ace, model, lambda: model.generate(ids, **GREEDY))
    assert counts == {"prefill": PROMPT, "decode": DECODED}
    return found


def test_the_prompt_is_not_skipped_and_the_rest_is(
    greedy: torch.Tensor, model: PreTrainedModel, ids: torch.Tensor
) -> None:
    """Else the equalities below would prove nothing."""
    assert not torch.equal(greedy, model.generate(ids, **GREEDY))


def test_prompt_lookup(greedy: torch.Tensor, ace: ACE, model: PreTrainedModel, ids: torch.Tensor) -> None:
    options = {**GREEDY, "prompt_lookup_num_tokens": 3}
    found, counts = decoded(ace, model, lambda: model.generate(ids, **options))
    assert torch.equal(found, greedy)
    assert counts["prefill"] == PROMPT and counts["verify"] > 0
    assert counts["decode"] < DECODED, "accepted tokens need no pass of their own"


def test_assisted(greedy: torch.Tensor, ace: ACE, model: PreTrainedModel, ids: torch.Tensor) -> None:
    """A draft model of its own, here the same weights unskipped; its first pass is prompt and candidates together."""
    draft = copy.deepcopy(model)
    found, counts = decoded(ace, model, lambda: model.generate(ids, **GREEDY, assistant_model=draft))
    assert torch.equal(found, greedy)
    assert counts["prefill"] == PROMPT and counts["verify"] > 0


@pytest.mark.parametrize("constant", [1, 5])
@pytest.mark.parametrize("both", [False, True])
def test_a_draft_model_with_a_plan(
    ace: ACE, demo_plan: Plan, model: PreTrainedModel, ids: torch.Tensor, constant: int, both: bool
) -> None:
    """It is asked again and again with more of the text; what was accepted is no prompt of its own, and no draft either."""
    draft, skipping = copy.deepcopy(model), ACE(demo_plan)
    draft.generation_config.update(num_assistant_tokens=constant, num_assistant_tokens_schedule="constant")
    draft.generation_config.assistant_confidence_threshold = 0.0
    with skipping(draft):
        for _ in range(2):  # a second text has a prompt of its own
            skipping.set_threshold([0.0, 0.13])
            with ace(model) if both else nullcontext():
                model.generate(ids, assistant_model=draft, **GREEDY)
            found, realised = tokens(skipping), skipping.report()["prefill"]["realised"]
            assert found["prefill"] == PROMPT and found["decode"] >= DECODED - 1 and not found.get("verify")
            assert realised == 0


@pytest.mark.parametrize("chunk", [20, 7, 1])
def test_chunked_prompt(greedy: torch.Tensor, ace: ACE, model: PreTrainedModel, ids: torch.Tensor, chunk: int) -> None:
    """A last chunk of one token is still the prompt."""
    found, counts = decoded(ace, model, lambda: model.generate(ids, **GREEDY, prefill_chunk_size=chunk))
    assert torch.equal(found, greedy)
    assert counts == {"prefill": PROMPT, "decode": DECODED}


def test_without_a_cache(ace: ACE, model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Every pass reads all tokens again; each counts as what it is."""
    _, counts = decoded(
        ace, model, lambda: model.generate(ids, **{**GREEDY, "max_new_tokens": 4, "min_new_tokens": 4}, use_cache=False)
    )
    assert counts == {"prefill": 4 * PROMPT, "decode": 0 + 1 + 2 + 3}


@pytest.mark.parametrize("cache", ["static", "dynamic", "offloaded"])
def test_caches(greedy: torch.Tensor, ace: ACE, model: PreTrainedModel, ids: torch.Tensor, cache: str) -> None:
    if cache == "offloaded" and not torch.cuda.is_available():
        pytest.skip("offloading goes between a GPU and its host")
    found, counts = decoded(ace, model, lambda: model.generate(ids, **GREEDY, cache_implementation=cache))
    assert torch.equal(found, greedy)
    assert counts == {"prefill": PROMPT, "decode": DECODED}


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_padded_batch(greedy: torch.Tensor, ace: ACE, model: PreTrainedModel, ids: torch.Tensor, cache: str) -> None:
    """Left padding is neither prompt nor counted, also where the cache leaves no 2-D mask."""
    short = ids[:, :13]
    batch = torch.cat([ids, torch.cat([torch.zeros(1, 8, dtype=torch.long), short], 1)])
    mask = torch.ones_like(batch)
    mask[1, :8] = 0
    options = {**GREEDY, "attention_mask": mask, "cache_implementation": cache}
    found, counts = decoded(ace, model, lambda: model.generate(batch, **options))
    assert torch.equal(found[:1], greedy)
    assert counts == {"prefill": PROMPT + 13, "decode": 2 * DECODED}
    alone, _ = decoded(ace, model, lambda: model.generate(short, **GREEDY))
    assert torch.equal(found[1, PROMPT:], alone[0, 13:])


def test_one_token_prompt(ace: ACE, model: PreTrainedModel, ids: torch.Tensor) -> None:
    _, counts = decoded(ace, model, lambda: model.generate(ids[:, :1], **GREEDY))
    assert counts == {"prefill": 1, "decode": DECODED}


def test_beams_and_samples(ace: ACE, model: PreTrainedModel, ids: torch.Tensor) -> None:
    few = {"max_new_tokens": 5, "min_new_tokens": 5}
    _, counts = decoded(ace, model, lambda: model.generate(ids, num_beams=3, do_sample=False, **few))
    assert counts == {"prefill": 3 * PROMPT, "decode": 3 * 4}
    torch.manual_seed(0)
    _, counts = decoded(ace, model, lambda: model.generate(ids, num_return_sequences=2, do_sample=True, **few))
    assert counts == {"prefill": 2 * PROMPT, "decode": 2 * 4}


def test_a_conversation_goes_on(ace: ACE, model: PreTrainedModel, ids: torch.Tensor) -> None:
    """A second turn on a filled cache: what is in the cache is not counted again, the new turn is a prompt."""

    def talk() -> None:
        first = model.generate(ids, **GREEDY, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, ids[:, :5]], 1)
        model.generate(longer, **GREEDY, past_key_values=first.past_key_values)

    with ace(model):
        ace.set_threshold([0.0, 0.13])
        ace.reset()
        talk()
        assert tokens(ace) == {"prefill": PROMPT + 1 + 5, "decode": 2 * DECODED}, "the last new token was never read"


@pytest.mark.parametrize("told", [2, PROMPT], ids=["more than the cache holds", "less"])
def test_a_conversation_goes_on_with_the_new_turn_alone(
    ace: ACE, model: PreTrainedModel, ids: torch.Tensor, told: int
) -> None:
    """The mask says that there is more than these tokens, however many of them there are."""
    cache = transformers.DynamicCache(config=model.config)
    with ace(model):
        ace.set_threshold([0.0, 0.13])
        ace.reset()
        model.generate(ids[:, :told], **{**GREEDY, "max_new_tokens": 2}, past_key_values=cache)
        mask = torch.ones(1, cache.get_seq_length() + PROMPT - 1, dtype=torch.long)
        model.generate(ids[:, 1:], attention_mask=mask, past_key_values=cache, **GREEDY)
        assert tokens(ace) == {"prefill": told + PROMPT - 1, "decode": 1 + DECODED}


# ---- a model called by hand ---------------------------------------------------------------------------------------------


@torch.no_grad()
def test_by_hand(ace: ACE, model: PreTrainedModel, ids: torch.Tensor) -> None:
    """An empty cache is a prompt, one token on a filled one is generated; the model's inner stack counts likewise."""
    for stack in (model, model.model):
        with ace(model):
            ace.reset()
            cache = stack(input_ids=ids, use_cache=True).past_key_values
            assert tokens(ace) == {"prefill": PROMPT, "decode": 0}
            stack(input_ids=ids[:, :1], past_key_values=cache)
            assert tokens(ace) == {"prefill": PROMPT, "decode": 1}
            stack(input_ids=ids[:, :1])
            assert tokens(ace) == {"prefill": PROMPT + 1, "decode": 1}, "not the phase of the pass before"
            stack(inputs_embeds=model.get_input_embeddings()(ids))
            assert tokens(ace) == {"prefill": 2 * PROMPT + 1, "decode": 1}


@torch.no_grad()
def test_by_hand_on_a_static_cache(ace: ACE, model: PreTrainedModel, ids: torch.Tensor) -> None:
    cache = StaticCache(config=model.config, max_cache_len=64)
    with ace(model):
        ace.reset()
        model(input_ids=ids, past_key_values=cache)
        model(input_ids=ids[:, :1], past_key_values=cache)
        assert tokens(ace) == {"prefill": PROMPT, "decode": 1}


@torch.no_grad()
def test_by_hand_where_some_layers_cache_nothing() -> None:
    """From transformers 5.23 on such a layer calls itself initialized in an empty cache: one token is a prompt all the same."""
    model, token = zoo.build("nemotron_h"), zoo.inputs(1, 1)["input_ids"]
    with ACE(build_plan(model), policy="share")(model) as ace:
        cache = StaticCache(config=model.config, max_cache_len=16)
        for _ in range(2):
            model(input_ids=token, past_key_values=cache)
        found = ace.report()
    assert found["prefill"]["routed"] == found["decode"]["routed"] > 0


@torch.no_grad()
def test_layers_that_are_given_the_last_tokens_alone() -> None:
    """From transformers 5.23 on, behind Gemma-4's last own keys a prompt is cut to what its logits are asked for."""
    options = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    model = zoo.build("gemma4", hidden_size_per_layer_input=16, vocab_size_per_layer_input=zoo.VOCABULARY, **options)
    ids = zoo.inputs(2, 9)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    cut = version.parse(transformers.__version__) >= version.parse("5.23")
    with ACE(build_plan(model), policy="share")(model) as ace:
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False), plain)
        layers = ace.report()["layers"]
    assert [layers[n]["prefill"]["routed"] // zoo.TOP_K for n in "0123"] == [14, 14, *[2 if cut else 14] * 2]
    assert {layers[n]["decode"]["routed"] for n in "0123"} == {2 * 3 * zoo.TOP_K}


def test_masks_of_any_kind(ace: ACE, model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Right padding, bool and float masks; without a mask the report says that padding may be counted, until a reset."""
    mask = torch.ones_like(ids)
    mask[:, -4:] = 0
    with ace(model):
        for kind in (mask, mask.bool(), mask.float()):
            ace.reset()
            model(input_ids=ids, attention_mask=kind)
            assert tokens(ace)["prefill"] == PROMPT - 4
            assert ace.report()["padding"] == "not counted"
        model(input_ids=ids)
        assert ace.report()["padding"].startswith("counted")
        ace.reset()
        assert ace.report()["padding"] == "not counted"


@torch.no_grad()
def test_packed_sequences(ace: ACE, model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Sequences laid one behind the other: a sequence of one token that is not its first is generated."""
    packed = torch.cat([ids, ids[:, :5], ids[:, :1], ids[:, :3]], 1)
    positions = torch.cat([torch.arange(PROMPT), torch.arange(5), torch.tensor([30]), torch.zeros(3, dtype=torch.long)])
    ends = torch.tensor([0, PROMPT, PROMPT + 5, PROMPT + 6])
    with ace(model):
        ace.reset()
        model(input_ids=packed, position_ids=positions[None], cu_seq_lens_q=ends, use_cache=False)
        assert tokens(ace) == {"prefill": PROMPT + 5, "decode": 1}, "what is behind the last sequence is padding"


# ---- continuous batching ------------------------------------------------------------------------------------------------


def batched(model: PreTrainedModel, prompts: list[list[int]], most: int = 64) -> dict[str, list[int]]:
    """`generate_batch` with small bounds: by default its cache takes most of the machine's memory."""
    from transformers import GenerationConfig

    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        extra = {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=most)}
    except ImportError:
        settings.num_blocks, settings.max_batch_tokens = 64, most
        extra = {}
    found = model.generate_batch(inputs=prompts, generation_config=settings, **extra)
    return {" ".join(map(str, out.prompt_ids)): out.generated_tokens for out in found.values()}


@pytest.mark.parametrize("most", [64, 20])
def test_continuous_batching(
    greedy: torch.Tensor, ace: ACE, model: PreTrainedModel, ids: torch.Tensor, most: int
) -> None:
    """Decode steps packed as one row are decode; with 20 tokens a batch the prompt's last chunk has one token."""
    prompts = [ids[0].tolist(), ids[0, :13].tolist()]
    found, counts = decoded(ace, model, lambda: batched(model, prompts, most))
    assert found[" ".join(map(str, prompts[0]))] == greedy[0, PROMPT:].tolist()
    assert counts == {"prefill": PROMPT + 13, "decode": 2 * DECODED}
