"""What the scripts share: their options, what made a result and where it goes, ways that are timed in turn."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Row = dict[str, Any]


def parser(doc: str | None, must_store: bool = False, **defaults: Any) -> argparse.ArgumentParser:
    """`-o`, and an option for each default that needs no words: its type is the default's, and a list takes several."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("-o", "--out", type=Path, required=must_store, help="file for the result")
    for name, default in defaults.items():
        flag, many = f"--{name.replace('_', '-')}", isinstance(default, list)
        if default is False:
            made.add_argument(flag, action="store_true")
        else:
            kind = {"type": type(default[0]), "nargs": "+"} if many else {"type": type(default)}
            made.add_argument(flag, default=default, **kind)
    return made


def engine_options(made: argparse.ArgumentParser, memory: float, cache: float, length: int) -> argparse.ArgumentParser:
    """What every script that starts vLLM has."""
    made.add_argument("--eager", action="store_true", help="no compilation, no CUDA graphs")
    made.add_argument("--memory", type=float, default=memory, help="share of the memory for each engine")
    made.add_argument("--cache", type=float, default=cache, help="GiB of KV cache for each engine")
    made.add_argument("--length", type=int, default=length, help="longest sequence")
    return made


# ---- results ------------------------------------------------------------------------------------------------------------


def made_here(**facts: Any) -> Row:
    """The command as it was typed, with base names of files, and the machine."""
    from ace_moe.provenance import command

    return {"command": f"python benchmarks/{command(sys.argv)}", "device": device(), **facts}


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def store(path: Path | None, result: Mapping[str, Any]) -> None:
    """Whole, where a file was asked for: what was measured so far is not lost with the run."""
    from ace_moe.files import write_whole

    if path is not None:
        write_whole(path, (json.dumps(result, indent=1) + "\n").encode(), "The result")


def bare_plan(model: Any, name: str) -> Any:
    """A plan without tables, for policies that need none: of random weights they would say nothing."""
    from ace_moe.checkpoint import MoEModel
    from ace_moe.plan import Plan

    moe = MoEModel.of(model)
    return Plan({site.key: {} for site in moe.sites}, moe.fingerprint(), name)


# ---- timing -------------------------------------------------------------------------------------------------------------


def in_turn(ways: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Each way once a round, so that a machine that slows down slows all of them."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, once in ways.items():
            found[name].append(once())
    return found


def settled(realised: Callable[[float], float], ratio: float, rounds: int) -> float:
    """τ that realises the ratio at a size: a few tokens are not like a thousand."""
    low, high = 0.0, 1.0
    for _ in range(rounds if ratio else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if realised(middle) < ratio else (low, middle)
    return high if ratio else 0.0
