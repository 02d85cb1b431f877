"""Which token is prefill, decode or padding: from the query lengths of a step, by hooks in both generations of the runner."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serving_parts import FOUND

from ace_moe.errors import IntegrationError
from ace_moe.integrations.vllm import phases as phases_module
from ace_moe.integrations.vllm import skipping
from ace_moe.integrations.vllm.phases import PADDING, Phases


def test_phases_come_from_query_lengths() -> None:
    phases = Phases(16, "cpu")
    assert (phases.of(16) == PADDING).all()
    phases.mark(np.array([1, 3, 1]))
    assert phases.of(7).tolist() == [1, 0, 0, 0, 1, PADDING, PADDING]
    assert phases.of(2, start=1).tolist() == [0, 0]  # the part of a rank under sequence parallelism
    phases.decode_length = 3  # speculative decoding: two drafted tokens
    phases.mark(np.array([3, 4]))
    assert phases.of(8).tolist() == [1, 1, 1, 0, 0, 0, 0, PADDING]
    phases.clear()
    assert (phases.of(16) == PADDING).all()


def test_a_steady_decode_writes_nothing() -> None:
    phases = Phases(16, "cpu")
    phases.mark(np.array([1, 1]))
    phases.buffer[0] = 7
    phases.mark(np.array([1, 1]))
    assert phases.buffer[0] == 7
    phases.mark(np.array([1, 1, 1]))
    assert phases.of(4).tolist() == [1, 1, 1, PADDING]


def test_a_step_larger_than_announced_is_an_error() -> None:
    with pytest.raises(IntegrationError, match="larger than"):
        Phases(16, "cpu").of(5000)


def test_runner_hooks(configured: Callable[..., Any]) -> None:
    """Both generations of vLLM's model runner, by their signatures; an engine without skipping passes through."""

    class Old:
        def __init__(self, config: Any):
            self.vllm_config, self.uniform_decode_query_len = config, 2

        def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> str:
            return "inputs"

        def _dummy_run(self, tokens: int) -> int:
            return tokens

        def initialize_kv_cache(self, config: Any) -> str:
            return "cache"

    class New(Old):  # in vLLM they are not related
        def prepare_inputs(self, *args: Any) -> Any:
            return SimpleNamespace(num_scheduled_tokens=np.array([1, 5], dtype=np.int32))

    phases_module._hook(Old, "_prepare_inputs", phases_module._lengths_v1, skipping.find)
    phases_module._hook(New, "prepare_inputs", phases_module._lengths_v2, skipping.find)
    config = configured()
    own = skipping.find(config)
    for n in range(6):
        own.add(n, f"model.layers.{n}", FOUND)
    for runner in (Old(config), Old(SimpleNamespace(additional_config={}))):
        assert runner.initialize_kv_cache(None) == "cache"
        assert runner._prepare_inputs(None, num_scheduled_tokens=np.array([2, 3])) == "inputs"
        assert own.phases.decode_length == 2 and own.phases.of(6).tolist() == [1, 1, 0, 0, 0, PADDING]
    New(config).prepare_inputs(None, None)
    assert own.phases.of(7).tolist() == [1, 0, 0, 0, 0, 0, PADDING]
    assert Old(config)._dummy_run(4) == 4 and (own.phases.of(7) == PADDING).all()


@pytest.mark.vllm
def test_vllm_has_what_is_hooked() -> None:
    """In both generations of the model runner, of which a CPU runs only the first."""
    import vllm

    root = Path(vllm.__file__).parent / "v1" / "worker"
    for file, prepare in (("gpu_model_runner.py", "_prepare_inputs"), ("gpu/model_runner.py", "prepare_inputs")):
        tree = ast.parse((root / file).read_text())
        (runner,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "GPUModelRunner"]
        methods = {n.name: [a.arg for a in n.args.args] for n in runner.body if isinstance(n, ast.FunctionDef)}
        assert {prepare, "_dummy_run", "initialize_kv_cache"} <= set(methods)
        assert file.startswith("gpu/") or methods[prepare][2] == "num_scheduled_tokens"
    assert "num_scheduled_tokens: np.ndarray" in (root / "gpu/input_batch.py").read_text()
