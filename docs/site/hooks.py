"""What the site has beside the pages in docs/: home from the README, commands from the command line, API, the notebook."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
API = """# Python

Everything here is imported from `ace_moe`, which costs nothing until a name is used.

::: ace_moe.ace.ACE

::: ace_moe.ace.detach

::: ace_moe.plan.record.Plan
    options:
      members: [load, save, top_k, workloads, answer, with_thresholds, with_default, check_model]

::: ace_moe.tables.build.build_plan

::: ace_moe.policies.base.Policy

::: ace_moe.policies.base.TokenPolicy

::: ace_moe.decoding.decoder.Decoder

::: ace_moe.engines.vllm.engine_args

::: ace_moe.errors
    options:
      show_root_heading: false
      members_order: source
"""


def on_files(files: Files, config: Any) -> Files:
    made = {"index.md": home(), "commands.md": commands(), "api.md": API, "tour.md": notebook()}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links out of docs/ lead to the repository."""
    return re.sub(r"\]\(\.\./([^)]+)\)", lambda found: f"]({repository()}/blob/main/{found[1]})", markdown)


def repository() -> str:
    """Where the source is, as the package says it."""
    return re.findall(r'^Repository = "([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)[0]


def home() -> str:
    """The README, whose links start one folder higher."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/tour.ipynb)", "](tour.md)").replace("](docs/", "](")
    return re.sub(r"\]\((benchmarks/|[A-Z]+\.md)", r"](../\1", text)


def notebook() -> str:
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = [
        "".join(c["source"]) if c["cell_type"] == "markdown" else f"```python\n{''.join(c['source'])}\n```"
        for c in cells
    ]
    return "\n\n".join([texts[0], "The notebook is [docs/tour.ipynb](../docs/tour.ipynb).", *texts[1:]])


# ---- the command line -----------------------------------------------------------------------------------------------------


def commands() -> str:
    sys.path.insert(0, str(ROOT / "src"))
    import typer.main

    from ace_moe import cli
    from ace_moe.cli.app import PANELS

    group: Any = typer.main.get_command(cli.app)
    named = [name for names in PANELS.values() for name in names]
    parts = ["# Commands\n\nWritten from the program itself; `ace COMMAND --help` says the same."]
    panels = PANELS | {"Others": tuple(name for name in group.commands if name not in named)}
    for panel, names in panels.items():
        parts += [f"## {panel}"] if names else []
        for name in (name for name in names if name in group.commands):
            found = group.commands[name]
            inner = getattr(found, "commands", None)
            parts += [one(f"{name} {n}", c) for n, c in inner.items()] if inner else [one(name, found)]
    return "\n\n".join(parts)


def one(name: str, command: Any) -> str:
    rows = [row for parameter in command.params if parameter.name != "help" for row in [line(parameter)]]
    options = "| option | meaning | default |\n|---|---|---|\n" + "\n".join(rows) if rows else ""
    return f"### ace {name}\n\n{escaped(command.help or '')}\n\n    {example(command)}\n\n{options}"


def example(command: Any) -> str:
    return re.split(r", (?=ace )", (command.epilog or "").partition(":")[2].strip())[0]


def line(parameter: Any) -> str:
    flags = " ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
    name = flags if flags.startswith("`-") else f"`{parameter.metavar or parameter.name.upper()}`"
    default = parameter.default
    shown = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
    return (
        f"| {name} | {escaped(getattr(parameter, 'help', '') or '')} | {'required' if parameter.required else shown} |"
    )


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")
