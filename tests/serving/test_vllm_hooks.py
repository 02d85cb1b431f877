"""How vLLM tells us of its steps: hooks in both generations of the model runner, and what vLLM must have for them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from serving_parts import FOUND

from ace_moe.budget import Budget
from ace_moe.decider import PADDING, row_of
from ace_moe.engines.vllm import skipping
from ace_moe.engines.vllm import steps as hooks
from ace_moe.engines.vllm.requests import carry
from ace_moe.engines.vllm.steps import step_v1, step_v2

P, D, V = (row_of(phase) for phase in ("prefill", "decode", "verify"))


class Old:
    """The first generation, by its signatures."""

    def __init__(self, config: Any):
        self.vllm_config, self.seen = config, []  # type: ignore[var-annotated]
        self.requests = dict.fromkeys("ab")
        self.input_batch = SimpleNamespace(
            req_ids=["a", "b"], num_computed_tokens_cpu=np.array([9, 0, 77]), num_prompt_tokens=np.array([5, 3, 77])
        )

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> str:
        return "inputs"

    def _dummy_run(self, num_tokens: int, mode: Any = None, is_profile: bool = False) -> int:
        own = skipping.find(self.vllm_config)
        self.seen = [] if own is None else [own.classes.counting, own.classes.buffer[:4].tolist()]
        return num_tokens

    def initialize_kv_cache(self, config: Any) -> str:
        return "cache"


class New:
    """The second generation: is_profile by keyword alone."""

    def __init__(self, config: Any, batch: Any = None, prompts: Any = None):
        self.vllm_config, self.batch, self.seen = config, batch, []  # type: ignore[var-annotated]
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.asarray(prompts)), req_id_to_index={})

    def prepare_inputs(self, scheduler_output: Any, state: Any, desc: Any, loras: int) -> Any:
        return self.batch

    def _dummy_run(
        self, num_tokens: int, *args: Any, skip_attn: bool = False, is_profile: bool = False, **kw: Any
    ) -> int:
        self.seen = [skipping.find(self.vllm_config).classes.counting]  # type: ignore[union-attr]
        return num_tokens

    initialize_kv_cache = Old.initialize_kv_cache


class Worker:
    def __init__(self, config: Any):
        self.vllm_config = config

    def compile_or_warm_up_model(self) -> str:
        return "times"


hooks.hook_runner(Old, "_prepare_inputs", step_v1, skipping.find)
hooks.hook_runner(New, "prepare_inputs", step_v2, skipping.find)
hooks.hook_worker(Worker, skipping.find)


def scheduled(new: Any = (), finished: Any = (), **drafts: list[int]) -> Any:
    return SimpleNamespace(
        scheduled_spec_decode_tokens=drafts, scheduled_new_reqs=list(new), finished_req_ids=set(finished)
    )


def request(name: str, skip: Any = None) -> Any:
    """A request as admission leaves it."""
    params = SimpleNamespace(extra_args={} if skip is not None else None)
    if skip is not None:
        carry(params, Budget.parse(skip))
    return SimpleNamespace(req_id=name, sampling_params=params)


def batch(**facts: Any) -> Any:
    """vLLM's own record where it can be imported, else one with the fields we read."""
    tokens = int(facts["num_scheduled_tokens"].sum())
    given = {"num_draft_tokens_per_req": None, "num_tokens": tokens, "query_start_loc": None, **facts}
    try:
        from vllm.v1.worker.gpu.input_batch import InputBatch
    except ImportError:
        return SimpleNamespace(**given)
    return InputBatch(**dict.fromkeys(f.name for f in fields(InputBatch)) | given)  # type: ignore[arg-type]


@pytest.fixture
def own(configured: Callable[..., Any], mapped: Path) -> Any:
    """The skipping of a configuration with all its layers, on the runners' `vllm_config`."""
    config = configured(plan=mapped)
    found = skipping.find(config)
    assert found is not None
    for n in range(6):
        found.add(n, f"model.layers.{n}", FOUND)
    return SimpleNamespace(config=config, skipping=found, classes=found.classes)


def at(own: Any, tokens: int) -> list[int]:
    return own.classes.buffer[:tokens].tolist()


def test_first_generation(own: Any) -> None:
    runner = Old(own.config)
    assert runner.initialize_kv_cache(None) == "cache"
    assert runner._prepare_inputs(scheduled(), num_scheduled_tokens=np.array([2, 3])) == "inputs"
    assert at(own, 6) == [D, D, P, P, P, PADDING]
    runner._prepare_inputs(scheduled(a=[-1, -1]), np.array([3, 1]))
    assert at(own, 6) == [D, V, V, P, PADDING, PADDING]


def test_requests_with_budgets_of_their_own(own: Any) -> None:
    """First generation: told once when a request is new, kept while it runs, its class and counters its own."""
    runner, skips = Old(own.config), own.skipping
    skips.change(threshold=0.1)
    runner._prepare_inputs(scheduled([request("a"), request("b", 0.2)]), np.array([2, 3]))
    assert at(own, 6) == [D, D, *[row_of("prefill", 1)] * 3, PADDING]
    runner._prepare_inputs(scheduled(), np.array([1, 1]))
    assert at(own, 3) == [D, row_of("prefill", 1), PADDING]
    runner._prepare_inputs(scheduled([request("a", {"prefill": 0, "decode": 0.5})]), np.array([1, 1]))
    assert at(own, 2) == [row_of("decode", 2), row_of("prefill", 1)]
    assert skips.part().budgets == ["0.20", "0.00/0.50"]
    by_budget = {t.budget: t.threshold for t in skips.deciders.plan.thresholds}
    classes = [D, row_of("prefill", 1), row_of("decode", 1), row_of("prefill", 2), row_of("decode", 2)]
    wanted = [0.1, by_budget[0.2], by_budget[0.2], 0, by_budget[0.5]]
    assert [skips.part().tau[c] for c in classes] == pytest.approx(wanted)
    del runner.requests["a"]
    runner._prepare_inputs(scheduled(finished=["a"]), np.array([1, 1]))
    assert at(own, 2) == [D, row_of("prefill", 1)]


def test_a_name_that_comes_back_is_another_request(own: Any) -> None:
    """vLLM: a request that was given up may be sent again under its name, and end and begin in one step."""
    runner = Old(own.config)
    runner._prepare_inputs(scheduled([request("a", 0.2)]), np.array([1, 1]))
    runner._prepare_inputs(scheduled([request("a", 0.5)], finished=["a"]), np.array([1, 1]))
    assert at(own, 2) == [row_of("decode", 2), P]
    runner._prepare_inputs(scheduled([request("a")], finished=["a"]), np.array([1, 1]))
    assert at(own, 2) == [D, P]


def test_requests_that_ended_in_a_step_without_tokens_are_forgotten(own: Any) -> None:
    """Such a step is never prepared: the last request of a quiet server ends so."""
    one = {name: np.ones(1, dtype=np.int32) for name in ("num_scheduled_tokens", "num_computed_tokens_np")}
    new = New(
        own.config, batch(req_ids=["b"], idx_mapping_np=np.zeros(1, dtype=np.int64), **one), np.ones(1, dtype=np.int32)
    )
    for prepare in (
        lambda: Old(own.config)._prepare_inputs(scheduled(), np.array([1, 1])),
        lambda: new.prepare_inputs(scheduled(), None, None, 0),
    ):
        own.skipping.owned = {f"gone-{n}": 1 for n in range(3)}
        prepare()
        assert not own.skipping.owned


def test_second_generation(own: Any) -> None:
    """Requests are looked up by their slot; what a preempted one generated is no prompt, though its prefill covers it."""
    facts = {
        "num_scheduled_tokens": np.array([1, 5], dtype=np.int32), "idx_mapping_np": np.array([7, 2]),
        "num_computed_tokens_np": np.array([30, 0], dtype=np.int32), "prefill_len_np": np.array([20, 5]),
        "req_ids": ["a", "b"],
    }  # fmt: skip
    prompts = np.zeros(16, dtype=np.int32)
    prompts[[7, 2]] = 20, 3
    assert New(own.config, batch(**facts), prompts).prepare_inputs(scheduled(), None, None, 0).idx_mapping_np[0] == 7
    assert at(own, 7) == [D, P, P, P, D, D, PADDING]
    drafts = {"num_draft_tokens_per_req": np.array([0, 3], dtype=np.int32)}
    facts["num_computed_tokens_np"] = np.array([31, 5], dtype=np.int32)
    New(own.config, batch(**facts, **drafts), prompts).prepare_inputs(scheduled(), None, None, num_active_loras := 0)
    assert at(own, 7) == [D, D, D, V, V, V, PADDING] and num_active_loras == 0
    trimmed = {
        "num_tokens": 4,
        "query_start_loc": torch.tensor([0, 1, 4, 4], dtype=torch.int32),
    }  # padded to three requests
    New(own.config, batch(**facts, **drafts, **trimmed), prompts).prepare_inputs(scheduled(), None, None, 0)
    assert at(own, 7) == [D, D, D, V, PADDING, PADDING, PADDING]


def test_passes_without_requests(own: Any) -> None:
    """A measuring pass runs experts as for a prompt and counts nothing; any other is all padding."""
    old, new = Old(own.config), New(own.config)
    for measure in (lambda: old._dummy_run(4, None, True), lambda: old._dummy_run(4, is_profile=True)):
        assert measure() == 4 and old.seen == [False, [P] * 4]
        assert at(own, 1088) == [PADDING] * 1088 and own.classes.counting
    own.classes.mark(hooks.Step(np.array([2]), np.array([9]), np.array([4])))
    assert old._dummy_run(4) == 4 and old.seen == [True, [PADDING] * 4]
    assert new._dummy_run(4, is_profile=True, skip_attn=True) == 4 and new.seen == [False]
    assert new._dummy_run(4, uniform_decode=True) == 4 and new.seen == [True]
    with pytest.raises(TypeError):
        old._dummy_run()  # type: ignore[call-arg]


def test_a_measuring_pass_leaves_counters_at_zero(own: Any) -> None:
    made, given = own.skipping.deciders["0"], (torch.arange(8).repeat(4, 1).int(), torch.full((4, 8), 0.125))
    own.skipping.change(threshold=0.5)
    with own.skipping.dummy(profile=True):
        ids, _ = made.decide(*given)
    assert made.counts.sum() == 0 and (ids >= 0).sum() == 4  # it runs as a prompt does: its experts, and no padding
    own.classes.mark(hooks.Step(np.array([4]), np.array([9]), np.array([4])))
    made.decide(*given)
    assert made.counts.tolist()[row_of("decode")] == [32, 4, 0]


def test_what_a_warm_up_ran_is_forgotten(own: Any) -> None:
    """The second generation warms up with requests of its own making, through the same door as real ones."""
    own.classes.mark(hooks.Step(np.array([3]), np.array([0]), np.array([3])))
    own.skipping.deciders["0"].counts.fill_(7)
    assert Worker(own.config).compile_or_warm_up_model() == "times"
    assert at(own, 4) == [PADDING] * 4 and own.skipping.deciders["0"].counts.sum() == 0


def test_an_engine_without_skipping_passes_through(own: Any) -> None:
    other = SimpleNamespace(additional_config={})
    runner = Old(other)
    own.classes.mark(hooks.Step(np.array([2]), np.array([9]), np.array([4])))
    assert runner.initialize_kv_cache(None) == "cache" and runner._dummy_run(4, is_profile=True) == 4
    assert runner._prepare_inputs(scheduled(), np.array([2, 3])) == "inputs"
    assert Worker(other).compile_or_warm_up_model() == "times"
    assert at(own, 4) == [D, D, PADDING, PADDING]


def test_a_class_is_hooked_once() -> None:
    before = Old._prepare_inputs, Worker.compile_or_warm_up_model
    hooks.hook_runner(Old, "_prepare_inputs", step_v1, skipping.find)
    hooks.hook_worker(Worker, skipping.find)
    assert (Old._prepare_inputs, Worker.compile_or_warm_up_model) == before
    assert list(inspect.signature(Old._prepare_inputs).parameters)[1:] == ["scheduler_output", "num_scheduled_tokens"]


# ---- what vLLM must have: the second generation needs a GPU, so its source is read ----------------------------------


def methods_of(file: Path, name: str) -> dict[str, ast.arguments]:
    tree = ast.parse(file.read_text())
    (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return {n.name: n.args for n in found.body if isinstance(n, ast.FunctionDef)}


@pytest.mark.vllm
def test_vllm_has_what_is_hooked() -> None:
    """In both generations of the model runner, of which a CPU runs only the first."""
    import vllm

    root = Path(vllm.__file__).parent / "v1" / "worker"
    for file, prepare in (("gpu_model_runner.py", "_prepare_inputs"), ("gpu/model_runner.py", "prepare_inputs")):
        methods = methods_of(root / file, "GPUModelRunner")
        assert {prepare, "_dummy_run", "initialize_kv_cache"} <= set(methods)
        dummy = methods["_dummy_run"]
        assert "is_profile" in [a.arg for a in (*dummy.args, *dummy.kwonlyargs)]
        wanted = ["self", "scheduler_output"] + (["num_scheduled_tokens"] if prepare.startswith("_") else [])
        assert [a.arg for a in methods[prepare].args][: len(wanted)] == wanted
    worker = methods_of(root / "gpu_worker.py", "Worker")
    assert "compile_or_warm_up_model" in worker


@pytest.mark.vllm
def test_vllm_has_what_is_read() -> None:
    import vllm

    root = Path(vllm.__file__).parent / "v1" / "worker"
    record = (root / "gpu/input_batch.py").read_text()
    for name, kind in (
        ("num_scheduled_tokens", "np.ndarray"), ("idx_mapping_np", "np.ndarray"),
        ("num_computed_tokens_np", "np.ndarray"), ("num_tokens", "int"), ("query_start_loc", "torch.Tensor"),
        ("num_draft_tokens_per_req", "np.ndarray | None"),
    ):  # fmt: skip
        assert f"    {name}: {kind}\n" in record, name
    assert "self.prompt_len = UvaBackedTensor(" in (root / "gpu/states.py").read_text()
    assert "self.np = " in (root / "gpu/buffer_utils.py").read_text()
    assert "self.req_states" in (root / "gpu/model_runner.py").read_text()
    old = (root / "gpu_input_batch.py").read_text()
    for name in ("self.num_prompt_tokens = ", "self.num_computed_tokens_cpu = ", "def req_ids(self)"):
        assert name in old, name
    assert "self.requests: dict[str, CachedRequestState] = {}" in (root / "gpu_model_runner.py").read_text()
    assert "self.req_id_to_index: dict[str, int] = {}" in (root / "gpu/states.py").read_text()
    scheduled_output = (root.parent / "core/sched/output.py").read_text()
    assert "    scheduled_spec_decode_tokens: dict[str, list[int]]\n" in scheduled_output
