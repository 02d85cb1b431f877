"""One benchmark run: stock and ours at several ratios over a grid of prompt lengths and batch sizes.

All paths of one size are captured first and then timed in turn, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..ace import ACE
from ..integrations.transformers.experts import UNRULED
from ..planning.mapping import bisect
from ..tables.build import build_plan
from .latency import Generated, Prompt, Steps, Timing, random_ids
from .routing import observe

PAPER = ((256, 1), (512, 1), (1024, 1), (1024, 2), (1024, 4))  # the rows of the paper's latency table
GENERATE = "generate:"
REPEATS = 5
ROUNDS, CLOSE = 16, 0.002  # of looking for the threshold that realises a ratio


@dataclass(frozen=True)
class Row:
    """One measurement. `experts` are the distinct ones a layer reads, before and after skipping."""

    what: str
    path: str
    tokens: int
    batch: int
    requested: float
    realised: float
    wall_ms: float
    gpu_ms: float | None
    spread_ms: float
    logit_spread: float | None = None
    experts: float | None = None
    executed: float | None = None
    valid: bool | None = None
    tb_s: float | None = None


@dataclass(frozen=True)
class Case:
    """Something captured that can be timed, and how to set it up before."""

    path: str
    ratio: float
    time: Callable[[int], Timing]
    ours: bool = False


class Bench:
    """Measures one model. `say` gets each row as it comes."""

    def __init__(self, model: PreTrainedModel, ratios: Sequence[float], say: Callable[[Row], None], plan: Any = None):
        self.model, self.ratios, self.say = model, ratios, say
        self.ace = ACE(plan or build_plan(model))
        self.taus: dict[float, float] = {}

    def prefill(self, tokens: int, batch: int, stock: Sequence[str]) -> Iterator[Row]:
        """Rows of TTFT. Stock's `eager` loops on the host and runs uncompiled."""

        def make(path: str) -> Callable[[int], Timing]:
            return Prompt(self.model, batch, tokens, compiled=path != "eager").time

        yield from self._rows("ttft", (tokens, batch), stock, make)

    def decode(self, batch: int, stock: Sequence[str], prompt: int = 256) -> Iterator[Row]:
        """Rows of TPOT after `prompt` tokens. `generate:PATH` is a stock path compiled whole, as `generate` does."""

        def make(path: str) -> Callable[[int], Timing]:
            if path.startswith(GENERATE):
                return Generated(self.model, batch, prompt).time
            return Steps(self.model, batch, prompt, **({"captured": False} if path == "eager" else {})).time

        yield from self._rows("tpot", (prompt, batch), stock, make)

    def _rows(
        self, what: str, size: tuple[int, int], stock: Sequence[str], make: Callable[[str], Callable[[int], Timing]]
    ) -> Iterator[Row]:
        torch._dynamo.reset()  # sizes before this one would count against its limit of recompilations
        cases = []
        for path in stock:
            if what == "ttft" and path.startswith(GENERATE):
                continue  # generate does not compile prompts
            self.model.set_experts_implementation(path.removeprefix(GENERATE))
            cases.append(Case(path, 0.0, make(path)))
        with self.ace(self.model):
            cases += self._unruled(make) if what == "tpot" else []
            time = make("ace")
            cases += [Case("ace", ratio, time, ours=True) for ratio in self.ratios]
            self.taus = {case.ratio: self._settled(case) for case in cases if case.ours}
            for case, timing, realised in self._in_turn(cases):
                row = Row(what, case.path, *size, case.ratio, realised, timing.wall, timing.gpu, timing.spread)
                row = self._described(row, case)
                self.say(row)
                yield row

    def _unruled(self, make: Callable[[str], Callable[[int], Timing]]) -> list[Case]:
        """Our kernels behind the stock router, where there are kernels."""
        if set(self.ace.report()["executors"]) != {"kernels"} or self.ace.attachment is None:
            return []
        with self.ace.attachment.unruled():
            return [Case(UNRULED, 0.0, make(UNRULED))]

    def _settled(self, case: Case) -> float:
        """τ at which this very size realises its ratio: a few tokens are not like a thousand."""
        if not case.ratio:
            return 0.0
        return bisect(lambda tau: self._once(case, tau)[1], case.ratio, CLOSE, ROUNDS).threshold

    def _once(self, case: Case, tau: float) -> tuple[Timing, float]:
        self.ace.set_threshold(tau)
        self.ace.reset()
        return case.time(1), self.ace.realised if case.ours else 0.0

    def _in_turn(self, cases: Sequence[Case]) -> list[tuple[Case, Timing, float]]:
        """Each case once per round; medians over the rounds."""
        found: list[list[Timing]] = [[] for _ in cases]
        realised = [0.0] * len(cases)
        for _ in range(REPEATS):
            for i, case in enumerate(cases):
                timing, realised[i] = self._once(case, self.taus.get(case.ratio, 0.0))
                found[i].append(timing)
        return [(case, _middle(times), ratio) for case, times, ratio in zip(cases, found, realised, strict=True)]

    def _described(self, row: Row, case: Case) -> Row:
        """With the routing behind it; for decode also the rate at which needed weights were read."""
        if not case.ours:
            return row
        self.ace.set_threshold(self.taus[case.ratio])
        decode = row.what == "tpot"
        ids = random_ids(self.model, row.batch, 32 if decode else min(row.tokens, 1024), seed=1)
        routed = observe(self.model, self.ace, ids, last=decode)
        row = replace(
            row, logit_spread=routed.spread, experts=routed.experts, executed=routed.executed, valid=routed.valid
        )
        if decode and row.gpu_ms is not None:
            row = replace(row, tb_s=self._bytes(routed.executed) / row.gpu_ms / 1e9)
        return row

    def _bytes(self, executed: float) -> float:
        """Weights one decode step must read: all but embeddings and the experts nobody needs."""
        layers = list(self.ace.runtime.layers.values())
        experts = {id(p) for layer in layers if (owner := layer.owner()) is not None for p in owner.parameters()}
        sizes = [(p.numel() * p.element_size(), id(p) in experts) for p in self.model.parameters()]
        embeddings = self.model.get_input_embeddings().weight
        dense = sum(size for size, expert in sizes if not expert) - embeddings.numel() * embeddings.element_size()
        return dense + sum(size for size, expert in sizes if expert) * executed / layers[0].mark


def _middle(times: Sequence[Timing]) -> Timing:
    walls, gpus = sorted(t.wall for t in times), sorted(t.gpu for t in times if t.gpu is not None)
    return Timing(walls[len(walls) // 2], gpus[len(gpus) // 2] if gpus else None, walls[-1] - walls[0])


def read_rate(device: torch.device) -> float | None:
    """TB/s at which the GPU reads memory once, the ceiling of every decode step."""
    if device.type != "cuda":
        return None
    big = torch.empty(1 << 30, dtype=torch.float32, device=device).normal_()
    times = []
    for _ in range(6):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        big.sum()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    return big.numel() * 4 / min(times) / 1e9


def result(command: str, rows: Sequence[Row], ceiling: float | None = None) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = {"command": command, "device": device, "torch": torch.__version__, "read_tb_s": ceiling}
    return {**facts, "rows": [asdict(r) for r in rows]}
