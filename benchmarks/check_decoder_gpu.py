"""Decode steps in one CUDA graph against `generate`, token for token, for models with windows and recurrent states.

    python benchmarks/check_decoder_gpu.py [-o result.json]

Random models of three families, tiny and of medium size, in fp32 and bf16, batch 1 and 3. `generate` of the uncompiled model
says the tokens, unskipped without a plan, skipped with the same plan and threshold; the decoder is given them one by one and
must find each the likeliest, on two prompts one after the other in the same graph, beyond the window: all of them in fp32,
95 % in bf16, where rounding decides ties and now and then an expert. `gap` is the largest distance to the likeliest, in
standard deviations of the logits. `forgotten` counts tokens that come out otherwise when the memory is emptied after the
prompt: a fault there would be seen. Exit status 1 if a bar is missed. Without a GPU it runs without graphs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ace_moe import ACE, build_plan
from ace_moe.bench import shapes
from ace_moe.decoding import Decoder
from ace_moe.decoding.static import Attended, Recurrent

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
TINY = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 16, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
MEDIUM = {
    "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_experts": 64, "vocab_size": 8192,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {},
    "qwen3.6-35b-a3b": {"shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "gemma-4-26b-a4b": {"num_global_key_value_heads": 1, "sliding_window": 24},
}
SIZES = {"tiny": (TINY, 6, 32), "medium": (MEDIUM, 12, 256)}  # changes, layers, width of Gemma's global heads
PROMPTS = (37, 5)  # tokens: longer and shorter than the window; the second is shorter than the first
STEPS, EQUAL = 48, {torch.float32: 1.0, torch.bfloat16: 0.95}  # and the least part of tokens that are the same


@dataclass
class Found:
    """One row of the table."""

    family: str
    size: str
    dtype: str
    batch: int
    threshold: float
    graph: bool
    tokens: int = 0
    equal: int = 0
    gap: float = 0.0
    forgotten: int = 0
    skipped: float = 0.0
    error: str = ""


def build(family: str, size: str, dtype: torch.dtype) -> PreTrainedModel:
    """Weights whose layers weigh as much as the token: what they remember then decides what comes next."""
    changes, layers, wide = SIZES[size]
    more = {"global_head_dim": wide} if family.startswith("gemma") else {}
    model = shapes.build(family, DEVICE, layers, **{**changes, **OWN[family], **more}).to(dtype)
    generator = torch.Generator(model.device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def forced(decoder: Decoder, tokens: Tensor, prompt: int, found: Found) -> None:
    """The decoder along `generate`'s tokens [B, prompt + STEPS]; where it would have said another, by how much."""
    logits = decoder.prefill(tokens[:, :prompt])
    for i in range(prompt, tokens.shape[1]):
        wanted = tokens[:, i : i + 1]
        gaps = (logits.max(-1, keepdim=True).values - logits.gather(-1, wanted)).float() / logits.float().std(
            -1, keepdim=True
        )
        found.tokens += len(wanted)
        found.equal += int((logits.argmax(-1, keepdim=True) == wanted).sum())
        found.gap = max(found.gap, float(gaps.max()))
        if i + 1 < tokens.shape[1]:
            logits = decoder.step(wanted)


def forget(decoder: Decoder) -> None:
    """Empty what the special layers remember."""
    for view in decoder.cache.layers if decoder.cache else ():
        if isinstance(view, Recurrent):
            for states in (view.state.conv_states, view.state.recurrent_states):
                for state in states.values():
                    state.zero_()
        elif isinstance(view, Attended) and view.room < decoder.length:
            view.values.zero_()


def check(model: PreTrainedModel, found: Found) -> Found:
    ace, length = ACE(build_plan(model)), max(PROMPTS) + STEPS
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, TINY["vocab_size"], (found.batch, n), generator=generator).to(DEVICE) for n in PROMPTS]
    if not found.threshold:
        expected = [model.generate(ids, max_new_tokens=STEPS, **GREEDY) for ids in prompts]
    with ace(model):
        ace.set_threshold(found.threshold)
        if found.threshold:
            expected = [model.generate(ids, max_new_tokens=STEPS, **GREEDY) for ids in prompts]
        decoder = Decoder(model, found.batch, length)
        ace.reset()
        for ids, tokens in zip(prompts, expected, strict=True):
            forced(decoder, tokens, ids.shape[1], found)
        found.skipped, found.graph = ace.report()["decode"]["realised"], decoder.graph is not None
        decoder.prefill(prompts[0])
        forget(decoder)
        said = [decoder.step(expected[0][:, n : n + 1]).argmax(-1) for n in range(PROMPTS[0], PROMPTS[0] + STEPS - 1)]
        found.forgotten = int((torch.stack(said, 1) != expected[0][:, PROMPTS[0] + 1 :]).sum())
    return found


def missed(found: Found) -> bool:
    wrong = found.equal < EQUAL[getattr(torch, found.dtype)] * found.tokens
    blind = found.forgotten == 0 and not found.family.startswith("qwen3-30b")
    return bool(found.error) or wrong or blind or (DEVICE == "cuda" and not found.graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--families", nargs="+", default=list(OWN), choices=list(OWN))
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = []
    print(f"{'family':16} {'size':7} {'dtype':9} batch    τ  skipped  tokens  equal    gap  forgotten")
    for size, dtype, family in ((s, d, f) for s in given.sizes for d in EQUAL for f in given.families):
        model = build(family, size, dtype)
        for batch, threshold in ((b, t) for b in (1, 3) for t in (0.0, 0.12)):
            torch._dynamo.reset()
            found = Found(family, size, str(dtype).removeprefix("torch."), batch, threshold, graph=False)
            try:
                check(model, found)
            except Exception as error:  # the table goes on: what fails is said in its row
                found.error = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            rows.append({**asdict(found), "missed": missed(found)})
            numbers = f"{found.skipped:8.1%} {found.tokens:7} {found.equal:6} {found.gap:6.3f} {found.forgotten:10}"
            verdict = f"{'MISSED ' if missed(found) else ''}{found.error}"
            print(f"{family:16} {size:7} {found.dtype:9} {batch:5} {threshold:4} {numbers} {verdict}", flush=True)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    if given.out is not None:
        facts = {"command": "python benchmarks/check_decoder_gpu.py", "device": device, "torch": torch.__version__}
        given.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    raise SystemExit(any(row["missed"] for row in rows))


if __name__ == "__main__":
    main()
