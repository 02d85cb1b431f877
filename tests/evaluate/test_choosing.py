"""The page "Which should I use?": its table is stored, its files are there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import study_page  # noqa: E402

PAGE = study_page.CHOOSING.read_text(encoding="utf-8")


def test_the_table_is_what_is_stored() -> None:
    assert study_page.choosing() == PAGE
    assert all(f"| `{method}` | 0." in PAGE for method in study_page.FIRST)


def test_linked_files_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
