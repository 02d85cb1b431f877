"""What is fuzzed: each target takes bytes from outside and may answer, or raise an error of ours, and nothing else."""

from __future__ import annotations

import asyncio
import json
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ace_moe import ACE, AceError, Plan
from ace_moe.checkpoint.model import MoEModel, load_config
from ace_moe.checkpoint.source import CheckpointSource
from ace_moe.checkpoint.structure import hollow_twin
from ace_moe.cli import show
from ace_moe.cli.common import parse_budgets
from ace_moe.cli.serving import parse_kernels, refuse_flags, take_additional
from ace_moe.engines.vllm.http import AceMiddleware
from ace_moe.lab.compare.grid import parse_gains, parse_methods
from ace_moe.lab.report.page import write_page
from ace_moe.plan.file import OPENING, seal

Target = Callable[[bytes], None]
SIZES = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {
    "num_key_value_heads": 1,
    "head_dim": 4,
    "moe_intermediate_size": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@cache
def scratch() -> Path:
    """A folder of this process, in memory where there is one."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="ace-fuzz-", dir=shared if shared.is_dir() else None))


@cache
def checkpoint() -> Path:
    """The smallest model there is, whose files are replaced one at a time."""
    torch.manual_seed(0)
    folder = scratch() / "model"
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).save_pretrained(folder)
    return folder


@cache
def opened() -> tuple[Any, list[Any]]:
    config = load_config(checkpoint())
    return hollow_twin(config), MoEModel.open(checkpoint()).sites


def plan(data: bytes) -> None:
    """A plan file, under a checksum that is right, and what commands do with it."""
    path = scratch() / "plan.safetensors"
    path.write_bytes(seal(data) if data[8:].startswith(OPENING) else data)
    found = Plan.load(path)
    json.dumps(show.plan_json(found))
    assert found.check_model(found.fingerprint) is found
    with suppress(AceError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ACE(found, 0.5)


def header(data: bytes) -> None:
    """A shard of a checkpoint, read as far as the tables need it."""
    twin, sites = opened()
    folder = scratch() / "shards"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(data)
    source = CheckpointSource(folder, twin)
    for site in sites:
        source.read(site.parameter_names())


def config(data: bytes) -> None:
    """A config.json, and the model it describes."""
    folder = scratch() / "config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(data)
    found = load_config(folder)
    if _size(found) < 1 << 20:  # building a large one takes long and is nobody's mistake
        hollow_twin(found)


def _size(found: Any) -> float:
    """Layers × experts, or so; a value that is no number is for the model to refuse."""
    text = found.get_text_config()
    counts = [
        getattr(text, n, 1) for n in ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts")
    ]
    return float(torch.tensor([max(1, c) for c in counts if isinstance(c, (int, float))], dtype=torch.float64).prod())


def results(data: bytes) -> None:
    """A results file, and the page made of it."""
    path = scratch() / "results.json"
    path.write_bytes(data)
    write_page([path], scratch() / "page.html")


def body(data: bytes) -> None:
    """A POST to /ace: always one reply, and never a server error."""
    app = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(collective_rpc=_nothing), args=None))
    scope = {
        "type": "http",
        "path": "/ace",
        "method": "POST",
        "headers": [(b"content-type", b"application/json")],
        "app": app,
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(AceMiddleware(app)(scope, receive, send))
    assert [m["type"] for m in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] in (200, 400, 413), sent


async def _nothing(method: str, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"counts": {}, "tau": [0.0] * 4}]


def values(data: bytes) -> None:
    """What is typed behind the options of commands."""
    text = data.decode("utf-8", "surrogateescape")
    for parse in (parse_budgets, parse_kernels, parse_gains, parse_methods):
        with suppress(AceError):
            parse(text)  # type: ignore[operator]
    for read in (refuse_flags, take_additional):
        with suppress(AceError):
            read(["--additional-config", text, *text.split()])  # type: ignore[operator]


TARGETS: dict[str, Target] = {t.__name__: t for t in (plan, header, config, results, body, values)}
