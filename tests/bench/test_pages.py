"""The figures of docs/host.md and docs/serving.md are the stored results; a page without a part's marks is noticed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import host_page
import pages
import serving_page


@pytest.mark.parametrize("made", [host_page, serving_page])
def test_the_page_is_the_stored_results(made):
    assert made.PAGE.read_text(encoding="utf-8") == made.page()


def test_parts_go_between_their_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- part: script.py -->\nold\n<!-- /part -->\nb <!-- n -->1<!-- /n --> c\n")
    assert pages.written(page, part="new\n", n="2") == page.read_text().replace("old", "new").replace("1", "2")
    with pytest.raises(AssertionError, match="no place for other"):
        pages.written(page, other="x")
