"""Every bad input gives one paragraph of ours that says what to do, exit code 1, and nothing half-written.

Most cases go through the command; `refuse` checks paragraph, exit code and the whole working folder each time.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ace_moe import ACE, AceError, Plan, build_plan, show
from ace_moe.budget import Histogram, check_budget
from ace_moe.demo import MODEL as DEMO
from ace_moe.errors import BudgetError, CheckpointError, IntegrationError, PlanError, StructureError, TextError
from ace_moe.loading import load_model, load_tokenizer
from ace_moe.offline import Passes
from ace_moe.plan import Threshold, Workload
from ace_moe.policies import Ace
from ace_moe.text import Windows, cut, read_text
from test_cli import Ran, run_ace, start_ace

LAYERS, EXPERTS, TOP_K = 2, 8, 4
Refuse = Callable[..., str]
Tensors = dict[str, Tensor]
Damage = Callable[[Path], object]

# ---- tiny models, plans and texts -------------------------------------------------------------------------------


def tiny_config(cls: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    sizes = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 512}
    experts = {"moe_intermediate_size": 8, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    return cls(**{**sizes, **heads, **(experts if cls is Qwen3MoeConfig else {}), "eos_token_id": 256, **changes})


def save_tokenizer(folder: Path, normalizer: normalizers.Normalizer | None = None) -> None:
    """One token a byte."""
    alphabet = {c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)


def save_moe(folder: Path, seed: int = 0, shard: str = "5GB", **changes: Any) -> Path:
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(tiny_config(Qwen3MoeConfig, **changes)).save_pretrained(folder, max_shard_size=shard)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`single`: one file, `sharded`: several, `dense`: no MoE, `other`: same shape, other weights."""
    folder = tmp_path_factory.mktemp("models")
    save_moe(folder / "single")
    save_moe(folder / "sharded", shard="8KB")
    save_moe(folder / "other", seed=1)
    LlamaForCausalLM(tiny_config(LlamaConfig)).save_pretrained(folder / "dense")
    save_tokenizer(folder / "dense")
    return folder


@pytest.fixture(scope="module")
def good_plan(originals: Path) -> Plan:
    """The plan of `single` (and `sharded`, which has the same weights) with a threshold for 50 %."""
    rest = {"realised": 0.5, "corrected": True, "passes": 1, "workload": Workload("text.txt", "0" * 64, 64)}
    entry = Threshold(**Ace().settings, budget=0.5, threshold=0.2, **rest)  # type: ignore[arg-type]
    return build_plan(originals / "single").with_thresholds([entry])


@pytest.fixture
def single(originals: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(originals / "single", tmp_path / "single")


@pytest.fixture
def sharded(originals: Path, tmp_path: Path) -> Path:
    return shutil.copytree(originals / "sharded", tmp_path / "sharded")


@pytest.fixture
def plan(good_plan: Plan, tmp_path: Path) -> Path:
    return good_plan.save(tmp_path / "plan.safetensors")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("All that is gold does not glitter, not all those who wander are lost. " * 4)
    return path


# ---- what is checked every time ---------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file, hidden ones too, with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def paragraph(ran: Ran) -> str:
    """The one line of ours: last on stderr, alone, with exit code 1 and nothing on stdout."""
    assert ran.code == 1, ran
    assert ran.out == ""
    assert "Traceback" not in ran.err
    lines = [line for line in ran.err.splitlines() if line.strip()]
    assert [line.startswith("error: ") for line in lines].count(True) == 1, ran.err
    assert lines[-1].startswith("error: "), ran.err
    return lines[-1].removeprefix("error: ")


@pytest.fixture
def refuse(tmp_path: Path) -> Refuse:
    """`refuse("tables", …, says=("cause", "advice"))`: the command fails as it should and tmp_path stays as it was."""

    def check(*arguments: object, says: tuple[str, ...]) -> str:
        before = snapshot(tmp_path)
        message = paragraph(run_ace(*arguments))
        assert [word for word in says if word not in message] == [], message
        assert message.endswith((".", "`")), "a paragraph ends as one"
        assert snapshot(tmp_path) == before
        return message

    return check


def run_arguments(model: Path, plan: Path) -> tuple[object, ...]:
    return ("run", model, "-p", plan, "--prompt", "All that", "--max-new-tokens", 2, "--device", "cpu")


def budget_arguments(model: Path, plan: Path, text: Path, budgets: str = "0.5") -> tuple[object, ...]:
    sizes = ("--window", 64, "--tokens", 256, "--device", "cpu")
    return ("budget", model, "-p", plan, "--text", text, "--budgets", budgets, *sizes)


def test_the_good_inputs_are_good(single: Path, sharded: Path, plan: Path, text: Path, tmp_path: Path) -> None:
    """What the other tests damage works as it is; otherwise they would show nothing."""
    for model in (single, sharded):
        assert run_ace("tables", model, "-o", tmp_path / "new.safetensors").code == 0
        assert run_ace(*budget_arguments(model, plan, text)).code == 0
        ran = run_ace(*run_arguments(model, plan))
        assert ran.code == 0, ran.err


# ---- checkpoints ------------------------------------------------------------------------------------------------


def shard_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def drop(*parts: str) -> Callable[[Path], None]:
    """Leave out every tensor whose name has one of the parts."""

    def damage(folder: Path) -> None:
        def change(tensors: Tensors) -> None:
            for name in [n for n in tensors if any(part in n for part in parts)]:
                del tensors[name]

        edit_tensors(folder, change)

    return damage


def all_in_one_shard(index: dict[str, Any]) -> dict[str, Any]:
    first = next(iter(index["weight_map"].values()))
    return index | {"weight_map": dict.fromkeys(index["weight_map"], first)}


ROUTER, NORM = "model.layers.1.mlp.gate.weight", "model.layers.1.post_attention_layernorm.weight"
EXPERT = "model.layers.1.mlp.experts.3."
SHARDED = {
    "missing shard": (lambda f: shard_of(f, ROUTER).unlink(), ("misses 1 of", "Finish the download")),
    "index is no JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"), ("index.json", "download it")),
    "index is binary": (
        lambda f: (f / "model.safetensors.index.json").write_bytes(b"\xff\xfe\x00"),
        ("index.json", "download it"),
    ),
    "index without map": (lambda f: edit_index(f, lambda i: {}), ("weight_map", "download it again")),
    "index is a list": (lambda f: edit_index(f, lambda i: []), ("index.json", "download it again")),
    "map is a list": (lambda f: edit_index(f, lambda i: {"weight_map": ["a"]}), ("index.json", "download it again")),
    "map of numbers": (
        lambda f: edit_index(f, lambda i: {"weight_map": {"a": 5}}),
        ("index.json", "download it again"),
    ),
    "tensor in another shard": (lambda f: edit_index(f, all_in_one_shard), ("download it again",)),
}
SINGLE = {
    "no safetensors": (lambda f: (f / "model.safetensors").unlink(), ("no .safetensors file", "save_pretrained")),
    "no config.json": (lambda f: (f / "config.json").unlink(), ("no usable config.json", "must be a transformers")),
    "config.json is no JSON": (lambda f: (f / "config.json").write_text("{"), ("config.json", "must be")),
    "config.json is a list": (lambda f: (f / "config.json").write_text("[]"), ("config.json", "must be")),
    "number is a word": (lambda f: edit_config(f, num_hidden_layers="two"), ("config.json", "must be")),
    "unknown architecture": (lambda f: edit_config(f, model_type="nonsense"), ("nonsense", "must be")),
    "no experts tensor": (drop("layers.1.mlp.experts."), ("no tensor for", "download it again")),
    "one expert missing": (drop(EXPERT), ("download",)),
    "half an expert missing": (drop(EXPERT + "down_proj"), ("download",)),
    "no router": (drop(ROUTER), (ROUTER, "download it again")),
    "no norm": (drop(NORM), (NORM, "download it again")),
    "config of another size": (lambda f: edit_config(f, num_experts=16, num_local_experts=16), ("download",)),
    "empty safetensors": (lambda f: (f / "model.safetensors").write_bytes(b""), ("truncated", "download it again")),
}


def cases(table: dict[str, tuple[Damage, tuple[str, ...]]]) -> Any:
    return pytest.mark.parametrize(("damage", "says"), table.values(), ids=table)


@cases(SHARDED)
def test_sharded_checkpoint(damage: Damage, says: tuple[str, ...], sharded: Path, plan: Path, refuse: Refuse) -> None:
    """Found by `tables`, which reads a layer at a time, and by `run`, which loads it all."""
    damage(sharded)
    refuse("tables", sharded, "-o", plan, says=says)
    refuse(*run_arguments(sharded, plan), says=("sharded", "download"))


@cases(SINGLE)
def test_single_checkpoint(damage: Damage, says: tuple[str, ...], single: Path, plan: Path, refuse: Refuse) -> None:
    """Above all: `run` must not go on with random numbers in place of a tensor that is not there."""
    damage(single)
    refuse("tables", single, "-o", plan, says=says)
    refuse(*run_arguments(single, plan), says=("single",))


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 0.5, -1])
def test_truncated_shard(keep: float, sharded: Path, plan: Path, refuse: Refuse) -> None:
    """A download that stopped: in the header's length, in the header, in the data, one byte short."""
    path = shard_of(sharded, ROUTER)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    refuse("tables", sharded, "-o", plan, says=(path.name, "truncated or damaged", "download it again"))
    refuse(*run_arguments(sharded, plan), says=("download it again",))


def test_missing_tensor_outside_the_moe_layers(single: Path, plan: Path, refuse: Refuse) -> None:
    """The tables never read attention, so only loading can notice; transformers would fill it with random numbers."""
    drop("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj")(single)
    refuse(*run_arguments(single, plan), says=("q_proj", "and 1 more", "download it again"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tensor", [ROUTER, NORM, EXPERT + "up_proj.weight", EXPERT + "down_proj.weight"])
def test_weights_that_are_no_numbers(value: float, tensor: str, single: Path, plan: Path, refuse: Refuse) -> None:
    """One bad value among thousands; a table made of it, or left out because of it, would be silently wrong."""
    edit_tensors(single, lambda tensors: tensors[tensor].view(-1)[5].fill_(value))
    refuse("tables", single, "-o", plan, says=("Layer 1", "NaN", "infinite", "download it again"))


def test_budget_of_a_model_that_gives_nan(single: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    """The plan is of the sound weights and routers are untouched, so the pass itself has to notice."""
    edit_tensors(single, lambda t: t["model.layers.0.mlp.experts.1.down_proj.weight"].fill_(float("nan")))
    edit_tensors(single, lambda t: t["model.layers.0.self_attn.o_proj.weight"].fill_(float("nan")))
    refuse(*budget_arguments(single, plan, text), says=("NaN", "download it again"))
    seen = Histogram()
    seen.add(torch.tensor([[0.5, float("nan")]]))
    with pytest.raises(CheckpointError, match="NaN"):
        seen.threshold(0.5)


@pytest.mark.parametrize("command", ["tables", "inspect", "run"])
def test_dense_model(command: str, originals: Path, plan: Path, refuse: Refuse) -> None:
    """A model without experts has nothing to skip, whatever is asked of it."""
    model = originals / "dense"
    arguments = {"tables": ("tables", model, "-o", plan), "inspect": ("inspect", model)}
    says = ("LlamaForCausalLM", "no routed experts", "Mixture-of-Experts")
    refuse(*arguments.get(command, run_arguments(model, plan)), says=says)


@pytest.mark.parametrize("method", ["aqlm", "nonsense"])
def test_quantised_format_that_is_not_read(method: str, single: Path, plan: Path, refuse: Refuse) -> None:
    edit_config(single, quantization_config={"quant_method": method, "bits": 4})
    says = (method, "quantised", "Build the plan from the unquantised checkpoint", "allow_other_weights")
    refuse("tables", single, "-o", plan, says=says)


def test_quantised_checkpoint_whose_library_is_not_installed(single: Path, plan: Path, refuse: Refuse) -> None:
    """transformers raises ImportError here."""
    edit_config(single, quantization_config={"quant_method": "aqlm", "bits": 4})
    refuse(*run_arguments(single, plan), says=("could not be loaded", "install"))


@pytest.mark.parametrize("change", [{"hidden_act": "nonsense"}, {"num_attention_heads": 0}, {"architectures": 5}])
def test_configuration_that_no_model_can_have(change: dict[str, Any], single: Path, plan: Path, refuse: Refuse) -> None:
    edit_config(single, **change)
    refuse("tables", single, "-o", plan, says=("config.json", "single"))


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where/at/all", "~nobody-here/model", "a" * 300])
def test_model_that_is_no_folder(name: str, plan: Path, refuse: Refuse) -> None:
    """A path with a typing error, a user that does not exist, a name the file system refuses."""
    for arguments in (("tables", name, "-o", plan), ("inspect", name), run_arguments(Path(name), plan)):
        message = refuse(*arguments, says=())
        assert "Give a folder" in message or "give the path" in message or "Check its path" in message


def test_model_that_is_a_file(single: Path, plan: Path, refuse: Refuse) -> None:
    refuse("tables", single / "model.safetensors", "-o", plan, says=("not a checkpoint folder", "Give a folder"))


def test_hub_name_that_cannot_be_fetched(plan: Path, tmp_path: Path) -> None:
    """As a process: the hub is off, as it is on a machine without network."""
    ran = start_ace("tables", "nobody/nothing-moe", "-o", plan, env={"HF_HOME": str(tmp_path / "hub")})
    message = paragraph(ran)
    assert all(word in message for word in ("nobody/nothing-moe", "could not be fetched", "Check the name"))


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta", "0:0"])
def test_device_that_is_not_there(device: str, single: Path, plan: Path, refuse: Refuse) -> None:
    for arguments in (("tables", single, "-o", plan), run_arguments(single, plan)):
        refuse(*arguments, "--device", device, says=(device, "cannot be used here", "--device cpu"))


def test_brackets_in_a_path_are_no_markup(plan: Path, refuse: Refuse) -> None:
    """`[/x]` would end a style that never began, which the printer answers with an exception."""
    refuse("tables", "[/x] [bold]", "-o", plan, says=("[/x] [bold]", "give the path"))


# ---- plans of other models --------------------------------------------------------------------------------------


def test_plan_of_another_structure(plan: Path, text: Path, tmp_path: Path, refuse: Refuse) -> None:
    """Named is what differs; the permission for other weights does not reach this far."""
    model = save_moe(tmp_path / "wide", num_experts=16)
    says = ("another model (single)", "experts 8 in the plan, 16 in the model", "ace tables")
    refuse(*run_arguments(model, plan), "--allow-other-weights", says=says)
    refuse(*budget_arguments(model, plan, text), says=says)


def test_plan_of_other_weights(originals: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    model = originals / "other"
    says = ("same shape but other router weights", "ace tables", "allow_other_weights")
    refuse(*run_arguments(model, plan), says=says)
    refuse(*budget_arguments(model, plan, text), says=says)


def test_other_weights_allowed_are_recorded(originals: Path, plan: Path, text: Path) -> None:
    """Permission is given once: `budget` writes it into the plan, `run` needs it no more."""
    model = originals / "other"
    assert run_ace(*budget_arguments(model, plan, text), "--allow-other-weights").code == 0
    assert len(Plan.load(plan).other_weights) == 1
    assert run_ace(*run_arguments(model, plan)).code == 0
    assert run_ace(*run_arguments(originals / "single", plan)).code == 0


# ---- plan files -------------------------------------------------------------------------------------------------


def rewrite(
    path: Path,
    tensors: Callable[[Tensors], object] = lambda t: None,
    meta: Callable[[dict[str, Any]], object] = lambda m: None,
) -> None:
    """Change a plan behind its back; `tensors` and `meta` change what they are given."""
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        ace = json.loads(file.metadata()["ace"])
    tensors(found)
    meta(ace)
    save_file(found, path, metadata={"ace": json.dumps(ace)})


def refuse_plan(path: Path, model: Path, refuse: Refuse, *says: str) -> None:
    """By the loader with our type, and by the commands that read a plan."""
    with pytest.raises(PlanError):
        Plan.load(path)
    refuse("inspect", path, says=(path.name, *says))
    refuse(*run_arguments(model, path), says=(path.name, *says))


def put(name: str, values: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: values})


def fill(value: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors["layers.1.rcr"][3:4].fill_(value)


BAD_TENSORS = {
    "NaN": (fill(float("nan")), "layers.1.rcr has NaN, infinite or negative"),
    "infinite": (fill(float("inf")), "layers.1.rcr has NaN, infinite or negative"),
    "negative": (fill(-0.5), "layers.1.rcr has NaN, infinite or negative"),
    "short": (put("layers.1.rcr", torch.ones(EXPERTS - 1)), "float32 [7], not float32 [8]"),
    "matrix": (put("layers.1.rcr", torch.ones(EXPERTS, 1)), "float32 [8, 1], not float32 [8]"),
    "float64": (put("layers.1.rcr", torch.ones(EXPERTS).double()), "float64 [8], not float32 [8]"),
    "integers": (put("layers.1.rcr", torch.ones(EXPERTS).long()), "int64 [8], not float32 [8]"),
    "duplicate layer": (put("layers.00.gsp", torch.ones(EXPERTS)), "layer 0 has two tables gsp"),
    "missing layer": (lambda t: [t.pop(n) for n in ("layers.1.gsp", "layers.1.rcr")], "missing: 1; foreign: none"),
    "missing table": (lambda t: t.pop("layers.1.gsp"), "missing: 1; foreign: none"),
    "foreign layer": (put("layers.7.gsp", torch.ones(EXPERTS)), "missing: none; foreign: 7"),
    "foreign tensor": (put("lm_head.weight", torch.ones(3)), "'lm_head.weight' is not `layers.<n>.<table>`"),
    "no layer name": (put("layers..gsp", torch.ones(3)), "is not `layers.<n>.<table>`"),
    "no tensors": (lambda t: t.clear(), "missing: 0, 1; foreign: none"),
}


@pytest.mark.parametrize(("change", "said"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_plan_with_bad_tensors(
    change: Callable[[Tensors], object], said: str, plan: Path, originals: Path, refuse: Refuse
) -> None:
    rewrite(plan, tensors=change)
    refuse_plan(plan, originals / "single", refuse, said, "ace tables")


def at(*path: str | int, value: Any) -> Callable[[Any], None]:
    """Put a value somewhere into the metadata."""

    def change(meta: Any) -> None:
        for step in path[:-1]:
            meta = meta[step]
        meta[path[-1]] = value

    return change


ENTRY, LAYER = ("thresholds", 0), ("fingerprint", "structure", "1")
BAD_METADATA = {
    "another schema": (at("schema", value=99), "schema 99, this release reads 1"),
    "no schema": (lambda m: m.pop("schema"), "schema None"),
    "threshold NaN": (at(*ENTRY, "threshold", value=float("nan")), "out of range"),
    "threshold negative": (at(*ENTRY, "threshold", value=-0.1), "out of range"),
    "threshold text": (at(*ENTRY, "threshold", value="0.1"), "threshold"),
    "budget infinite": (at(*ENTRY, "budget", value=float("inf")), "out of range"),
    "budget above 1": (at(*ENTRY, "budget", value=1.5), "budget 1.5"),
    "threshold above any contribution": (at(*ENTRY, "threshold", value=3.4e38), "out of range"),
    "threshold too large for a float": (at(*ENTRY, "threshold", value=10**400), "out of range"),
    "params no object": (at(*ENTRY, "params", value=["max"]), "params"),
    "unknown field": (at(*ENTRY, "colour", value="red"), "colour"),
    "workload missing": (lambda m: m["thresholds"][0].pop("workload"), "workload"),
    "workload without name": (at(*ENTRY, "workload", "name", value=None), "workload"),
    "thresholds no list": (at("thresholds", value=5), "damaged"),
    "no fingerprint": (lambda m: m.pop("fingerprint"), "fingerprint"),
    "no content": (lambda m: m["fingerprint"].pop("content"), "content"),
    "no top_k": (lambda m: m["fingerprint"]["structure"]["1"].pop("top_k"), "top_k"),
    "top_k text": (at(*LAYER, "top_k", value="four"), "top_k"),
    "top_k zero": (at(*LAYER, "top_k", value=0), "0 slots"),
    "top_k above experts": (at(*LAYER, "top_k", value=99), "99 slots for 8 experts"),
    "no layers": (at("fingerprint", "structure", value={}), "no layers"),
    "undefined no object": (at("undefined", value=["gsp"]), "damaged"),
    "model no text": (at("model", value=5), "model"),
    "other_weights no list": (at("other_weights", value="abc"), "other_weights"),
}


@pytest.mark.parametrize(("change", "said"), BAD_METADATA.values(), ids=BAD_METADATA)
def test_plan_with_bad_metadata(
    change: Callable[[Any], object], said: str, plan: Path, originals: Path, refuse: Refuse
) -> None:
    rewrite(plan, meta=change)
    refuse_plan(plan, originals / "single", refuse, said, "Build it again with `ace tables`")


@pytest.mark.parametrize("meta", ["", "{", "[]", "null", "5", '"ace"', "[" * 100_000], ids=lambda m: m[:6] or "empty")
def test_plan_whose_metadata_is_no_object(meta: str, plan: Path, originals: Path, refuse: Refuse) -> None:
    save_file({"layers.0.gsp": torch.ones(EXPERTS)}, plan, metadata={"ace": meta})
    refuse_plan(plan, originals / "single", refuse, "metadata is damaged", "ace tables")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_safetensors_that_is_no_plan(
    metadata: dict[str, str] | None, plan: Path, originals: Path, refuse: Refuse
) -> None:
    save_file({"weight": torch.ones(3)}, plan, metadata=metadata)
    refuse_plan(plan, originals / "single", refuse, "not a plan", "ace tables")


def test_a_checkpoint_given_as_plan(originals: Path, refuse: Refuse) -> None:
    """MODEL and PLAN swapped, or the wrong .safetensors completed by the shell."""
    path = originals / "single" / "model.safetensors"
    refuse(*run_arguments(originals / "single", path), says=("not a plan", "ace tables MODEL -o FILE"))


@pytest.mark.parametrize("name", ["missing.safetensors", "nowhere/plan.safetensors", "~nobody-here/p.safetensors"])
def test_plan_that_is_not_there(name: str, tmp_path: Path, originals: Path, text: Path, refuse: Refuse) -> None:
    """Not looked up on the hub, though `nowhere/plan.safetensors` reads like owner/name."""
    model = originals / "single"
    for arguments in (
        ("inspect", name),
        run_arguments(model, Path(name)),
        budget_arguments(model, Path(name), text),
        run_arguments(model, tmp_path),
    ):
        refuse(*arguments, says=("There is no plan at", "ace tables MODEL -o"))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory, good_plan: Plan) -> tuple[Path, bytes]:
    """A file to overwrite again and again, and the bytes of the good plan."""
    path = tmp_path_factory.mktemp("scratch") / "plan.safetensors"
    return path, good_plan.save(path).read_bytes()


def refused_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(PlanError, match=r"truncated or no plan; build it again with `ace tables`"):
        Plan.load(path)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 64])
def test_plan_cut_in_its_header(keep: int, scratch: tuple[Path, bytes]) -> None:
    refused_bytes(scratch[0], scratch[1][:keep])


@given(share=st.floats(0, 1, exclude_max=True))
@settings(deadline=None)
def test_plan_cut_anywhere(scratch: tuple[Path, bytes], share: float) -> None:
    """A file shorter by any number of bytes, one included, is not taken for a plan."""
    path, data = scratch
    refused_bytes(path, data[: int(share * len(data))])


@given(data=st.one_of(st.binary(max_size=400), st.binary(max_size=80).map(lambda b: struct.pack("<Q", len(b)) + b)))
@settings(deadline=None)
def test_random_bytes(scratch: tuple[Path, bytes], data: bytes) -> None:
    """Also behind a header length that is right."""
    refused_bytes(scratch[0], data)


@pytest.mark.filterwarnings("ignore:no threshold was mapped")
@given(seed=st.data())
@settings(max_examples=200, deadline=None)
def test_flipped_header_bytes(scratch: tuple[Path, bytes], seed: st.DataObject) -> None:
    """A damaged header is refused, or what is left of it is a plan that can be used; never anything else."""
    path, data = scratch
    end = 8 + struct.unpack("<Q", data[:8])[0]
    position, byte = seed.draw(st.integers(0, end - 1)), seed.draw(st.integers(0, 255))
    path.write_bytes(data[:position] + bytes([byte]) + data[position + 1 :])
    use_or_refuse(path)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.just(10**400), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


@pytest.mark.filterwarnings("ignore:no threshold was mapped")
@given(seed=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_edited_metadata(scratch: tuple[Path, bytes], seed: st.DataObject) -> None:
    """Any value anywhere in the metadata: refused when the plan is loaded, or harmless in everything that reads it."""
    path, data = scratch
    path.write_bytes(data)
    rewrite(path, meta=lambda meta: replace_somewhere(meta, seed))
    use_or_refuse(path)


def replace_somewhere(node: Any, seed: st.DataObject) -> None:
    while True:
        step = seed.draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        child = node[step]
        if not (isinstance(child, (dict, list)) and child) or seed.draw(st.integers(0, 3)) == 0:
            node[step] = seed.draw(JSON)
            return
        node = child


def use_or_refuse(path: Path) -> None:
    """What commands do with a plan; only errors of ours may come out."""
    try:
        plan = Plan.load(path)
    except PlanError:
        return
    json.dumps(show.plan_json(plan))
    show.print_plan(show.Console(quiet=True), plan)
    assert plan.check_model(plan.fingerprint) is plan
    with suppress(AceError):
        ACE(plan, 0.5)


# ---- budgets and settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1", "1.5", "-1", "-0.001", "nan", "inf", "1e999"])
def test_budget_that_is_no_fraction(value: str, originals: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    """The same words for the command that maps, the command that runs, and the class."""
    says = ("a fraction from 0 to less than 1", "such as 0.5")
    refuse(*budget_arguments(originals / "single", plan, text, budgets=value), says=says)
    refuse(*run_arguments(originals / "single", plan), f"--skip={value}", says=says)
    with pytest.raises(BudgetError, match=r"such as 0\.5"):
        ACE.load(plan, float(value))


@pytest.mark.parametrize("value", ["half", None, [0.5], 10**400], ids=["text", "none", "list", "huge"])
def test_budget_that_is_no_number(value: Any, plan: Path) -> None:
    with pytest.raises(BudgetError, match=r"such as 0\.5; .* is no number"):
        ACE.load(plan, value)


@pytest.mark.parametrize("value", ["half", "", "0.5;0.6", "0.5:0.1:0.1"])
def test_budgets_that_cannot_be_read(value: str, originals: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    says = ("0.1:0.6:0.1 (from : to : step)", repr(value))
    refuse(*budget_arguments(originals / "single", plan, text, budgets=value), says=says)


@pytest.mark.parametrize(("min_active", "limit"), [(1, "75.0%"), (2, "50.0%"), (4, "0.0%"), (9, "0.0%")])
def test_budget_above_the_limit(
    min_active: int, limit: str, originals: Path, plan: Path, text: Path, refuse: Refuse
) -> None:
    """(k − min_active) / k is all that can be skipped, and the message says how much that is."""
    says = ("4 slots a token", f"at most {limit} can be skipped", "Lower the budget")
    options = ("--min-active", min_active)
    refuse(*run_arguments(originals / "single", plan), "--skip", 0.76, *options, says=says)
    refuse(*budget_arguments(originals / "single", plan, text, budgets="0.1,0.76"), *options, says=says)
    assert check_budget(float(limit[:-1]) / 100, TOP_K, min_active) >= 0


def test_budget_that_the_safeguards_leave_no_room_for(originals: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    """Known only after a pass, because it depends on the gates; the plan is untouched all the same."""
    says = ("the safeguards protect all but", "Lower the budget, min_active or min_mass")
    refuse(*budget_arguments(originals / "single", plan, text, budgets="0.7"), "--min-mass", 0.9, says=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--min-active", 0), ("min_active", "at least 1")),
        (("--min-active", -3), ("min_active", "at least 1")),
        (("--min-mass", 2), ("min_mass", "0 to 1")),
        (("--min-mass", -0.1), ("min_mass", "0 to 1")),
        (("--min-mass", "nan"), ("min_mass", "0 to 1")),
        (("--policy", "nonsense"), ("'nonsense'", "ace, gsp, rcr, share")),
        (("--gain", "nonsense"), ("'nonsense'", "kept, none, power")),
        (("--preset", "nonsense"), ("'nonsense'", "paper")),
        (("--preset", "paper", "--gain", "nonsense"), ("'nonsense'", "kept, none, power")),
        (("--max-new-tokens", 0), ("nothing to generate", "--max-new-tokens")),
        (("--skip", 0.6), ("it has 50%", "`ace budget MODEL --plan PLAN --text FILE --budgets 0.6`")),
        (("--skip", 0.5, "--gain", "none"), ("gain none", "it has none for these settings", "ace budget")),
        (("--skip", 0.5, "--preset", "paper"), ("gain kept", "it has none for these settings", "ace budget")),
    ],
    ids=str,
)
def test_setting(
    options: tuple[object, ...], says: tuple[str, ...], originals: Path, plan: Path, refuse: Refuse
) -> None:
    """Each names the setting and what it may be."""
    refuse(*run_arguments(originals / "single", plan), *options, says=says)


def test_skip_before_any_threshold_is_mapped(originals: Path, tmp_path: Path, refuse: Refuse) -> None:
    """The plan straight from `ace tables`: the next command is in the message."""
    plan = build_plan(originals / "single").save(tmp_path / "new.safetensors")
    says = (
        "no threshold",
        "it has none for these settings",
        "`ace budget MODEL --plan PLAN --text FILE --budgets 0.5`",
    )
    refuse(*run_arguments(originals / "single", plan), says=says)


# ---- texts, tokenizers, prompts ---------------------------------------------------------------------------------

BAD_TEXTS = {
    "empty": ("t.txt", b"", ("empty", "Give a text")),
    "blank": ("t.txt", b" \n\n\t ", ("empty", "Give a text")),
    "shorter than a window": ("t.txt", b"x" * 63, ("63 tokens, a window has 64", "smaller --window")),
    "not UTF-8": ("t.txt", b"caf\xe9 " * 40, ("not UTF-8", "Give a .txt or .jsonl")),
    "jsonl without text": ("t.jsonl", b'{"content": "x"}\n' * 9, ("`text` field", "KeyError", ".txt")),
    "jsonl with a number": ("t.jsonl", b'{"text": 5}\n' * 9, ("`text` field", ".txt")),
    "jsonl of lists": ("t.jsonl", b'["text"]\n' * 9, ("`text` field", ".txt")),
    "jsonl that is text": ("t.jsonl", b"Once upon a time\n" * 9, ("`text` field", ".txt")),
    "jsonl cut in a row": ("t.jsonl", b'{"text": "all that"}\n{"text": "is', ("`text` field", ".txt")),
    "jsonl without rows": ("t.jsonl", b"\n\n", ("empty", "Give a text")),
    "half a surrogate pair": ("t.jsonl", b'{"text": "\\ud83d' + b"x" * 99 + b'"}', ("no Unicode text", "Remove")),
}


@pytest.mark.parametrize(("name", "data", "says"), BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_text(
    name: str, data: bytes, says: tuple[str, ...], originals: Path, plan: Path, tmp_path: Path, refuse: Refuse
) -> None:
    (tmp_path / name).write_bytes(data)
    refuse(*budget_arguments(originals / "single", plan, tmp_path / name), says=says)


def test_text_that_is_not_there(originals: Path, plan: Path, tmp_path: Path, refuse: Refuse) -> None:
    """Said before the model is loaded: here there is no model either, and the text is what is named."""
    for path in (tmp_path / "missing.txt", tmp_path):
        refuse(*budget_arguments(tmp_path / "no-model", plan, path), says=("There is no text file at", "Give a .txt"))


def test_json_lines_may_hold_any_character(tmp_path: Path) -> None:
    """U+2028 ends a line for Python's splitlines(), not in JSON; and some editors put a mark in front of a file."""
    path = tmp_path / "t.jsonl"
    path.write_text('\ufeff{"text": "one\u2028two\x85three"}\n{"text": "four"}\r\n', encoding="utf-8")
    assert read_text(path) == "one\u2028two\x85three\n\nfour"


@pytest.mark.parametrize(
    "options", [("--window", 0), ("--window", 1), ("--window", -5), ("--tokens", 0), ("--tokens", 63), ("--batch", 0)]
)
def test_sizes_of_a_pass(options: tuple[object, ...], originals: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    says = ("windows of at least 2 tokens", "Change --window, --tokens or --batch")
    refuse(*budget_arguments(originals / "single", plan, text), *options, says=says)


def test_window_of_nothing_by_hand(originals: Path) -> None:
    with pytest.raises(TextError, match="at least 2 tokens"):
        cut("some text", load_tokenizer(originals / "single"), 0, None, 260, "text")


def test_tokenizer_of_another_model(single: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    """The demo's tokenizer has 8192 tokens, the model 260 rows; an index error deep in the embedding says nothing."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, single)
    says = ("the model knows 260", "tokenizer of another model", "own tokenizer files")
    refuse(*budget_arguments(single, plan, text), says=says)
    refuse(*run_arguments(single, plan), says=says)


TOKENIZER_DAMAGE = {
    "no files": lambda f: [p.unlink() for p in f.glob("tokenizer*")],
    "no tokenizer.json": lambda f: (f / "tokenizer.json").unlink(),
    "tokenizer.json is no JSON": lambda f: (f / "tokenizer.json").write_text("{"),
    "tokenizer.json is another": lambda f: (f / "tokenizer.json").write_text("{}"),
    "tokenizer.json is cut": lambda f: (f / "tokenizer.json").write_bytes((f / "tokenizer.json").read_bytes()[:900]),
    "tokenizer_config.json is a list": lambda f: (f / "tokenizer_config.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", TOKENIZER_DAMAGE.values(), ids=TOKENIZER_DAMAGE)
def test_missing_or_damaged_tokenizer(damage: Damage, single: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    """Without files transformers makes an empty tokenizer, and every text has 0 tokens; that is no text error."""
    damage(single)
    says = ("no usable tokenizer", "Put its tokenizer files into the folder")
    refuse(*budget_arguments(single, plan, text), says=says)
    refuse(*run_arguments(single, plan), says=says)


def test_empty_prompt(originals: Path, plan: Path, tmp_path: Path, refuse: Refuse) -> None:
    """Said at once, also where the model is not even there."""
    for model in (originals / "single", tmp_path / "no-model"):
        refuse(*run_arguments(model, plan), "--prompt", "", says=("prompt is empty", "--prompt"))


def test_prompt_that_is_no_text(originals: Path, plan: Path, refuse: Refuse) -> None:
    """A byte that is not UTF-8 on the command line arrives as half a surrogate pair."""
    refuse(*run_arguments(originals / "single", plan), "--prompt", "caf\udce9", says=("no Unicode text", "Remove"))


def test_prompt_of_no_tokens(single: Path, plan: Path, refuse: Refuse) -> None:
    """A tokenizer may strip all there is."""
    save_tokenizer(single, normalizers.Strip())
    says = ("makes no token of the prompt '  '", "Give the model some text")
    refuse(*run_arguments(single, plan), "--prompt", "  ", says=says)


# ---- output -----------------------------------------------------------------------------------------------------


def test_output_in_no_folder(single: Path, tmp_path: Path, refuse: Refuse) -> None:
    for path in (tmp_path / "no" / "plan.safetensors", single / "config.json" / "plan.safetensors"):
        refuse("tables", single, "-o", path, says=("There is no folder", "Create it, or choose another place"))


def test_output_that_is_a_folder(single: Path, tmp_path: Path, refuse: Refuse) -> None:
    refuse("tables", single, "-o", tmp_path, says=("it is a folder", "Choose another place"))


def test_read_only_folder(
    single: Path, plan: Path, text: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated, because root may write anywhere: the long work must not even start."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **more: mode != os.W_OK and access(path, mode, **more))
    monkeypatch.setattr("ace_moe.checkpoint.MoEModel.open", lambda *_: pytest.fail("the checkpoint was opened"))
    monkeypatch.setattr("ace_moe.loading.load_model", lambda *_: pytest.fail("the model was loaded"))
    says = ("no permission", "Choose another place")
    refuse("tables", single, "-o", plan, says=says)
    refuse(*budget_arguments(single, plan, text), says=says)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that not even root can write to")
def test_folder_that_refuses_the_write(single: Path, refuse: Refuse) -> None:
    """/proc: root is told it may write there, and then may not."""
    refuse("tables", single, "-o", "/proc/plan.safetensors", says=("/proc/plan.safetensors", "hoose another place"))


def test_demo_into_a_file(text: Path, refuse: Refuse) -> None:
    for path in (text, text / "deeper"):
        refuse("demo", "-o", path, says=("is a file", "Choose another folder with -o"))


def fail_with(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("place", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_full_disk(
    place: str, number: int, single: Path, plan: Path, text: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in the write it strikes: the old plan is intact, no temporary file is left, the reason is named."""
    monkeypatch.setattr(os, place, fail_with(OSError(number, os.strerror(number))))
    says = (os.strerror(number), "Nothing was changed there", "free space")
    refuse("tables", single, "-o", plan, says=says)
    refuse(*budget_arguments(single, plan, text), says=says)
    refuse("tables", single, "-o", plan.with_name("new.safetensors"), says=says)


def test_file_that_may_not_grow(single: Path, plan: Path, tmp_path: Path) -> None:
    """As a process with a real limit of 512 bytes a file: the write itself fails half way."""
    before = snapshot(tmp_path)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (512, 512))
    ran = start_ace("tables", single, "-o", plan, preexec_fn=limit, env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert os.strerror(errno.EFBIG) in paragraph(ran)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("place", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("command", ["tables", "budget"])
def test_interrupted_write(
    place: str, command: str, single: Path, plan: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C inside the write: exit code 130, one line, and the folder as before."""
    monkeypatch.setattr(os, place, fail_with(KeyboardInterrupt()))
    before = snapshot(tmp_path)
    tables = ("tables", single, "-o", plan)
    ran = run_ace(*(tables if command == "tables" else budget_arguments(single, plan, text)))
    assert ran.code == 130
    assert "interrupted; nothing half-written is left behind" in ran.err
    assert "Traceback" not in ran.err
    assert snapshot(tmp_path) == before


def test_interrupted_pass(
    originals: Path, plan: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the model reads the text."""
    monkeypatch.setattr(Passes, "__call__", fail_with(KeyboardInterrupt()))
    before = snapshot(tmp_path)
    assert run_ace(*budget_arguments(originals / "single", plan, text)).code == 130
    assert snapshot(tmp_path) == before


# ---- attaching --------------------------------------------------------------------------------------------------


def test_attaching_twice(originals: Path, plan: Path) -> None:
    """The same plan or another on the same model; the first stays in force and can be taken off."""
    model = load_model(originals / "single", "cpu")
    first, second = ACE.load(plan, 0.5), ACE.load(plan, 0.5)
    with first(model):
        with pytest.raises(IntegrationError, match=r"attached to a model already. Call `ace\.detach\(\)`"):
            first.attach(model)
        with pytest.raises(IntegrationError, match=r"already has a plan attached. Detach it first"):
            second.attach(model)
        model(torch.ones(1, 9, dtype=torch.long))
    assert first.report()["prefill"]["routed"] == 9 * LAYERS * TOP_K
    with second(model):
        model(torch.ones(1, 9, dtype=torch.long))
    assert second.report()["prefill"]["routed"] == 9 * LAYERS * TOP_K


@pytest.mark.parametrize(("name", "error"), [("dense", StructureError), ("other", PlanError)])
def test_attaching_to_a_wrong_model_leaves_it_alone(
    name: str, error: type[AceError], originals: Path, plan: Path
) -> None:
    """Output to the bit as before, and no hook or child left."""
    model, ids = load_model(originals / name, "cpu"), torch.arange(12)[None]
    before, modules = model(ids).logits, [n for n, _ in model.named_modules()]
    with pytest.raises(error):
        ACE.load(plan, 0.5).attach(model)
    assert torch.equal(model(ids).logits, before)
    assert [n for n, _ in model.named_modules()] == modules
    assert not model._forward_pre_hooks


def test_windows_that_are_not_there() -> None:
    """A batch is one window at least, also without the command."""
    with pytest.raises(TextError, match="one at a time"):
        Windows(torch.ones(2, 4, dtype=torch.long), Workload("x", "", 8)).batches(0)
