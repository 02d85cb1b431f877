"""The latency benchmark on a tiny shape: rows for stock and ours, ratios as requested, the model left as it was."""

import json

import pytest
import torch
from typer.testing import CliRunner

from ace_moe.bench import shapes
from ace_moe.bench.run import Bench, result
from ace_moe.cli import app
from ace_moe.cli.bench_table import chart, latency_table
from ace_moe.demo import MODEL
from ace_moe.errors import AceError, StructureError

TINY = {
    "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny", ("Qwen3MoeConfig", TINY))
    return shapes.build("tiny", "cpu")


def test_rows_of_a_run(model):
    rows = []
    bench = Bench(model, [0.0, 0.5], rows.append)
    found = [*bench.prefill(64, 2, ["grouped_mm"]), *bench.decode(2, ["grouped_mm"])]
    assert found == rows
    assert [(r.what, r.path, r.requested) for r in rows] == [
        (what, path, ratio)
        for what in ("ttft", "tpot")
        for path, ratio in (("grouped_mm", 0.0), ("ace", 0.0), ("ace", 0.5))
    ]
    for row in rows:
        assert row.wall_ms > 0
        assert row.realised == pytest.approx(row.requested, abs=0.01)
    assert model.config._experts_implementation == "grouped_mm"
    assert len(result("x", rows)["rows"]) == 6


@pytest.mark.slow
def test_stock_as_generate_compiles_it(model):
    rows = list(Bench(model, [0.0], lambda row: None).decode(1, ["generate:grouped_mm", "eager"], prompt=8))
    assert [row.path for row in rows] == ["generate:grouped_mm", "eager", "ace"]
    assert rows[-1].experts == rows[-1].executed == 4, "one token needs its four experts"
    assert rows[-1].valid


def test_a_run_as_table_and_chart(model, tmp_path):
    rows = list(Bench(model, [0.0, 0.5], lambda row: None).prefill(32, 2, ["grouped_mm"]))
    assert latency_table(rows).row_count == 3
    chart(rows, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 5000


def test_the_command(tmp_path):
    path = tmp_path / "rows.json"
    arguments = [
        "bench",
        str(MODEL),
        "--prefill",
        "16x1",
        "--decode",
        "",
        "--skip",
        "0,0.5",
        "--device",
        "cpu",
        "-o",
        str(path),
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    stored = json.loads(path.read_text())
    assert [(row["path"], row["requested"]) for row in stored["rows"]] == [("grouped_mm", 0), ("ace", 0), ("ace", 0.5)]


@pytest.mark.parametrize(
    "wrong", [["--shape", "x", "model"], [], ["model", "--rows", "all"], ["model", "--prefill", "12y3"]]
)
def test_wrong_arguments_are_errors_of_ours(wrong):
    assert isinstance(CliRunner().invoke(app, ["bench", *wrong]).exception, AceError)


def test_random_models_route_nearly_uniformly(model):
    """Finite, norms of 1, and no expert takes all: latency depends on which experts are read."""
    seen = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda m, a, out: seen.append(out[2]))
    with torch.no_grad():
        logits = model(input_ids=torch.randint(5, 512, (1, 256))).logits
    assert logits.isfinite().all()
    assert torch.equal(model.model.layers[0].post_attention_layernorm.weight, torch.ones(64, dtype=torch.bfloat16))
    load = seen[0].flatten().bincount(minlength=8) / seen[0].numel()
    assert load.min() > 0.02


def test_an_unknown_shape_is_refused():
    with pytest.raises(StructureError, match="qwen3-30b-a3b"):
        shapes.build("qwen9", "cpu")


@pytest.mark.parametrize("name", sorted(shapes.SHAPES))
def test_named_shapes_build(name, monkeypatch):
    """With the same fields, made small."""
    small = {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "vocab_size": 128,
        "intermediate_size": 64,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16}
    config, sizes = shapes.SHAPES[name]
    monkeypatch.setitem(
        shapes.SHAPES, name, (config, {**sizes, **small, **(heads if name != "qwen3.6-35b-a3b" else {})})
    )
    model = shapes.build(name, "cpu", layers=4)
    with torch.no_grad():
        assert model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.isfinite().all()
