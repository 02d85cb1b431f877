"""One benchmark run: stock and ours at several ratios over a grid of prompt lengths and batch sizes, into one JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..ace import ACE
from ..budget import Histogram
from ..offline import build_plan
from .latency import Decoder, Timing, first_token, random_ids

PREFILL_GRID = ((1024, 1), (1024, 4), (1024, 16))
DECODE_GRID = (1, 4, 16, 64)


@dataclass(frozen=True)
class Row:
    """One measurement."""

    what: str
    path: str
    tokens: int
    batch: int
    requested: float
    realised: float
    wall_ms: float
    gpu_ms: float | None
    spread_ms: float


class Bench:
    """Measures one model. `say` gets each row as it comes."""

    def __init__(self, model: PreTrainedModel, ratios: Sequence[float], say: Callable[[Row], None]):
        self.model, self.ratios, self.say = model, ratios, say
        self.ace = ACE(build_plan(model))
        self.taus = self._thresholds()

    @torch.no_grad()
    def _thresholds(self) -> dict[float, float]:
        """τ for each ratio on random tokens: the text a random model knows."""
        seen = Histogram()
        with self.ace(self.model):
            for skipper in self.ace.skippers:
                skipper.observer = seen
            self.model(input_ids=random_ids(self.model, 1, 1024), use_cache=False, logits_to_keep=1)
        return {ratio: seen.threshold(ratio) for ratio in self.ratios}

    def _row(self, what: str, path: str, size: tuple[int, int], ratio: float, realised: float, timing: Timing) -> Row:
        row = Row(what, path, *size, ratio, realised, timing.wall, timing.gpu, timing.spread)
        self.say(row)
        return row

    def prefill(self, tokens: int, batch: int, stock: Sequence[str]) -> Iterator[Row]:
        for name in stock:
            self.model.set_experts_implementation(name)
            yield self._row("ttft", name, (tokens, batch), 0.0, 0.0, first_token(self.model, batch, tokens))
        with self.ace(self.model):
            for ratio in self.ratios:
                self.ace.set_threshold(self.taus[ratio])
                self.ace.reset()
                timing = first_token(self.model, batch, tokens)
                yield self._row("ttft", "ace", (tokens, batch), ratio, self.ace.realised, timing)

    def decode(self, batch: int, stock: Sequence[str]) -> Iterator[Row]:
        for name in stock:
            self.model.set_experts_implementation(name)
            yield self._row("tpot", name, (1, batch), 0.0, 0.0, Decoder(self.model, batch).time())
        with self.ace(self.model):
            decoder = Decoder(self.model, batch)
            for ratio in self.ratios:
                self.ace.set_threshold(self.taus[ratio])
                self.ace.reset()
                timing = decoder.time()
                yield self._row("tpot", "ace", (1, batch), ratio, self.ace.realised, timing)


def result(command: str, rows: Sequence[Row]) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"command": command, "device": device, "torch": torch.__version__, "rows": [asdict(r) for r in rows]}
