"""lm-eval and EvalScope themselves: at threshold 0 their own model's answers to the last digit, and both run at 50 %."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import PlanError
from ace_moe.lab.tasks.catalogue import TASKS, read_rows
from command import ACE, run_ace

pytestmark = pytest.mark.slow
needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed (ace-moe[eval])")
needs_evalscope = pytest.mark.skipif(
    find_spec("evalscope") is None, reason="EvalScope is not installed (ace-moe[eval])"
)
NAMES = ("arc_easy", "piqa", "lambada")


def questions() -> dict[str, list[dict[str, Any]]]:
    """A few of each task, made of the demo's text."""
    parts = [s.strip() for s in TEXT.read_text(encoding="utf-8").split(" . ") if 40 < len(s) < 160][:12]
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    return {
        "arc_easy": [
            {"query": f"Question: {a}?", "choices": [b, a, "no"], "gold": i % 3} for i, (a, b) in enumerate(pairs)
        ],
        "piqa": [{"goal": a, "sol1": b, "sol2": a, "label": i % 2} for i, (a, b) in enumerate(pairs)],
        "lambada": [{"text": f"{a} {b}"} for a, b in pairs],
        "gsm8k": [{"question": a, "answer": "#### 3"} for a, _ in pairs[:2]],
        "humaneval": [{"prompt": "def f(x):\n", "test": "def check(c):\n    assert c(1)\n", "entry_point": "f"}],
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, rows in questions().items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.safetensors"
    assert run_ace("plan", MODEL, "--tables", "-o", path).code == 0
    small = ("--tokens", 1024, "--window", 256, "--budgets", "0.5", "--no-correct")
    assert run_ace("plan", MODEL, "-p", path, "--text", TEXT, *small).code == 0
    return path


# ---- lm-eval ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ours(plan: Path) -> Any:
    from ace_moe.lab.harnesses.lm_eval import AceLM

    return AceLM(str(MODEL), plan=str(plan), device="cpu")


@needs_lm_eval
@pytest.mark.parametrize("name", NAMES)
def test_lm_eval_at_threshold_0_is_its_own_model(ours: Any, data: Path, name: str) -> None:
    """Scores and every log-likelihood; then 50 %, where something changes."""
    from lm_eval.models.huggingface import HFLM

    from ace_moe.lab.harnesses.lm_eval import LmEval

    rows = read_rows(TASKS[name], data / f"{name}.jsonl")
    ours.ace.set_skip(0.0)
    stock = LmEval(HFLM(str(MODEL), device="cpu")).results(name, rows, None)
    found = LmEval(ours).results(name, rows, None)
    assert found["results"] == stock["results"]
    answers = [[sample["resps"] for sample in run["samples"][name]] for run in (found, stock)]
    assert answers[0] == answers[1]
    harness = LmEval(ours)
    harness.set_skip(0.5)
    skipped = harness.results(name, rows, None)
    assert [sample["resps"] for sample in skipped["samples"][name]] != answers[1]
    assert abs(harness.realised - 0.5) < 0.1
    ours.ace.set_skip(0.0)


@needs_lm_eval
def test_lm_eval_generates_and_judges(ours: Any, data: Path) -> None:
    from ace_moe.lab.harnesses.lm_eval import LmEval

    rows = read_rows(TASKS["gsm8k"], data / "gsm8k.jsonl")
    metric, values = LmEval(ours, cap=8).ask("gsm8k", rows, None)
    assert metric == "exact_match" and len(values) == 2 and set(values) <= {0.0, 1.0}


@needs_lm_eval
def test_a_wrong_plan_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    from ace_moe.lab.harnesses.lm_eval import AceLM

    with pytest.raises(PlanError, match="no plan"):
        AceLM("no-such-model", plan=str(tmp_path / "plan.safetensors"))


@needs_lm_eval
def test_the_harness_command_line_knows_ace(plan: Path, tmp_path: Path) -> None:
    """`ace lm-eval` is lm-eval's own command; a task of the user's own over a local file, results with the ratio."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "the end of the day"}) + "\n", encoding="utf-8")
    config = f"""task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    (tmp_path / "tiny.yaml").write_text(config, encoding="utf-8")
    arguments = [
        *("--model", "ace", "--model_args", f"pretrained={MODEL},plan={plan},skip=0.5"),
        *("--tasks", "tiny", "--include_path", tmp_path, "--device", "cpu", "--output_path", tmp_path / "out"),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    command = [str(part) for part in (ACE, "lm-eval", *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = (tmp_path / "out").rglob("results*.json")
    report = json.loads(written.read_text())["config"]["ace"]
    assert report["settings"]["policy"] == "share" and 0.3 < report["realised"] < 0.7


@needs_lm_eval
def test_ace_eval(plan: Path, data: Path, tmp_path: Path) -> None:
    """The command: dense and 50 %, intervals, paired differences; code only with the flag; continued, not repeated."""
    path = tmp_path / "eval.json"
    options = ("-p", plan, "--data", data, "--device", "cpu", "--skip", "0,0.5", "--max-new-tokens", 8, "-o", path)
    made = run_ace("eval", MODEL, *options, "--tasks", "piqa", "--json")
    assert made.code == 0, made.err
    made = run_ace("eval", MODEL, *options, "--tasks", "piqa,humaneval", "--run-code")
    assert made.code == 0, made.err
    cells = json.loads(path.read_text())["cells"]
    assert [(c["task"], c["skip"]) for c in cells] == [("piqa", 0), ("piqa", 0.5), ("humaneval", 0), ("humaneval", 0.5)]
    assert cells[0]["realised"] == 0 and abs(cells[1]["realised"] - 0.5) < 0.1
    assert cells[1]["change"]["low"] <= cells[1]["change"]["value"] <= cells[1]["change"]["high"]
    assert "piqa" in made.out and "humaneval" in made.out


# ---- EvalScope ----------------------------------------------------------------------------------------------------


@needs_evalscope
@pytest.mark.parametrize("name", NAMES)
def test_evalscope_at_threshold_0_is_its_own_model(plan: Path, data: Path, name: str) -> None:
    """Scores and generated texts; then 50 %."""
    from evalscope.models.modelscope import ModelScopeAPI

    from ace_moe.lab.harnesses.evalscope import AceAPI, EvalScope

    rows = read_rows(TASKS[name], data / f"{name}.jsonl")
    where = {"device_map": "cpu", "precision": "bfloat16"}
    harness = EvalScope(AceAPI(str(MODEL), plan=str(plan), **where), cap=8, batch=3)
    stock, found = (h.reviews(name, rows, None) for h in (EvalScope(ModelScopeAPI(str(MODEL), **where), 8, 3), harness))
    said = [[review["sample_score"]["score"] for review in reviews] for reviews in (stock, found)]
    assert said[0] == said[1] and len(found) == len(rows)
    harness.set_skip(0.5)
    metric, values = harness.ask(name, rows, None)
    assert len(values) == len(rows) and metric in ("acc", "accuracy")
    assert abs(harness.realised - 0.5) < 0.15
    assert harness.ace.report()["padding"] == "not counted"


@needs_evalscope
def test_evalscope_knows_the_model_by_name(plan: Path, tmp_path: Path, data: Path) -> None:
    """As a user writes it: eval_type and model_args, in a process of its own."""
    (tmp_path / "q").mkdir()
    rows = [{"question": r["query"], "A": "x", "B": "y", "answer": "A"} for r in questions()["arc_easy"][:2]]
    (tmp_path / "q" / "default_val.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    code = f"""
import ace_moe.lab.harnesses.evalscope
from evalscope import TaskConfig, run_task
run_task(TaskConfig(
    model={str(MODEL)!r}, eval_type="ace", datasets=["general_mcq"], work_dir={str(tmp_path / "out")!r},
    model_args={{"plan": {str(plan)!r}, "skip": 0.5, "device_map": "cpu", "precision": "bfloat16"}},
    dataset_args={{"general_mcq": {{"local_path": {str(tmp_path / "q")!r}, "subset_list": ["default"]}}}},
    generation_config={{"max_tokens": 4, "do_sample": False}},
))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert list((tmp_path / "out").rglob("reports/**/*.json"))


# ---- what is not there --------------------------------------------------------------------------------------------------


@needs_lm_eval
def test_data_that_is_not_there_is_named(plan: Path, tmp_path: Path) -> None:
    """Offline, without files: the cause is said, and what to do; a name nobody has is no missing file."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    for task, said in (("hellaswag", "The data of task 'hellaswag' could not be had"), ("helaswag", "Did you mean")):
        command = [ACE, "eval", MODEL, "-p", plan, "--skip", "0", "--tasks", task, "-o", tmp_path / "eval.json"]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
        assert done.returncode == 1 and said in done.stderr and "permissions" not in done.stderr, done.stderr[-1500:]


@needs_lm_eval
def test_simple_evaluate_by_name(plan: Path, data: Path) -> None:
    """As lm-eval's users write it in Python; on a machine without a GPU nobody asks for one."""
    from lm_eval import simple_evaluate

    from ace_moe.lab.harnesses.lm_eval import local_task

    rows = read_rows(TASKS["piqa"], data / "piqa.jsonl")
    arguments = {"pretrained": str(MODEL), "plan": str(plan), "skip": 0.5}
    found = simple_evaluate(
        model="ace", model_args=arguments, tasks=[local_task(TASKS["piqa"], rows)], bootstrap_iters=0
    )
    assert found is not None and 0.3 < found["config"]["ace"]["realised"] < 0.7
