"""What the documents say of policies is what there is."""

from pathlib import Path

from policy_cases import NAMES

from ace_moe.policies import make

DOCS = Path(__file__).parents[2] / "docs"


def test_every_policy_is_described():
    text = (DOCS / "policies.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in text] == []


def test_gains_are_those_of_the_cited_methods():
    """The column of each table row that starts with one policy."""
    for line in (DOCS / "policies.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.replace(r"\|", "").strip("|").split("|")]
        name = cells[0].strip("`")
        if len(cells) == 5 and name in NAMES:
            assert cells[3].rstrip("¹") == make(name).gain, name


def test_every_further_table_is_in_the_format():
    text = (DOCS / "plan-format.md").read_text(encoding="utf-8")
    tables = {table for name in NAMES for table in make(name).needs} | set(make("rcr", centred=False).needs)
    assert [table for table in sorted(tables) if f"`{table}`" not in text and f".{table}`" not in text] == []
