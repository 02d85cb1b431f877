"""What the serving tests share: tiny models, prompts, engines in processes of their own, and the reference."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

import ace_moe
from ace_moe import ACE
from ace_moe.checkpoint.loading import load_model, load_tokenizer
from ace_moe.demo import MODEL
from ace_moe.plan import Plan
from ace_moe.policies import Decision, Routing

HERE = Path(__file__).parent
# the generations of vLLM's model runner, and which is tested: of the second's kernels a CPU has an interpreter alone
RUNNERS = {"1": "vllm.v1.worker.cpu_model_runner", "2": "vllm.v1.worker.cpu.model_runner"}
RUNNER = os.environ.get("ACE_TEST_RUNNER", "1")
PROMPTS = (
    "The history of the town begins in the early twelfth century, when",
    "def read_file(path):\n    with open(path) as handle:\n        return",
    "She looked out of the window and",
    "In mathematics, a group is a set with an operation that",
    "Water",
    "The second film of the series was released in 1987 and received mixed reviews from critics, who praised",
)
GAP = 1e-5
MAX_TOKENS = 8

COMMON = {
    "vocab_size": 8192, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 8, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "eos_token_id": 0, "pad_token_id": None, "bos_token_id": 0,
}  # fmt: skip


def glm() -> PreTrainedModel:
    """Grouped sigmoid routing with a correction bias, a shared expert, a dense first layer, scaled gates."""
    config = Glm4MoeConfig(
        **COMMON, head_dim=32, n_routed_experts=16, n_shared_experts=1, n_group=4, topk_group=3, first_k_dense_replace=1,
        routed_scaling_factor=2.5, norm_topk_prob=True, use_qk_norm=True, num_nextn_predict_layers=0,
    )  # fmt: skip
    return Glm4MoeForCausalLM(config)


def qwen2() -> PreTrainedModel:
    """Gates that do not sum to 1, and a shared expert with a gate of its own."""
    config = Qwen2MoeConfig(
        **COMMON, num_experts=16, shared_expert_intermediate_size=96, norm_topk_prob=False, decoder_sparse_step=1
    )
    return Qwen2MoeForCausalLM(config)


@torch.no_grad()
def save_tiny(name: str, folder: Path) -> Path:
    """A random model with spread gates and the demo's tokenizer."""
    torch.manual_seed(1)
    model = {"glm4": glm, "qwen2": qwen2}[name]()
    for path, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            router, embedding = path.endswith("mlp.gate.weight"), "embed" in path
            parameter.normal_(0, 0.12 if router else 1.0 if embedding else 1.2 / parameter.shape[-1] ** 0.5)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2)
    model.float().save_pretrained(folder)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(MODEL)
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


# ---- the reference: the transformers integration ----------------------------------------------------------------


class Scores:
    """Looks at every layer and keeps every score."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, routing: Routing, protected: Tensor | None, decision: Decision) -> None:
        assert protected is not None
        self.seen.append(protected[protected.isfinite()].flatten().cpu())

    def sorted(self) -> Tensor:
        return torch.cat(self.seen).sort().values


@dataclass
class Reference:
    """What the transformers integration says of the prompts at τ."""

    threshold: float
    tokens: list[list[int]]
    logprobs: list[Tensor]  # of each sequence, [tokens − 1, vocabulary]
    counts: dict[str, tuple[int, int]]  # routed, kept by layer
    nearest: float  # distance from τ to the closest score
    realised: float


@torch.inference_mode()
def reference(
    model: PreTrainedModel, ace: ACE, threshold: float, starts: list[list[int]], new_tokens: int = MAX_TOKENS
) -> tuple[Reference, Tensor]:
    """Greedy tokens, then one pass over each whole sequence, the last token left out: it is never run."""
    ace.set_threshold(threshold)
    more = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    sequences = [model.generate(torch.tensor([p], device=model.device), **more)[0] for p in starts]
    ace.reset()
    scores = Scores()
    with ace.deciders.observed(lambda key: scores):
        logprobs = [model(s[None, :-1]).logits[0].float().log_softmax(-1).cpu() for s in sequences]
    every = scores.sorted()
    counts = {key: tuple(c.sum(0)[:2].tolist()) for key, c in ace.deciders.counts().items()}
    tokens = [s[len(p) :].tolist() for s, p in zip(sequences, starts, strict=True)]
    nearest = float((every - threshold).abs().min())
    return Reference(threshold, tokens, logprobs, counts, nearest, ace.realised), every


def in_a_gap(
    model: PreTrainedModel, plan: Plan, starts: list[list[int]], budget: float = 0.5, new_tokens: int = MAX_TOKENS
) -> Reference:
    """The reference at a τ near the budget that no score of the prompts comes closer to than half the gap."""
    ace = ACE(plan)
    with ace(model):
        dense, every = reference(model, ace, 0.0, starts, new_tokens)
        total = sum(routed for routed, _ in dense.counts.values())
        for _ in range(20):
            middle = int(budget * total)
            window = every[max(0, middle - total // 50) : middle + total // 50]
            gaps = (window[1:] - window[:-1]).argsort(descending=True)
            for at in gaps[:5].tolist():
                tau = float((window[at] + window[at + 1]) / 2)
                found, every_at = reference(model, ace, tau, starts, new_tokens)
                if found.nearest >= GAP / 2 and abs(found.realised - budget) < 0.03:
                    return found
            every = every_at
    raise AssertionError("no threshold in a gap was found")


@dataclass(frozen=True)
class Case:
    """A model with its plan file and what transformers says of it at half the slots."""

    name: str
    model: Path
    plan: Path
    reference: Reference


# ---- engines ----------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Of this source tree, whichever is installed."""
    source = Path(ace_moe.__file__).parent.parent
    folders = [HERE, source] if RUNNER == "1" else [HERE, source, HERE / "second_runner", HERE.parent]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def run_engine(
    folder: Path, model: Path, ace: dict[str, Any] | None, steps: list[dict[str, Any]], task: Any = None, **llm: Any
) -> dict[str, Any]:
    """The results of `serving_engine.py`; its whole output is the message if it fails. `task` replaces parts of its SPEC."""
    done = start_engine(folder, model, ace, steps, task, **llm)
    assert done.returncode == 0, done.stdout[-6000:]
    found = json.loads((folder / "out.json").read_text())
    assert found["runner"] == RUNNERS[RUNNER]
    return found


def run_script(name: str, *files: Path, timeout: int) -> subprocess.CompletedProcess[str]:
    """A script of this folder in a process of its own; what it printed is in `stdout`."""
    command = [sys.executable, str(HERE / name), *map(str, files)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, env=environment(), timeout=timeout, check=False, **output)


def start_engine(
    folder: Path, model: Path, ace: dict[str, Any] | None, steps: list[dict[str, Any]], task: Any = None, **llm: Any
) -> subprocess.CompletedProcess[str]:
    """Without restored slots unless `ace` asks: what a token runs then is its own, whoever else is served."""
    folder.mkdir(parents=True, exist_ok=True)
    ace = ace if ace is None else {"restore": False, **ace}
    spec = {"model": str(model), "prompts": prompts(), "max_tokens": MAX_TOKENS, "ace": ace, "llm": llm, "steps": steps}
    (folder / "spec.json").write_text(json.dumps(spec | (task or {})))
    return run_script("serving_engine.py", folder / "spec.json", folder / "out.json", timeout=900)


def load_fp32(folder: Path) -> PreTrainedModel:
    return load_model(folder, device="cpu", dtype="float32")
