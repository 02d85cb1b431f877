"""The long description: the README with links that work where there is no repository around it. All else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
REPOSITORY = re.findall(r'^Repository = "([^"]+)"', (HERE / "pyproject.toml").read_text(encoding="utf-8"), re.M)[0]


def absolute(found: "re.Match[str]") -> str:
    """Pictures are fetched, everything else is looked at."""
    return f"{found[1]}[{found[2]}]({REPOSITORY}/{'raw' if found[1] else 'blob'}/main/{found[3]})"


readme = (HERE / "README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"(!?)\[([^\]]*)\]\((?!https?:)([^)]+)\)", absolute, readme),
    long_description_content_type="text/markdown",
)
