"""Restored slots in whole models: nothing is read that the rule would not read, and nothing is lost."""

import pytest
import torch

import zoo
from ace_moe import ACE, build_plan
from ace_moe.errors import OptionError, PolicyError
from ace_moe.policies import Share

FAMILIES = ["qwen3_moe", "olmoe", "glm4_moe", "gpt_oss", "deepseek_v3"]


@torch.no_grad()
def decode(model, ids, steps, mask=None):
    """Logits [steps, B, V] of tokens given one by one behind a prompt."""
    seen = None if mask is None else mask[:, :-steps]
    out = model(ids[:, :-steps], attention_mask=seen, use_cache=True)
    logits = []
    for i in range(ids.shape[1] - steps, ids.shape[1]):
        seen = None if mask is None else mask[:, : i + 1]
        out = model(ids[:, i : i + 1], attention_mask=seen, past_key_values=out.past_key_values)
        logits.append(out.logits[:, -1])
    return torch.stack(logits)


def tokens(model, batch, length, seed=0):
    return torch.randint(
        0, model.config.get_text_config().vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def seen(ace):
    """What every layer decided: (kept by the rule, run), by call."""
    made = []
    for layer in ace.deciders.values():
        stock = layer._restored

        def watched(routing, decision, rows, stock=stock):
            found = stock(routing, decision, rows)
            made.append((decision.keep, found.keep, routing.ids, rows))
            return found

        layer._restored = watched
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_what_runs_holds_what_the_rule_keeps_and_reads_no_more(name):
    model = zoo.build(name)
    with ACE(build_plan(model), policy="share", restore=True)(model) as ace:
        ace.set_threshold(0.4)
        made = seen(ace)
        decode(model, tokens(model, 6, 5), 3)
        report = ace.report()
    assert made and all((runs >= kept).all() for kept, runs, _, _ in made)
    for kept, runs, ids, rows in made:
        generated = (rows % 3 != 1).unsqueeze(-1)
        assert torch.equal(runs & ~generated, kept & ~generated), "prompts get nothing back"
        assert set(ids[runs].tolist()) == set(ids[kept].tolist())
    decode_ = report["decode"]
    assert decode_["restored"] > 0 and decode_["realised"] < decode_["skipped"]
    assert decode_["kept"] + decode_["restored"] == sum(
        int((r & (w % 3 != 1).unsqueeze(-1)).sum()) for _, r, _, w in made
    )
    assert report["prefill"]["restored"] == 0 and report["reads"]["generated"]["ratio"] < 1


def test_reads_are_the_plain_rules(demo_model, demo_plan):
    """Counted with and without restoring, at the same thresholds, on the same hidden states of the first layer."""
    ids, found = tokens(demo_model, 8, 6), {}
    for restore in (False, True):
        with ACE(demo_plan, policy="share", restore=restore, reads=True)(demo_model) as ace:
            ace.set_threshold(0.14)
            decode(demo_model, ids, 1)
            found[restore] = ace.deciders.reads()["0"].tolist()
    assert found[False] == found[True] and found[True][0][0] < found[True][0][1]


def test_one_sequence_is_decided_as_without(demo_model, demo_plan):
    ids, plain = tokens(demo_model, 1, 12), []
    for restore in (False, True):
        with ACE(demo_plan, policy="share", restore=restore)(demo_model) as ace:
            ace.set_threshold(0.14)
            plain.append(decode(demo_model, ids, 8))
            assert ace.report()["decode"]["restored"] == 0
    assert torch.equal(*plain)


def test_threshold_zero_is_the_untouched_model(demo_model, demo_plan):
    ids = tokens(demo_model, 4, 8)
    with ACE(demo_plan)(demo_model):
        stock = decode(demo_model, ids, 4)
    with ACE(demo_plan, restore=True)(demo_model) as ace:
        assert torch.equal(decode(demo_model, ids, 4), stock)
        assert ace.report()["decode"]["restored"] == 0


def test_order_and_padding_of_the_batch_change_nothing(demo_model, demo_plan):
    """Padding does not vote; the same sequences in another order run the same slots."""
    ids, steps = tokens(demo_model, 5, 9), 4
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, :2] = 0
    order = torch.tensor([3, 0, 4, 2, 1])
    found = []
    for batch, real in ((ids, mask), (ids[order], mask[order])):
        with ACE(demo_plan, policy="share", restore=True)(demo_model) as ace:
            ace.set_threshold(0.15)
            found.append((decode(demo_model, batch, steps, real), ace.report()))
    torch.testing.assert_close(found[0][0][:, order], found[1][0], rtol=1e-4, atol=1e-4)
    assert found[0][1]["layers"] == found[1][1]["layers"] and found[0][1]["reads"] == found[1][1]["reads"]
    with ACE(demo_plan, policy="share", restore=True)(demo_model) as ace:
        ace.set_threshold(0.15)
        more = torch.cat([ids, torch.zeros(3, ids.shape[1], dtype=ids.dtype)])
        decode(demo_model, more, steps, torch.cat([mask, torch.zeros(3, ids.shape[1], dtype=mask.dtype)]))
        assert ace.report()["reads"] == found[0][1]["reads"] and ace.report()["decode"] == found[0][1]["decode"]


def test_it_is_switched_while_it_runs(demo_model, demo_plan):
    ids = tokens(demo_model, 6, 6)
    with ACE(demo_plan, policy="share", reads=True)(demo_model) as ace:
        ace.set_threshold(0.14)
        found = []
        for on in (False, True, False):
            ace.set_restore(on)
            ace.reset()
            decode(demo_model, ids, 2)
            found.append((ace.report()["restore"], ace.report()["decode"]["restored"] > 0))
    assert found == [(False, False), (True, True), (False, False)]


def test_what_cannot_be_restored_is_refused(demo_plan):
    with pytest.raises(OptionError, match="restore=True"):
        ACE(demo_plan).set_restore(True)
    with pytest.raises(PolicyError, match="token by token"):
        ACE(demo_plan, policy="oea", restore=True)


def test_kernels_and_torch_restore_alike():
    """Through a layer, as engines call it."""
    pytest.importorskip("triton")
    from ace_moe.decider import Deciders, row_of
    from ace_moe.decider.rows import Same
    from ace_moe.plan import Plan

    g, found = torch.Generator().manual_seed(3), []
    model = zoo.build("qwen3_moe")
    plan: Plan = build_plan(model)
    key = next(iter(plan.fingerprint.structure))
    size = plan.fingerprint.structure[key]
    ids = torch.rand(20, size["experts"], generator=g).argsort(1)[:, : size["top_k"]]
    gates = torch.rand(20, size["top_k"], generator=g).softmax(-1)
    for kernels in (True, False):
        deciders = Deciders(plan, Share(), restore=True)
        layer = deciders.add(key, skipped=-1, kernels=kernels, opaque=False)
        layer.tokens = Same(row_of("decode"))
        deciders.set(torch.full((3,), 0.45))
        found.append((*layer.decide(ids, gates), layer.counts, layer.reads))
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=1e-7)
    assert int(found[0][2][:, 2].sum()) > 0
