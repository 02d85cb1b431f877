"""One benchmark run: stock and ours at several ratios over a grid of prompt lengths and batch sizes.

All paths of one size are captured first and then timed in turn, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...ace import ACE
from ...engines.transformers.experts import UNRULED
from ...errors import IntegrationError, OptionError
from ...mapping.recipe import bisect
from ...plan import Plan
from ...provenance import provenance
from ...tables.build import build_plan
from ...text import Windows
from .fidelity import fidelity
from .latency import STEPS, Generated, Loop, Prompt, Steps, Timing, once
from .routing import Expected, Routed, observe
from .tokens import random_tokens, text_tokens

PAPER = ((256, 1), (512, 1), (1024, 1), (1024, 2), (1024, 4))  # the rows of the paper's latency table
GENERATE = "generate:"
JUDGED = ("kl", "agreement", "acceptance")
REPEATS = 5
ROUNDS, CLOSE = 16, 0.002  # of looking for the threshold that realises a ratio


def check_stock(paths: Sequence[str]) -> None:
    """Names of transformers' own experts, before a model is loaded."""
    known = ["eager", *(name for name in ALL_EXPERTS_FUNCTIONS.valid_keys() if not name.startswith("ace"))]
    for path in paths:
        if path.removeprefix(GENERATE) not in known:
            raise OptionError(f"There are no stock experts {path!r}. --stock takes: {', '.join(sorted(known))}.")


@dataclass(frozen=True)
class Row:
    """One measurement. `experts` are the distinct ones a layer reads, in a step for TPOT, before and after skipping; `shares`
    the gates' parts, largest first; `loop` how it was run: a CUDA graph, the plain model, or `generate`. Fidelity is that of
    the requested ratio on a text, at the threshold that realises it there."""

    what: str
    path: str
    tokens: int
    batch: int
    requested: float
    realised: float
    wall_ms: float
    gpu_ms: float | None
    spread_ms: float
    loop: str
    logit_spread: float
    shares: list[float]
    experts: float
    executed: float
    valid: bool
    tb_s: float | None = None
    kl: float | None = None
    agreement: float | None = None
    acceptance: float | None = None

    @property
    def ms(self) -> float:
        """Milliseconds of the GPU, where there is one."""
        return self.wall_ms if self.gpu_ms is None else self.gpu_ms


class Timed(Protocol):
    """Something captured that can be timed."""

    loop: str

    def time(self, repeats: int) -> Timing: ...


Make = Callable[[str], Timed]


@dataclass(frozen=True)
class Case:
    """One thing that is timed, under its name; `ours`: the rule is in it; `stock`: what it runs without the plan."""

    path: str
    ratio: float
    timed: Timed
    ours: bool = False
    stock: str | None = None


class Bench:
    """Measures one model. `say` gets each row as it comes; `text` gives prompts, and a fidelity to every ratio."""

    def __init__(
        self,
        model: PreTrainedModel,
        ratios: Sequence[float],
        say: Callable[[Row], None],
        plan: Plan | None = None,
        text: Windows | None = None,
        expected: Expected | None = None,
    ):
        self.model, self.ratios, self.say, self.expected = model, ratios, say, expected
        self.ace = ACE(build_plan(model), policy="ace") if plan is None else ACE(plan)  # a plan says what it is run by
        self.taus: dict[float, float] = {}
        self.tokens = random_tokens(model) if text is None else text_tokens(text, model.device)
        self.fidelity = {} if text is None else fidelity(model, self.ace.plan, self.ace.policy, text, ratios)
        self.graphs, self.why = True, ""  # until the model turns out not to fit one

    def prefill(self, tokens: int, batch: int, stock: Sequence[str]) -> Iterator[Row]:
        """Rows of TTFT. Stock's `eager` loops on the host and runs uncompiled."""

        def make(path: str) -> Timed:
            ids = self.tokens(batch, tokens)
            return self._tried(path, lambda: Prompt(self.model, ids), lambda: Prompt(self.model, ids, compiled=False))

        yield from self._rows("ttft", (tokens, batch), stock, make)

    def decode(self, batch: int, stock: Sequence[str], prompt: int = 256) -> Iterator[Row]:
        """Rows of TPOT after `prompt` tokens. `generate:PATH` is a stock path compiled whole, as `generate` does."""

        def make(path: str) -> Timed:
            ids = self.tokens(batch, prompt + STEPS)
            if path.startswith(GENERATE):
                return Generated(self.model, ids)
            if path == "eager" and self.graphs:
                return Steps(self.model, ids, captured=False)
            return self._tried(path, lambda: Steps(self.model, ids), lambda: Loop(self.model, ids))

        yield from self._rows("tpot", (prompt, batch), stock, make)

    def _tried(self, path: str, whole: Callable[[], Timed], plain: Callable[[], Timed]) -> Timed:
        """Capture one graph if the model fits one; all paths of a run go the same way."""
        if self.graphs and path != "eager":
            try:
                return whole()
            except IntegrationError as error:
                self.graphs, self.why = False, str(error)
        return plain()

    def _rows(self, what: str, size: tuple[int, int], stock: Sequence[str], make: Make) -> Iterator[Row]:
        torch._dynamo.reset()  # sizes before this one would count against its limit of recompilations
        cases = []
        for path in stock:
            if what == "ttft" and path.startswith(GENERATE):
                continue  # generate does not compile prompts
            implementation = path.removeprefix(GENERATE)
            self.model.set_experts_implementation(implementation)
            cases.append(Case(path, 0.0, make(path), stock=implementation))
        with self.ace(self.model):
            cases += self._unruled(make) if what == "tpot" else []
            timed = make("ace")
            cases += [Case("ace", ratio, timed, ours=True) for ratio in self.ratios]
            self.taus = {0.0: 0.0} | {case.ratio: self._settled(case, what) for case in cases if case.ours}
            routed = {ratio: self._observed(what, size, ratio) for ratio in self.taus}
            for case, timing, realised in self._in_turn(cases, what):
                row = self._row(what, size, case, timing, realised, routed[case.ratio])
                self.say(row)
                yield row

    def _unruled(self, make: Make) -> list[Case]:
        """Our kernels behind the stock router, where there are kernels."""
        if set(self.ace.report()["executors"]) != {"kernels"} or self.ace.attachment is None:
            return []
        with self.ace.attachment.unruled():
            return [Case(UNRULED, 0.0, make(UNRULED))]

    def _settled(self, case: Case, what: str) -> float:
        """τ at which this very size realises its ratio: a few tokens are not like a thousand."""
        if not case.ratio:
            return 0.0
        return bisect(lambda tau: self._once(case, tau, what)[1], case.ratio, CLOSE, ROUNDS).threshold

    def _once(self, case: Case, tau: float, what: str) -> tuple[Timing, float]:
        self.ace.set_threshold(tau)
        self.ace.reset()
        attachment = self.ace.attachment
        with nullcontext() if case.stock is None or attachment is None else attachment.out(case.stock):
            timing = case.timed.time(1)
        phase = self.ace.report()["prefill" if what == "ttft" else "decode"]
        return timing, phase["realised"] if case.ours else 0.0

    def _in_turn(self, cases: Sequence[Case], what: str) -> list[tuple[Case, Timing, float]]:
        """Time each case once per round; return medians over the rounds."""
        found: list[list[Timing]] = [[] for _ in cases]
        realised = [0.0] * len(cases)
        for _ in range(REPEATS):
            for i, case in enumerate(cases):
                timing, realised[i] = self._once(case, self.taus[case.ratio], what)
                found[i].append(timing)
        return [(case, _middle(times), ratio) for case, times, ratio in zip(cases, found, realised, strict=True)]

    def _observed(self, what: str, size: tuple[int, int], ratio: float) -> Routed:
        """The routing of the very tokens that are timed."""
        self.ace.set_threshold(self.taus[ratio])
        tokens, batch = size
        steps = STEPS if what == "tpot" else None
        return observe(self.model, self.ace, self.tokens(batch, tokens + (steps or 0)), steps, self.expected)

    def _row(
        self, what: str, size: tuple[int, int], case: Case, timing: Timing, realised: float, routed: Routed
    ) -> Row:
        """Build a row with the routing behind it; for decode also the rate at which needed weights were read."""
        row = Row(
            what, case.path, *size, case.ratio, realised, timing.wall, timing.gpu, timing.spread, case.timed.loop,
            routed.spread, routed.shares, routed.experts, routed.executed, routed.valid,
        )  # fmt: skip
        if what == "tpot" and timing.gpu is not None:
            row = replace(row, tb_s=self._bytes(routed.executed) / timing.gpu / 1e9)
        judged = self.fidelity.get(case.ratio)
        return row if judged is None else replace(row, **{name: judged[name]["value"] for name in JUDGED})

    def _bytes(self, executed: float) -> float:
        """Weights one decode step must read: all but embeddings and the experts nobody needs."""
        assert self.ace.attachment is not None
        experts = {id(p) for module in self.ace.attachment.experts() for p in module.parameters()}
        routed = next(iter(self.ace.deciders.values())).experts
        sizes = [(p.numel() * p.element_size(), id(p) in experts) for p in self.model.parameters()]
        embeddings, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings()
        unread = 0 if head is not None and head.weight is embeddings else embeddings.numel() * embeddings.element_size()
        dense = sum(size for size, expert in sizes if not expert) - unread
        return dense + sum(size for size, expert in sizes if expert) * executed / routed


def _middle(times: Sequence[Timing]) -> Timing:
    walls, gpus = sorted(t.wall for t in times), sorted(t.gpu for t in times if t.gpu is not None)
    return Timing(walls[len(walls) // 2], gpus[len(gpus) // 2] if gpus else None, walls[-1] - walls[0])


def read_rate(device: torch.device) -> float | None:
    """TB/s at which the GPU reads memory once, the ceiling of every decode step."""
    if device.type != "cuda":
        return None
    big = torch.empty(1 << 30, dtype=torch.float32, device=device).normal_()
    times = [gpu for _, gpu in (once(big.sum, device) for _ in range(6)) if gpu is not None]
    return big.numel() * 4 / min(times) / 1e9


def describe(device: torch.device, inputs: Mapping[str, str]) -> dict[str, Any]:
    """Collect what is stored beside the rows."""
    record, name = provenance(device, inputs), "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    machine = {"device": name, "torch": torch.__version__, "read_tb_s": read_rate(device)}
    return {"command": record["command"], **machine, "provenance": record}
