"""A quantised checkpoint's plan serves its unquantised copy: the four commands as a user gives them, vLLM on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from layouts import gpt_oss, kimi
from quantised import quantise
from serving_server import serving

from bad_input.bad_input_cases import save_tokenizer
from command import run_ace

MLA = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
}  # as published: vLLM takes no other
LIKE: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "gpt-oss": lambda tmp: gpt_oss(tmp, head_dim=32),
    "DeepSeek": lambda tmp: quantise(tmp, "deepseek_v3", lambda key, number: "fp8 block", **MLA),
    "Kimi": lambda tmp: kimi(tmp, **MLA),
}


def as_published(config: Path) -> None:
    """DeepSeek's files name its router, which transformers knows by itself and vLLM does not."""
    found = json.loads(config.read_text())
    if found["model_type"] == "deepseek_v3":
        config.write_text(json.dumps(found | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}))


@pytest.mark.vllm
@pytest.mark.parametrize("name", LIKE)
def test_from_tables_to_a_server(name: str, tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("gpt_oss" if name == "gpt-oss" else "deepseek_v3", "vLLM", "prefill", "decode")
    packed, plain = LIKE[name](tmp_path)
    for folder in (packed, plain):
        as_published(folder / "config.json")
        save_tokenizer(folder)
    plan, text = tmp_path / "plan.safetensors", tmp_path / "text.txt"
    text.write_text("All that is gold does not glitter, not all those who wander are lost. " * 20)
    assert run_ace("plan", packed, "--tables", "-o", plan).code == 0
    sizes = ("--window", 32, "--tokens", 256, "--budgets", "0.3")
    assert run_ace("plan", packed, "--plan", plan, "--text", text, *sizes, "--expand").code == 0
    run = ("--plan", plan, "--skip", 0.3, "--prompt", "gold", "--max-new-tokens", 8, "--json")
    expanded = run_ace("run", packed, *run, "--expand").json
    with serving(tmp_path / "log", plain, "--plan", str(plan), "--skip", "0.3", length=128) as server:
        server.send("/ace", {"reset": True})
        served, report = server.complete("gold", 8)["text"], json.loads(server.send("/ace")[1])
    assert report["skip"] == 0.3 and report["realised"] == pytest.approx(expanded["realised"])
    assert served.split() == expanded["text"].split()  # a byte is a token: each is decoded with a space around it
