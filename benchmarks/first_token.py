"""Seconds from nothing to the first skipped token, of a model folder; and to a plan, of a checkpoint too large to load.

    python benchmarks/first_token.py MODEL TEXT -o benchmarks/results/first_token.json
    PYTHONPATH=OTHER/src python benchmarks/first_token.py MODEL TEXT --layers 48   # another version of the package

The large checkpoint has the shapes of Qwen3-30B-A3B and no content: its file is a hole on the disk, so it costs no room and
reading it costs only time.
"""

from __future__ import annotations

import json
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

from running import Row, made_here, parser, store

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 1024, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip


def hollow(folder: Path, layers: int) -> Path:
    """A checkpoint of zeros that takes no room."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    shards: dict[str, dict[str, Any]] = {}
    for name, tensor in disk_names(model):
        number = name.split(".")[2] if ".layers." in name else "rest"
        shards.setdefault(f"model-{number}.safetensors", {})[name] = tensor.shape
    for file, shapes in shards.items():
        write_hole(folder / file, shapes)
    index = {name: file for file, shapes in shards.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def write_hole(path: Path, shapes: dict[str, Any]) -> None:
    """A file of safetensors whose bytes nobody wrote."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape.numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def disk_names(model: Any) -> Any:
    """(name, tensor) as the checkpoint has them: an expert a tensor."""
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            half = tensor.shape[1] // 2
            for e in range(tensor.shape[0]):
                yield f"{stem}{e}.gate_proj.weight", tensor[e, :half]
                yield f"{stem}{e}.up_proj.weight", tensor[e, half:]
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            for e in range(tensor.shape[0]):
                yield f"{stem}{e}.down_proj.weight", tensor[e]
        elif name != "lm_head.weight":
            yield name, tensor


def first_token(model: str, text: str) -> Row:
    """Load, make what is missing, attach, one pass; seconds of each."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ace_moe import ACE

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    ids = AutoTokenizer.from_pretrained(model)("The river rises", return_tensors="pt").input_ids
    start = time.perf_counter()
    ace = ACE.from_pretrained(loaded, skip=0.3, text=text, tokens=4096)
    made = time.perf_counter()
    with ace(loaded):
        attached = time.perf_counter()
        with torch.no_grad():
            loaded(input_ids=ids)
        end = time.perf_counter()
        tables = sorted({name for layer in ace.plan.tables.values() for name in layer})
        skipped = ace.realised
    seconds = {"from_pretrained": made - start, "attach and map": attached - made, "first pass": end - attached}
    return {"model": Path(model).name, "tables": tables, "realised": skipped, "seconds": seconds, "all": end - start}


def plan_alone(layers: int) -> Row:
    """A plan of the large checkpoint, as `from_pretrained` makes it."""
    from ace_moe import ACE

    with tempfile.TemporaryDirectory() as folder:
        path = hollow(Path(folder), layers)
        start = time.perf_counter()
        ace = ACE.from_pretrained(path, skip=0.3)
        seconds = time.perf_counter() - start
        tables = sorted({name for layer in ace.plan.tables.values() for name in layer})
    return {"layers": layers, "tables": tables, "seconds": seconds}


def main() -> None:
    options_of = parser(__doc__, layers=48)
    options_of.add_argument("model")
    options_of.add_argument("text")
    options = options_of.parse_args()
    rows = [first_token(options.model, options.text)]
    print(json.dumps(rows[-1]), flush=True)
    rows.append(plan_alone(options.layers))
    print(json.dumps(rows[-1]), flush=True)
    store(options.out, made_here(rows=rows))


if __name__ == "__main__":
    main()
