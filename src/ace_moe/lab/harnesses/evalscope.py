"""EvalScope with skipping: a model API named `ace`, and our tasks from local files as benchmarks of the harness.

    import ace_moe.lab.harnesses.evalscope
    from evalscope import TaskConfig, run_task
    run_task(TaskConfig(model=MODEL, eval_type="ace", model_args={"plan": "plan.safetensors", "skip": 0.5}, datasets=["arc"]))

The plan is attached once, when the model is loaded, not around each call: EvalScope's threads share one model.
EvalScope asks by generation alone, so a choice is right if the generated letter is.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import IntegrationError
from ..tasks.catalogue import LONG, TASKS, Row, TaskSpec, check_source
from ..tasks.evaluate import Harness
from .base import data_of, folder_without_code, load_ace

try:
    from evalscope import TaskConfig, run_task
    from evalscope.api.benchmark import BenchmarkMeta, DefaultDataAdapter, MultiChoiceAdapter
    from evalscope.api.dataset import Sample
    from evalscope.api.evaluator import TaskState
    from evalscope.api.metric import Score
    from evalscope.api.registry import register_benchmark, register_model_api
    from evalscope.models.modelscope import ModelScopeAPI
    from evalscope.utils.multi_choices import MultipleChoiceTemplate
except ImportError as error:
    raise IntegrationError(
        f"EvalScope cannot be used here ({error}). What it needs comes with: pip install 'ace-moe[eval]'"
    ) from error

CHOICE, TEXT = "ace_choice", "ace_text"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class AceAPI(ModelScopeAPI):
    """EvalScope's own transformers model with a plan attached."""

    def __init__(self, model_name: str, plan: str, skip: float = 0.0, **options: Any):
        self.ace = load_ace(plan, skip, options)
        # EvalScope trusts a checkpoint's code; the folder is looked at first, and is the one that is loaded
        folder = folder_without_code(options.pop("model_path", model_name))
        super().__init__(model_name, model_path=folder, **options)
        self.ace.attach(self.model)


@register_model_api(name="ace")
def ace_api() -> type[AceAPI]:
    return AceAPI


# ---- our tasks ----------------------------------------------------------------------------------------------------


def _meta(name: str, template: str) -> BenchmarkMeta:
    return BenchmarkMeta(
        name=name,
        pretty_name=name,
        description="Questions from a local file.",
        dataset_id=name,
        subset_list=["default"],
        metric_list=["acc"],
        few_shot_num=0,
        eval_split="test",
        prompt_template=template,
    )


@register_benchmark(_meta(CHOICE, MultipleChoiceTemplate.SINGLE_ANSWER))
class ChoiceAdapter(MultiChoiceAdapter):
    """Rows of one of our tasks with choices, asked with EvalScope's template."""

    def load_from_disk(self, **kwargs: Any) -> Any:
        return super().load_from_disk(use_local_loader=True)

    def record_to_sample(self, record: dict[str, Any]) -> Sample:
        return Sample(input=record["question"], choices=record["choices"], target=LETTERS[record["gold"]])


@register_benchmark(_meta(TEXT, "{question}"))
class TextAdapter(DefaultDataAdapter):
    """Rows of one of our tasks that are answered with a text, judged by the task."""

    def load_from_disk(self, **kwargs: Any) -> Any:
        return super().load_from_disk(use_local_loader=True)

    def record_to_sample(self, record: dict[str, Any]) -> Sample:
        return Sample(input=record["question"], target="", metadata={"task": record["task"], "row": record["row"]})

    def match_score(
        self, original_prediction: str, filtered_prediction: str, reference: str, task_state: TaskState
    ) -> Score:
        task, row = TASKS[task_state.metadata["task"]], task_state.metadata["row"]
        value = {"acc": float(_is_right(task, row, original_prediction))}
        return Score(value=value, prediction=original_prediction, main_score_name="acc")


def _is_right(task: TaskSpec, row: Row, text: str) -> bool:
    if task.last_word is not None:
        return text.split()[:1] == [task.last_word(row)]
    assert task.right is not None
    return task.right(row, text)


def _record(task: TaskSpec, row: Row) -> dict[str, Any]:
    """A row as our adapters read it."""
    if task.choices is None:
        return {"question": task.ask(row), "task": task.name, "row": dict(row)}
    assert task.gold is not None
    question = task.ask(row).removesuffix("\nAnswer:").removeprefix("Question: ")
    return {"question": question, "choices": task.choices(row), "gold": task.gold(row)}


class EvalScope(Harness):
    """The harness with one model in it, for `ace eval`. `model` may be EvalScope's own, to compare with."""

    def __init__(self, model: ModelScopeAPI, cap: int | None = None, batch: int = 1):
        self.model, self.cap, self.batch = model, cap, batch

    def ask(self, name: str, rows: Sequence[Row] | None, limit: int | None) -> tuple[str, list[float]]:
        scores = [review["sample_score"]["score"] for review in self.reviews(name, rows, limit)]
        return scores[0]["main_score_name"], [float(s["value"][s["main_score_name"]]) for s in scores]

    def reviews(self, name: str, rows: Sequence[Row] | None, limit: int | None) -> list[dict[str, Any]]:
        """EvalScope's own record of each question: prompt, answer, score."""
        with tempfile.TemporaryDirectory(prefix="ace-evalscope-") as folder:
            with data_of(f"task {name!r}"):
                run_task(self._config(name, rows, limit, Path(folder)))
            files = sorted((Path(folder) / "reviews").rglob("*.jsonl"))
            found = [[json.loads(row) for row in file.read_text(encoding="utf-8").split("\n") if row] for file in files]
        return [review for subset in found for review in sorted(subset, key=lambda review: review["index"])]

    def _config(self, name: str, rows: Sequence[Row] | None, limit: int | None, folder: Path) -> TaskConfig:
        task = TASKS.get(name)
        local = self._local(task, rows, folder) if task and rows is not None else None
        benchmark, arguments = local or self._theirs(name, task)
        cap = self.cap or (task.cap if task else LONG)
        return TaskConfig(
            model=self.model,
            model_id="ace",
            datasets=[benchmark],
            dataset_args={benchmark: {"few_shot_num": 0, **arguments}},
            generation_config={"max_tokens": cap, "do_sample": False, "batch_size": self.batch},
            eval_batch_size=self.batch,
            limit=limit,
            work_dir=str(folder),
            no_timestamp=True,
            seed=42,
        )

    def _local(self, task: TaskSpec, rows: Sequence[Row], folder: Path) -> tuple[str, dict[str, Any]]:
        data = folder / "data"
        data.mkdir()
        lines = [json.dumps(_record(task, row)) for row in rows]
        (data / f"{task.name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        name = TEXT if task.choices is None else CHOICE
        return name, {"local_path": str(data), "subset_list": [task.name]}

    def _theirs(self, name: str, task: TaskSpec | None) -> tuple[str, dict[str, Any]]:
        if task is not None:
            check_source(task, "evalscope", local=False)
        benchmark, _, subset = (task.hub["evalscope"] if task else name).partition(":")
        return benchmark, {"subset_list": [subset]} if subset else {}
