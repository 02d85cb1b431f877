"""vLLM's second model runner on a CPU: it wants Triton, whose interpreter stands in for the CPU back end that vLLM knows.

Python imports this file in every process whose path has this folder. What a GPU serves with by default runs here then, slowly,
in front of CPU kernels for everything else.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from triton.backends import backends

from interpreted import plain_masks


class Interpreted:
    """A driver that nobody asks for: the interpreter compiles nothing."""

    @staticmethod
    def is_active() -> bool:
        return False


backends["cpu"] = SimpleNamespace(compiler=None, driver=Interpreted)
plain_masks()
