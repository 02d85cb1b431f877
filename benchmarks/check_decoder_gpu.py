"""Decode steps in one CUDA graph against `generate`, token for token, for models with windows and recurrent states.

    python benchmarks/check_decoder_gpu.py [--plain] [-o result.json]

Random models of three families, tiny and of medium size, in fp32 and bf16, batch 1 and 3. `generate` of the uncompiled model
says the tokens, unskipped without a plan, skipped with the same plan and threshold; the decoder is given them one by one and
is on two prompts one after the other in the same graph, beyond the window. In fp32 it must find every token the likeliest.
In bf16 rounding decides ties and now and then an expert: there its logits may be no further from those of the same weights in
fp32 than the uncompiled model's are (`error` and `plain`: medians over tokens of the relative distance). `forgotten` counts
tokens whose logits move by more than a hundredth when the memory is emptied after the prompt: a fault there would be seen.
`--plain`: layers are compiled as they are, not rewritten before. Exit status 1 if a bar is missed. Without a GPU it runs without
graphs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from running import made_here, parser, store
from torch import Tensor
from transformers import PreTrainedModel

from ace_moe import ACE, build_plan
from ace_moe.decoding import Decoder
from ace_moe.decoding.static import Attended, Recurrent
from ace_moe.lab.bench import shapes

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
    "gpt-oss-20b": {"sliding_window": 24, "num_experts_per_tok": 8},
    "glm-4.5-air": {"n_routed_experts": 16, "routed_scaling_factor": 1.5},
}
SIZES = {"tiny": (TINY, 6, 32), "medium": (MEDIUM, 12, 256)}  # changes, layers, width of Gemma's global heads
PROMPTS = (37, 5)  # tokens: longer and shorter than the window; the second is shorter than the first
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STEPS, TAUS = 48, (0.0, 0.125)  # the second is an even share: about half of the slots
WORSE = 1.25  # times the uncompiled model's error


@dataclass
class Found:
    """One row of the table."""

    family: str
    size: str
    dtype: str
    batch: int
    threshold: float
    graph: bool
    fused: bool
    tokens: int = 0
    equal: int = 0
    error: float = 0.0
    plain: float = 0.0
    forgotten: int = 0
    skipped: float = 0.0
    failure: str = ""


def build(family: str, size: str, dtype: torch.dtype) -> PreTrainedModel:
    """Weights whose layers weigh as much as the token: what they remember then decides what comes next."""
    changes, layers, wide = SIZES[size]
    more = {"global_head_dim": wide} if family.startswith("gemma") else {}
    model = shapes.build(family, DEVICE, layers, **{**changes, **OWN[family], **more}).to(dtype)
    generator = torch.Generator(model.device).manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() > 1 or name.endswith("bias"):
                tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)
    return model


def forced(decoder: Decoder, tokens: Tensor, prompt: int) -> Tensor:
    """The decoder's logits [STEPS, B, V] along `generate`'s tokens [B, prompt + STEPS]."""
    found = [decoder.prefill(tokens[:, :prompt]).clone()]
    found += [decoder.step(tokens[:, i : i + 1]).clone() for i in range(prompt, tokens.shape[1] - 1)]
    return torch.stack(found)


@torch.no_grad()
def whole(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The same in one pass of the uncompiled model."""
    return model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=STEPS).logits.transpose(0, 1)


def distance(found: Tensor, truth: Tensor) -> float:
    """Median over tokens of the relative distance."""
    truth = truth.double()
    return float(((found.double() - truth).norm(dim=-1) / truth.norm(dim=-1)).median())


def forget(decoder: Decoder) -> None:
    """Empty what the special layers remember."""
    for view in decoder.cache.layers if decoder.cache else ():
        if isinstance(view, Recurrent):
            for states in (view.state.conv_states, view.state.recurrent_states):
                for state in states.values():
                    state.zero_()
        elif isinstance(view, Attended) and view.room < decoder.length:
            view.values.zero_()


def check(model: PreTrainedModel, exact: PreTrainedModel, found: Found) -> Found:
    """`exact`: the same weights in fp32."""
    plan, length = build_plan(model), max(PROMPTS) + STEPS
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, TINY["vocab_size"], (found.batch, n), generator=generator).to(DEVICE) for n in PROMPTS]
    stock = [model.generate(ids, max_new_tokens=STEPS, **GREEDY) for ids in prompts]
    ace, truth = (ACE(plan, policy="share") for _ in range(2))
    with ace(model), truth(exact):
        for one in (ace, truth):
            one.set_threshold(found.threshold)
        skipped = [model.generate(ids, max_new_tokens=STEPS, **GREEDY) for ids in prompts]
        expected = skipped if found.threshold else stock
        right, plain = ([whole(m, tokens) for tokens in expected] for m in (exact, model))
        decoder = Decoder(model, found.batch, length, fused=found.fused)
        ace.reset()
        said = [forced(decoder, tokens, ids.shape[1]) for ids, tokens in zip(prompts, expected, strict=True)]
        found.skipped, found.graph = ace.report()["decode"]["realised"], decoder.graph is not None
        found.tokens = sum(logits[..., 0].numel() for logits in said)
        wanted = [tokens[:, -STEPS:].T for tokens in expected]
        found.equal = sum(int((a.argmax(-1) == b).sum()) for a, b in zip(said, wanted, strict=True))
        found.error = max(distance(a, b) for a, b in zip(said, right, strict=True))
        found.plain = max(distance(a, b) for a, b in zip(plain, right, strict=True))
        found.forgotten = _forgotten(decoder, expected[0], said[0])
    return found


def _forgotten(decoder: Decoder, tokens: Tensor, said: Tensor) -> int:
    decoder.prefill(tokens[:, : PROMPTS[0]])
    forget(decoder)
    steps = range(PROMPTS[0], tokens.shape[1] - 1)
    now = torch.stack([decoder.step(tokens[:, n : n + 1]).clone() for n in steps])
    return int(((now - said[1:]).norm(dim=-1) > 0.01 * said[1:].norm(dim=-1)).sum())


def missed(found: Found) -> bool:
    wrong = found.equal < found.tokens if found.dtype == "float32" else found.error > WORSE * found.plain
    blind = found.forgotten == 0 and found.family not in ("qwen3-30b-a3b", "glm-4.5-air")  # which remember all
    return bool(found.failure) or wrong or blind or (DEVICE == "cuda" and not found.graph)


def main() -> None:
    made = parser(__doc__, plain=False)
    made.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    made.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    made.add_argument("--families", nargs="+", default=list(OWN), choices=list(OWN))
    given = made.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = []
    print(f"{'family':16} {'size':7} {'dtype':9} batch    τ  skipped  tokens  equal    error    plain  forgotten")
    for size, dtype, family in ((s, d, f) for s in given.sizes for d in given.dtypes for f in given.families):
        model = build(family, size, DTYPES[dtype])
        exact = build(family, size, torch.float32)
        exact.load_state_dict(model.state_dict())
        for batch, threshold in ((b, t) for b in (1, 3) for t in TAUS):
            torch._dynamo.reset()
            found = Found(family, size, dtype, batch, threshold, False, not given.plain)
            try:
                check(model, exact, found)
            except Exception as error:  # the table goes on: what fails is said in its row
                found.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            rows.append({**asdict(found), "missed": missed(found)})
            numbers = f"{found.skipped:8.1%} {found.tokens:7} {found.equal:6} {found.error:8.1e} {found.plain:8.1e}"
            verdict = f"{'MISSED ' if missed(found) else ''}{found.failure}"
            print(
                f"{family:16} {size:7} {found.dtype:9} {batch:5} {threshold:5} {numbers} {found.forgotten:10} {verdict}",
                flush=True,
            )
            store(given.out, made_here(torch=torch.__version__, rows=rows))
    raise SystemExit(any(row["missed"] for row in rows))


if __name__ == "__main__":
    main()
