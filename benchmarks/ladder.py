"""Does skipping get cheaper as models grow, or as they are trained? One family in four sizes, trained and judged in one go.

    python benchmarks/ladder.py --train mix.uint16.xz --valid mix-valid.uint16 --device cuda --minutes 8 -o ladder.json

Qwen3-MoE, 32 experts, top-8; sizes differ in width and depth alone, and all read the same windows in the same order. Every
run is a process of its own on the one device. After a short while together the tokens that all can read in the time are fixed
(`--tokens` fixes them instead). At 1, 2, 4 … million tokens and at the end a model is judged on text it was not trained on:
budgets are mapped as everywhere and corrected to what is realised; KL, agreement and perplexity have intervals over windows.
Rows are written as they come; weights are not kept.
"""

from __future__ import annotations

import argparse
import lzma
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from running import Row, parser, store
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ace_moe import build_plan
from ace_moe.files import hashes
from ace_moe.lab.compare.subject import Recorder, Subject, dense_pass
from ace_moe.lab.tune.candidates import BASELINE
from ace_moe.mapping import fit_budgets
from ace_moe.policies import PRESETS, TokenPolicy
from ace_moe.provenance import provenance
from ace_moe.scoring.predictions import Score
from ace_moe.scoring.statistics import perplexity_change, perplexity_interval, token_interval
from ace_moe.text import Windows, windows_of

VOCABULARY, WINDOW = 8192, 512
SIZES = {"4M": (128, 6), "12M": (192, 10), "35M": (320, 12), "100M": (512, 14), "tiny": (64, 2)}  # width, layers
COMMON = {
    "vocab_size": VOCABULARY, "head_dim": 32, "tie_word_embeddings": True, "num_experts": 32, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "router_aux_loss_coef": 0.002, "max_position_embeddings": WINDOW, "bos_token_id": 0,
    "eos_token_id": 0, "use_cache": False,
}  # fmt: skip
POLICIES: dict[str, TokenPolicy] = {"auto": BASELINE, "paper": PRESETS["paper"]}
BUDGETS = (0.3, 0.5, 0.6)
FIRST = 1_000_000  # tokens before a model is judged for the first time; then at each doubling
PEAK, WARM, FALLING, LAST = 2e-3, 100, 1 / 3, 0.1  # learning rate: of width 128; steps; part of the run; of the peak
TIMED = 20.0  # seconds in which all runs are timed together, before their tokens are fixed
SPENT = 0.75  # of the time that is left goes into training, the rest into judging
RESERVE = 30.0  # seconds before the end in which a run that is late is judged as it is


@dataclass(frozen=True)
class Run:
    """One training: a size and a seed, which sets the weights at the start and the order of the text."""

    size: str
    seed: int

    @property
    def config(self) -> Qwen3MoeConfig:
        width, layers = SIZES[self.size]
        return Qwen3MoeConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32, num_key_value_heads=width // 64,
            intermediate_size=2 * width, moe_intermediate_size=width // 4, **COMMON,
        )  # fmt: skip


# ---- training ---------------------------------------------------------------------------------------------------------


class Masters:
    """The optimiser's fp32 weights. The model's become bf16: autocast does not reach grouped products."""

    def __init__(self, model: Qwen3MoeForCausalLM):
        self.weights = list(model.parameters())
        self.copies = [w.detach().float().clone().requires_grad_() for w in self.weights]
        for weight in self.weights:  # and not its buffers: rotary angles want their digits
            weight.data = weight.data.bfloat16()
        kinds = {0.1: [c for c in self.copies if c.dim() > 1], 0.0: [c for c in self.copies if c.dim() <= 1]}
        groups = [{"params": copies, "weight_decay": decay} for decay, copies in kinds.items()]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for copy, weight in zip(self.copies, self.weights, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.copies, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        for copy, weight in zip(self.copies, self.weights, strict=True):
            weight.copy_(copy)


def rate_at(step: int, steps: float, width: int) -> float:
    """Up, level, and down over the last third: until it falls, the end need not be known."""
    peak = PEAK * math.sqrt(128 / width)
    left = (steps - step) / (steps * FALLING) if math.isfinite(steps) else 1.0
    return peak * min(1.0, (step + 1) / WARM, max(LAST, left))


def batches(windows: np.ndarray, batch: int, seed: int) -> Iterator[Tensor]:
    """[batch, WINDOW] at a time without end; every window once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        whole = torch.randperm(len(windows), generator=generator)[: len(windows) // batch * batch]
        for rows in whole.split(batch):
            yield torch.from_numpy(windows[rows.numpy()].astype(np.int64))


class Training:
    """A model on its way."""

    def __init__(self, run: Run, device: str):
        torch.manual_seed(run.seed)
        self.width, self.device, self.count, self.read = run.config.hidden_size, device, 0, 0
        self.model = Qwen3MoeForCausalLM(run.config).to(device)
        self.masters = Masters(self.model)
        self.loss = torch.zeros(())

    def step(self, ids: Tensor, tokens: float) -> None:
        """ids [B, L], of a run of so many tokens."""
        self.model.train()
        ids = ids.to(self.device)
        loss = self.model(input_ids=ids, labels=ids, output_router_logits=True).loss
        loss.backward()
        self.masters.step(rate_at(self.count, tokens / ids.numel(), self.width))
        self.count, self.read, self.loss = self.count + 1, self.read + ids.numel(), loss.detach()


@dataclass
class Shared:
    """What the runs and the process that watches them tell each other."""

    count: int
    batch: int  # windows a step
    end: float  # by the clock
    given: int  # tokens of every run; 0: to be found

    def __post_init__(self) -> None:
        spawn = mp.get_context("spawn")
        self.told, self.read = spawn.Queue(), spawn.Array("q", self.count)  # rows; tokens of each run so far
        self.total = spawn.Value("q", self.given)

    @property
    def tokens(self) -> float:
        return self.total.value or math.inf


def follow(number: int, run: Run, train: Path, valid: Tensor, device: str, shared: Shared) -> None:
    """One run from its first token to its last, in a process of its own."""
    torch.set_num_threads(1)
    training, start, due = Training(run, device), time.time(), FIRST
    for ids in batches(windows_in(train), shared.batch, run.seed):
        if (parent := mp.parent_process()) and not parent.is_alive():
            return
        late = time.time() > shared.end - RESERVE
        last = late or training.read >= shared.tokens
        if last or training.read >= due:
            facts = {"tokens": training.read, "seconds": time.time() - start, "loss": float(training.loss)}
            judged = judge(training.model, windows_of(valid, "held-out"))
            shared.told.put({**asdict(run), **facts, "last": last, "late": late, **judged})
            due *= 2
        if last:
            return
        training.step(ids, shared.tokens)
        shared.read[number] = training.read


# ---- judging ----------------------------------------------------------------------------------------------------------


def judge(model: Qwen3MoeForCausalLM, windows: Windows) -> Row:
    """Perplexity unskipped, and what each policy leaves of the model at each budget."""
    subject = Subject(model.eval(), build_plan(model), windows, batch=8)
    dense, seen = dense_pass(subject, POLICIES)
    cells = []
    for name, policy in POLICIES.items():
        with subject.under(policy) as deciders:
            recorder = Recorder(deciders, subject)
            for fit in fit_budgets(recorder, BUDGETS, dense=seen[name]):
                found = recorder.outcome(fit.threshold)
                cells.append(
                    {"policy": name, "budget": fit.budget, "realised": found.realised, **told(found.score, dense)}
                )
    return {"perplexity": asdict(perplexity_interval(dense)), "cells": cells}


def told(score: Score, dense: Score) -> Row:
    assert score.fidelity is not None
    sums = vars(score.fidelity)
    return {
        **{name: asdict(token_interval(values, score.by_window)) for name, values in sums.items()},
        "perplexity": score.perplexity,
        "perplexity_change": asdict(perplexity_change(score, dense)),
    }


# ---- all runs ---------------------------------------------------------------------------------------------------------


def tokens_for(processes: list[Any], shared: Shared) -> int:
    """What every run can read in the time: on a device that they share, the work of all together has to fit."""
    step = shared.batch * WINDOW
    while any(p.is_alive() and read < 5 * step for p, read in zip(processes, shared.read[:], strict=True)):
        time.sleep(0.1)  # until what is made on the way in is made
    before, start = shared.read[:], time.time()
    time.sleep(TIMED)
    read = [now - then for p, now, then in zip(processes, shared.read[:], before, strict=True) if p.is_alive()]
    rates = [max(tokens, step) / (time.time() - start) for tokens in read]
    return int(SPENT * (shared.end - time.time()) * len(rates) / sum(1 / rate for rate in rates)) if rates else step


def watch(processes: list[Any], shared: Shared, result: Row, out: Path) -> None:
    """Rows into the file as they come, until every run has ended."""
    while any(p.is_alive() for p in processes) or not shared.told.empty():
        if shared.told.empty():
            time.sleep(0.1)
            continue
        row = shared.told.get()
        result["rows"].append(row)
        store(out, result)
        kls = " ".join(f"{c['policy']} {c['budget']:.0%} {c['kl']['value']:.4f}" for c in row["cells"])
        print(f"{row['size']}/{row['seed']} {row['tokens'] / 1e6:.1f} M in {row['seconds']:.0f} s, perplexity "
              f"{row['perplexity']['value']:.1f}, KL {kls}{' (late)' * row['late']}", flush=True)  # fmt: skip


def unpacked(path: Path, folder: str) -> Path:
    """The file itself, or what was packed in it: every run maps it into memory."""
    if path.suffix != ".xz":
        return path
    plain = Path(folder) / path.stem
    plain.write_bytes(lzma.decompress(path.read_bytes()))
    return plain


def windows_in(path: Path) -> np.ndarray:
    """[N, WINDOW] of a file of 16-bit tokens."""
    ids = np.memmap(path, dtype=np.uint16, mode="r")
    return ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)


def size_of(name: str) -> Row:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Run(name, 0).config)
    width, layers = SIZES[name]
    return {"width": width, "layers": layers, "parameters": model.num_parameters()}


def ladder(options: argparse.Namespace, train: Path) -> bool:
    """All runs at once; whether every one came to its end."""
    valid = windows_in(options.valid)
    apart = max(1, len(valid) // options.judged)
    judged = torch.from_numpy(valid[::apart][: options.judged].astype(np.int64))
    result: Row = {
        "kind": "ladder",
        "provenance": provenance(options.device, hashes((options.train, options.valid))),
        "sizes": {size: size_of(size) for size in options.sizes},
        **{"batch": options.batch, "window": WINDOW, "training_tokens": windows_in(train).size},
        **{"judged_windows": len(judged), "rows": []},
    }
    first, spawn = options.sizes[0], mp.get_context("spawn")
    runs = [Run(size, 0) for size in reversed(options.sizes)] + [Run(first, seed) for seed in range(1, options.seeds)]
    shared = Shared(len(runs), options.batch, options.end, options.tokens or 0)
    given = [(n, run, train, judged, options.device, shared) for n, run in enumerate(runs)]
    processes = [spawn.Process(target=follow, args=arguments) for arguments in given]
    for process in processes:
        process.start()
    shared.total.value = shared.total.value or tokens_for(processes, shared)
    result["tokens"] = shared.total.value
    print(f"{len(runs)} runs of {result['tokens'] / 1e6:.1f} M tokens each", flush=True)
    watch(processes, shared, result, options.out)
    return not any(process.exitcode for process in processes)


def main() -> None:
    made = parser(__doc__, must_store=True, minutes=8.0, device="cuda")
    made.add_argument("--train", type=Path, required=True, help="16-bit tokens, .xz or not")
    made.add_argument("--valid", type=Path, required=True)
    made.add_argument("--sizes", nargs="+", choices=list(SIZES), default=[s for s in SIZES if s != "tiny"])
    made.add_argument("--seeds", type=int, default=3, help="of the first size")
    made.add_argument("--tokens", type=int, help="of every run; else as many as fit")
    made.add_argument("--batch", type=int, default=32, help=f"windows of {WINDOW} tokens a step")
    made.add_argument("--judged", type=int, default=32, help="windows a model is judged on")
    options = made.parse_args()
    options.end = time.time() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        whole = ladder(options, unpacked(options.train, folder))
    raise SystemExit(not whole)


if __name__ == "__main__":
    main()
