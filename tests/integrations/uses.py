"""Ways to use a model, each tried with a plan attached: python tests/integrations/uses.py > docs/uses.md

A use is a function of a model that returns something to compare. With a plan at threshold 0 the result is the one
without a plan; with a higher threshold slots are skipped. Where that cannot be, attaching is refused by name.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ace_moe import ACE
from ace_moe.checkpoint.loading import load_model
from ace_moe.demo import MODEL
from ace_moe.errors import IntegrationError
from ace_moe.plan import Plan

SAME = "as without a plan"
NEW = 8


@dataclass(frozen=True)
class Use:
    """`prepare` makes of a plain model what the plan is attached to; `run` uses it."""

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[PreTrainedModel], Any] = lambda model: model
    result: str = SAME
    slow: bool = False


def ids() -> Tensor:
    part = torch.randint(5, 4000, (1, 6), generator=torch.Generator().manual_seed(3))
    return part.repeat(2, 3)


def generated(rows: int = 2, **options: Any) -> Callable[[Any], Tensor]:
    given = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, **options}
    return lambda model: model.generate(ids()[:rows], **given)


def assisted(model: Any) -> Tensor:
    draft = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    return model.generate(ids()[:1], assistant_model=draft, do_sample=False, max_new_tokens=NEW)


def batched(model: Any) -> list[list[int]]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    before = model.config._attn_implementation
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    sizes = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32, use_cuda_graph=False)
    try:
        made = model.generate_batch([row[5:].tolist() for row in ids()], config, sizes, progress_bar=False)
    finally:
        model.set_attn_implementation(before)
    return [request.generated_tokens for request in made.values()]


def evaluated(model: Any) -> float:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in ids()]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_eval_batch_size=2, report_to=[], disable_tqdm=True, use_cpu=True
        )
        return Trainer(model, settings, eval_dataset=rows).evaluate()["eval_loss"]


def saved(model: Any) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model(input_ids=ids())  # so that there is something to count
    return again(input_ids=ids()).logits


def copied(model: Any) -> Tensor:
    model(input_ids=ids())  # so that there is something to count
    return copy.deepcopy(model)(input_ids=ids()).logits


def compiled(model: Any) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(model, dynamic=False)(input_ids=ids(), use_cache=False).logits


def adapted(model: PreTrainedModel) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2)).eval()


def offloaded(model: PreTrainedModel) -> Any:
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device="cpu")


def mapped(model: PreTrainedModel) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, device_map="cpu").eval()


USES = (
    Use("a forward pass", lambda model: model(input_ids=ids()).logits),
    Use("greedy generation", generated()),
    Use("sampling", lambda model: (torch.manual_seed(0), generated(do_sample=True, top_k=20)(model))[1]),
    Use("beam search", generated(num_beams=3)),
    Use("several sequences of a prompt", generated(num_beams=2, num_return_sequences=2)),
    Use("assisted generation", assisted),
    Use("prompt lookup", generated(rows=1, prompt_lookup_num_tokens=2)),
    Use("static cache", generated(cache_implementation="static", disable_compile=True)),
    Use("offloaded cache", generated(cache_implementation="offloaded"), result="needs a GPU, with or without a plan"),
    Use("quantised cache", generated(cache_implementation="quantized"), result="needs optimum-quanto, with or without a plan"),
    Use("continuous batching (`generate_batch`)", batched),
    Use("`Trainer.evaluate`", evaluated),
    Use("PEFT adapters beside the experts", lambda model: model(input_ids=ids()).logits, adapted),
    Use("accelerate's offload", lambda model: model(input_ids=ids()).logits, offloaded),
    Use("`device_map`, on one device", lambda model: model(input_ids=ids()).logits, mapped),
    Use("`torch.compile` after attaching (inductor)", compiled, slow=True),
    Use("`save_pretrained`", saved),
    Use("`copy.deepcopy`: the copy has no plan", copied),
    Use("a model that is compiled already", lambda model: None, torch.compile, "refused: attach first, then compile"),
    Use("training", lambda model: model.train()(input_ids=ids()), result="refused: detach to train"),
    Use("`DataParallel`", lambda model: None, nn.DataParallel, "refused: attach to `model.module`, one per process"),
)  # fmt: skip


def plain() -> PreTrainedModel:
    return load_model(MODEL, "cpu", "float32")


def tried(use: Use, plan: Plan) -> str:
    """What happens; an assertion fails where the result with a plan at threshold 0 is another one."""
    if use.result != SAME:
        return _refused(use, plan)
    expected = use.run(use.prepare(plain()))
    model, ace = use.prepare(plain()), ACE(plan)
    with ace(model):
        found = use.run(model)
        assert _same(found, expected), f"{use.name}: another result with a plan at threshold 0"
        assert ace.realised == 0 and ace.report()["prefill"]["routed"] > 0
        ace.set_threshold(0.13)
        ace.reset()
        use.run(model)
        assert 0.1 < ace.realised < 0.9, f"{use.name}: {ace.realised:.1%} skipped"
    return SAME


def _refused(use: Use, plan: Plan) -> str:
    model = use.prepare(plain())
    if use.result.startswith("needs"):
        try:
            use.run(model)
        except Exception:  # transformers' own, without a plan
            return use.result
        return f"{SAME}, it seems"
    try:
        with ACE(plan)(model):
            use.run(model)
    except IntegrationError:
        return use.result
    return "not refused"


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.allclose(found.float(), expected.float(), rtol=1e-4, atol=1e-4)
    return found == expected if not isinstance(expected, float) else abs(found - expected) < 1e-4


def page() -> str:
    rows = [f"| {use.name} | {use.result} |" for use in USES]
    head = [
        "# Ways to use a model with a plan attached",
        "",
        "With a plan at threshold 0 the result is the one without a plan, with a higher one slots are skipped and counted; each",
        "line is a test on the demo model on a CPU (`tests/integrations/test_uses.py`, which also makes this page).",
        "",
        "| use | with a plan |",
        "|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


if __name__ == "__main__":
    print(page(), end="")
