"""The page "Which should I use?": its tables are stored, its files are there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import choosing_page  # noqa: E402

PAGE = choosing_page.PAGE.read_text(encoding="utf-8")


def test_the_tables_are_what_is_stored() -> None:
    assert choosing_page.page() == PAGE
    assert all(f"\n| `{method}` | " in PAGE for method in (*choosing_page.FIRST, *choosing_page.AGAINST))


def test_linked_files_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
