"""lm-eval with skipping: a model named `ace`, and our tasks from local files as tasks of the harness.

    ace lm-eval --model ace --model_args pretrained=MODEL,plan=plan.safetensors,skip=0.5 --tasks arc_easy

lm-eval has no plugin mechanism: importing this module is what registers the model.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...checkpoint.loading import default_device, load_model, load_tokenizer
from ...errors import IntegrationError, TaskError
from ..tasks.catalogue import TASKS, Row, TaskSpec, check_source
from ..tasks.evaluate import Harness
from .base import data_of, load_ace

try:
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise IntegrationError(
        f"lm-eval cannot be used here ({error}). What it needs comes with: pip install 'ace-moe[eval]'"
    ) from error


@register_model("ace")
class AceLM(HFLM):
    """lm-eval's own transformers model with a plan attached. `skip` is one budget, or skip_prefill and skip_decode."""

    def __init__(
        self,
        pretrained: str,
        plan: str,
        skip: float = 0.0,
        skip_prefill: float | None = None,
        skip_decode: float | None = None,
        expand: bool = False,
        **options: Any,
    ):
        phases = {"prefill": skip_prefill, "decode": skip_decode}
        by_phase = {phase: float(value) for phase, value in phases.items() if value is not None}
        self.ace = load_ace(plan, by_phase or float(skip), options)
        options = {"device": default_device(), **options}  # lm-eval's own default is a GPU
        super().__init__(**(expanded(pretrained, options) if expand else {"pretrained": pretrained} | options))
        self.ace.attach(self.model)

    def get_model_info(self) -> dict[str, Any]:
        """Goes into the results file: what was asked for, and what was not executed."""
        return {**super().get_model_info(), "ace": {"settings": self.ace.policy.settings, **self.ace.report()}}


def expanded(pretrained: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options with the model decoded by us, of formats that transformers does not load."""
    loaded = load_model(pretrained, options.get("device"), expand=True)
    return {**options, "pretrained": loaded, "tokenizer": load_tokenizer(pretrained)}


# ---- our tasks ----------------------------------------------------------------------------------------------------


def local_task(task: TaskSpec, rows: Sequence[Row]) -> ConfigurableTask:
    """A task of the harness over rows of ours: by likelihood of choices or of a last word, or by generated text."""
    common = {
        "task": task.name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list([dict(row) for row in rows])},
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": task.ask,
        "metadata": {"version": 1.0},
    }
    return ConfigurableTask(config=common | _scoring(task))


def _scoring(task: TaskSpec) -> dict[str, Any]:
    mean = {"aggregation": "mean", "higher_is_better": True}
    if task.choices is not None:
        metrics = [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}]
        target = {"doc_to_choice": task.choices, "doc_to_target": task.gold}
        return {"output_type": "multiple_choice", "metric_list": metrics, **target}
    if task.last_word is not None:
        word = task.last_word
        perplexity = {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
        metrics = [perplexity, {"metric": "acc", **mean}]
        return {"output_type": "loglikelihood", "metric_list": metrics, "doc_to_target": lambda row: f" {word(row)}"}
    return {
        "output_type": "generate_until",
        "doc_to_target": lambda row: "",
        "metric_list": [{"metric": task.metric, **mean}],
        "process_results": _judge(task),
        "generation_kwargs": {"until": list(task.stop), "do_sample": False, "max_gen_toks": task.cap},
    }


def _judge(task: TaskSpec) -> Callable[[Row, Sequence[str]], dict[str, float]]:
    right = task.right
    assert right is not None
    return lambda row, texts: {task.metric: float(right(row, texts[0]))}


class LmEval(Harness):
    """The harness with one model in it, for `ace eval`."""

    def __init__(self, model: AceLM, chat: bool = False, cap: int | None = None):
        self.model, self.chat, self.cap = model, chat, cap
        self.manager = TaskManager()  # reads the index of all tasks, once

    def ask(self, name: str, rows: Sequence[Row] | None, limit: int | None) -> tuple[str, list[float]]:
        found = self.results(name, rows, limit)
        samples = [sample for task in found["samples"].values() for sample in task]
        metric = next(m for m in ("acc", "exact_match", *samples[0]["metrics"]) if m in samples[0])
        return metric, [float(sample[metric]) for sample in samples]

    def results(self, name: str, rows: Sequence[Row] | None, limit: int | None) -> Mapping[str, Any]:
        """lm-eval's own results of one task."""
        task = TASKS.get(name)
        cap = self.cap or (task.cap if task is not None else None)
        self._check_known(name, task)
        with data_of(f"task {name!r}"):
            found = simple_evaluate(
                self.model,
                tasks=[name if task is None else self._source(task, rows)],
                num_fewshot=0,
                limit=limit,
                log_samples=True,
                bootstrap_iters=0,
                gen_kwargs={"max_gen_toks": cap, "do_sample": False} if cap else None,
                apply_chat_template=self.chat,
                task_manager=self.manager,
            )
        assert found is not None
        return found

    def _check_known(self, name: str, task: TaskSpec | None) -> None:
        if task is None and name not in self.manager.all_tasks:
            near = difflib.get_close_matches(name, [*TASKS, *self.manager.all_tasks], n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise TaskError(
                f"lm-eval has no task {name!r}, and neither have we.{meant} `lm-eval ls tasks` lists its own."
            )

    def _source(self, task: TaskSpec, rows: Sequence[Row] | None) -> ConfigurableTask | str:
        """Rows that are given, rows of the same shape from the hub, or lm-eval's own task."""
        if rows is None and "dataset" in task.hub:
            rows = datasets.load_dataset(task.hub["dataset"], split="test").to_list()
        if rows is not None:
            return local_task(task, rows)
        check_source(task, "lm-eval", local=False)
        return task.hub["lm_eval"]


def main(arguments: Sequence[str]) -> None:
    """lm-eval's own command line, with the model `ace` known to it."""
    import sys

    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *arguments]
    with data_of("a task"):
        cli_evaluate()
