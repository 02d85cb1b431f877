"""The latency benchmark on a tiny shape: rows for stock and ours, ratios as requested, the model left as it was."""

import io
import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import zoo
from ace_moe import ACE, build_plan
from ace_moe.checkpoint.loading import load_model, load_tokenizer
from ace_moe.cli import app
from ace_moe.cli.bench_table import chart, latency_table
from ace_moe.demo import MODEL, TEXT
from ace_moe.engines.transformers import attached_to
from ace_moe.errors import AceError, DeviceError, OptionError, StructureError
from ace_moe.lab.bench import latency, memory, run, shapes
from ace_moe.lab.bench.run import Bench
from ace_moe.lab.bench.tokens import random_tokens
from ace_moe.mapping import map_budgets
from ace_moe.provenance import FIELDS
from ace_moe.text import cut
from command import run_ace

STEPS = 8
TINY = {
    "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """Many are timed, many times, for the sake of a machine; the flow needs few."""
    for module in (latency, run):
        monkeypatch.setattr(module, "STEPS", STEPS)
    monkeypatch.setattr(run, "REPEATS", 2)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny", ("Qwen3MoeConfig", TINY))
    return shapes.build("tiny", "cpu")


@pytest.mark.parametrize("path", ["eager", "grouped_mm"])
def test_stock_is_timed_without_the_plan(model, path, monkeypatch):
    """What no graph has recorded looks the model up at each call: by then the plan is in it."""
    bench, seen = Bench(model, [0.0], lambda row: None), []

    def time(self, repeats):
        config = model.model.layers[0].mlp.experts.config
        seen.append((config._experts_implementation, attached_to(model) is None))
        return stock(self, repeats)

    stock = latency.Prompt.time
    monkeypatch.setattr(latency.Prompt, "time", time)
    list(bench.prefill(8, 1, [path]))
    assert set(seen) == {(path, True), ("ace", False)}


@torch.no_grad()
def test_a_plan_is_out_and_in_again():
    """As if it had never been there, then as it was."""
    model = zoo.build("qwen3_moe")
    bare = zoo.run(model)
    with ACE(build_plan(model), policy="share")(model) as ace:
        ace.set_threshold(0.9)
        ours = zoo.run(model)
        ace.reset()
        with ace.attachment.out("grouped_mm"):
            assert torch.equal(zoo.run(model), bare) and ace.report()["prefill"]["routed"] == 0
        assert torch.equal(zoo.run(model), ours) and ace.realised > 0 and not torch.equal(ours, bare)


@pytest.mark.long
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
        assert row.loop == "plain", "on a CPU"
        assert row.executed <= row.experts if row.requested else row.executed == row.experts
        assert sum(row.shares) == pytest.approx(1)
        assert row.shares == sorted(row.shares, reverse=True)
    assert rows[-1].executed < rows[-1].experts
    assert model.config._experts_implementation == "grouped_mm"
    assert len(rows) == 6


def test_experts_read_are_those_of_the_steps_that_are_timed(model):
    """Counted one by one: the tokens of a step, by hooks on the model itself."""
    row = next(Bench(model, [0.0], lambda row: None).decode(3, ["grouped_mm"], prompt=8))
    ids, seen = random_tokens(model)(3, 8 + STEPS), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, a, out: seen.append(out[2].view(3, 8 + STEPS, -1)))
    with torch.no_grad():
        model(input_ids=ids)
    unions = [len(ids[:, 8 + step].unique()) for ids in seen for step in range(STEPS)]
    assert row.experts == row.executed == pytest.approx(sum(unions) / len(unions))


def test_a_plan_is_timed_as_every_command_runs_it():
    model = zoo.build("qwen3_moe")
    assert Bench(model, [0.0], lambda row: None, build_plan(model)).ace.policy.key == "share"
    assert Bench(model, [0.0], lambda row: None).ace.policy.key == "ace"


def test_what_no_graph_holds_is_timed_by_generate(monkeypatch):
    """Layers with an index of their own beside keys and values."""
    model = zoo.build("deepseek_v32")
    bench = Bench(model, [0.0, 0.25], lambda row: None)
    monkeypatch.setattr(run, "ROUNDS", 5)
    rows = list(bench.decode(2, ["grouped_mm"], prompt=8))
    assert {row.loop for row in rows} == {"generate"}
    assert "DynamicIndexedLayer" in bench.why
    assert 0.1 < rows[-1].realised < 0.4
    assert all(row.wall_ms > 0 for row in rows)


@pytest.mark.parametrize("name", ["gemma4", "qwen3_5_moe"])
def test_hybrids_are_benched(name, monkeypatch):
    bench = Bench(zoo.build(name, num_hidden_layers=4), [0.5], lambda row: None)
    monkeypatch.setattr(run, "ROUNDS", 5)
    rows = [*bench.prefill(40, 1, []), *bench.decode(2, [], prompt=28)]
    assert bench.graphs
    assert [row.realised for row in rows] == pytest.approx([0.5, 0.5], abs=0.15)


def test_a_text_gives_prompts_and_a_fidelity_to_every_ratio(demo_folder, monkeypatch):
    """What `ace budget` finds for the same budgets on the same text."""
    model = load_model(demo_folder, device="cpu")
    windows = cut(TEXT.read_text(), load_tokenizer(demo_folder), 64, 128, 8192, "demo")
    bench = Bench(model, [0.0, 0.25, 0.5], lambda row: None, text=windows)
    assert bench.tokens(2, 5).tolist() == [windows.ids.flatten()[n : n + 5].tolist() for n in (0, 64)]
    assert bench.tokens(1, 300).shape == (1, 300), "longer than the text"
    monkeypatch.setattr(run, "ROUNDS", 3)
    none, some, half = bench.prefill(16, 1, [])
    assert (none.kl, none.agreement) == (0, 1)
    assert 0 < some.kl < half.kl
    assert 1 >= some.agreement > half.agreement
    assert 1 >= some.acceptance > half.acceptance
    mapped = map_budgets(model, bench.ace.plan, bench.ace.policy, windows, [0.5], judged=True)
    assert half.kl == mapped.entries[0].fidelity["kl"]["value"]
    table = Console(width=200, record=True, file=io.StringIO())
    table.print(latency_table([none, some, half]))
    assert f"{half.kl:.4f} {half.agreement:.1%} {half.acceptance:.1%}" in table.export_text()


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
    "wrong",
    [
        ["--shape", "x", "model"],
        [],
        ["model", "--rows", "all"],
        ["model", "--prefill", "12y3"],
        ["model", "--routing", "flat"],
        ["model", "--union", "49"],
        ["--shape", "qwen3-30b-a3b", "--routing", "steep"],
        ["--shape", "qwen3-30b-a3b", "--union", "49"],
        ["--shape", "qwen3-30b-a3b", "--text", str(TEXT)],
        ["model", "--text", "nowhere.txt"],
    ],
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


def test_the_file_says_how_a_shape_was_made_to_route(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny", ("Qwen3MoeConfig", {**TINY, "num_experts": 32}))
    path = tmp_path / "rows.json"
    shape = ("--shape", "tiny", "--routing", "skewed", "--union", 20, "--skip", 0, "--device", "cpu", "-o", path)
    ran = run_ace("bench", *shape, "--decode", 16)
    assert ran.code == 0, ran.err
    stored = json.loads(path.read_text())
    assert stored["routing"]["kind"] == "skewed"
    assert set(stored["runs"][0]) == set(FIELDS) and stored["runs"][0]["date"]
    assert stored["routing"]["union_16"] == pytest.approx(20, rel=0.05)
    assert "assumption" in stored["routing"]["note"]
    assert [row["what"] for row in stored["rows"]] == ["tpot", "tpot"]
    assert all(row["experts"] < 26 for row in stored["rows"]), "chance gives 28"
    assert run_ace("bench", *shape, "--decode", "4,16").code == 0
    rows = json.loads(path.read_text())["rows"]
    assert sorted((row["batch"], row["path"]) for row in rows) == sorted(
        (batch, path) for batch in (4, 16) for path in ("ace", "grouped_mm")
    )
    assert all(row["run"] == 1 for row in rows), "what is measured again takes the place of what was there"
    other = run_ace("bench", *shape[:4], *shape[6:], "--decode", 4)
    assert other.code == 1 and "another measurement: routing" in other.err


def test_what_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 50 * memory.GIB)
    monkeypatch.setattr(shapes, "fill", lambda *given: pytest.fail("it was made"))
    error = CliRunner().invoke(app, ["bench", "--shape", "qwen3-30b-a3b", "--device", "cpu"]).exception
    assert isinstance(error, DeviceError)
    assert "57" in str(error), "GiB, as the model has 30.5 billion weights of two bytes"
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10)
    error = CliRunner().invoke(app, ["bench", str(MODEL), "--device", "cpu"]).exception
    assert isinstance(error, DeviceError)


def test_memory_grows_with_what_is_timed():
    config = shapes.hollow("gemma-4-26b-a4b", layers=6).config
    one = memory.run_bytes(config, (1024, 1))
    assert memory.run_bytes(config, (1024, 4)) == 4 * one
    assert one >= 1024 * 6 * 2 * 8 * 256 * 2, "keys and values alone"
    assert 0 < memory.free_bytes("cpu") < 1 << 62


@pytest.mark.parametrize("path", ["", "ace", "foo", "generate:foo"])
def test_stock_experts_that_are_none_are_refused(path):
    with pytest.raises(OptionError, match="batched_mm, deepgemm, eager, grouped_mm"):
        run.check_stock(["grouped_mm", "generate:eager", path])


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
        "num_local_experts": 8,
        "n_routed_experts": 8,
        "vocab_size": 128,
        "intermediate_size": 64,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16}
    heads |= {"num_global_key_value_heads": 1}
    config, sizes = shapes.SHAPES[name]
    monkeypatch.setitem(
        shapes.SHAPES, name, (config, {**sizes, **small, **(heads if name != "qwen3.6-35b-a3b" else {})})
    )
    model = shapes.build(name, "cpu", layers=4)
    with torch.no_grad():
        assert model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.isfinite().all()
