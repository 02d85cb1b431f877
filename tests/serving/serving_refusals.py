"""Tries to build engines that must be refused, one after the other in one process, and writes what each said.

    python serving_refusals.py SPEC OUT

SPEC: a list of {model, ace, llm, patch}; OUT: a list of messages, empty where the engine started.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def attempt(case: dict[str, Any]) -> str:
    from vllm import LLM

    from ace_moe.engines.vllm import KEY
    from ace_moe.errors import AceError

    undo = pretend_monolithic() if case.get("patch") == "monolithic" else lambda: None
    try:
        LLM(
            case["model"], dtype="float32", max_model_len=256, enforce_eager=True,
            additional_config={KEY: case["ace"]}, **case.get("llm", {}),
        )  # fmt: skip
    except AceError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # not ours: the test will say so
        return f"not ours: {type(error).__name__}: {error}"
    finally:
        undo()
    return ""


def pretend_monolithic() -> Any:
    """The CPU has no kernel that routes by itself for these models."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    UnquantizedFusedMoEMethod.is_monolithic = property(lambda self: True)

    def undo() -> None:
        del UnquantizedFusedMoEMethod.is_monolithic

    return undo


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([attempt(case) for case in cases]))
