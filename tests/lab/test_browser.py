"""The page in a real headless Chromium: no errors, curves there, hover works, numbers are those of the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Page

from ace_moe.lab.report.page import write_page

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)"),
    pytest.mark.long,
]
SPACE = "\u00a0"


@pytest.fixture(scope="module")
def report(compared: Path, studied: Path, evaluated: Path, simulated: Path, timed: Path, folder: Path) -> Path:
    path = folder / "report.html"
    write_page([compared, studied, evaluated, simulated, timed], path)
    return path


@pytest.fixture(scope="module")
def shown(report: Path) -> Iterator[Page]:
    page = Page()
    page.open(report)
    yield page
    page.close()


@pytest.fixture(scope="module")
def results(compared: Path) -> dict:  # type: ignore[type-arg]
    return json.loads(compared.read_text())


def test_no_error_and_no_request(shown: Page, report: Path) -> None:
    """Nothing in the console, nothing loaded but the file itself."""
    assert shown.errors == []
    assert shown.requests == [report.resolve().as_uri()]


def test_every_section_is_there(shown: Page) -> None:
    sections = shown.js("[...document.querySelectorAll('section')].map((s) => s.id)")
    assert sections == [
        *("advice", "quality", "main-table", "rival", "layers", "tables", "oracle", "experts"),
        *("thresholds", "cost", "tasks", "reads", "speed"),
    ]
    assert shown.js("[...document.querySelectorAll('section')].every((s) => s.children[2].textContent.length > 0)")


def test_curves_are_drawn(shown: Page) -> None:
    """A line, a band and a dot for each budget, for every method that is shown; inside the picture."""
    lines = "[...document.querySelectorAll('#quality .series')].map((s) => s.dataset.method)"
    assert set(shown.js(lines)) == {"share", "ace", "random", "oracle"}
    assert shown.js("document.querySelectorAll('#quality .curve').length") == 4
    assert shown.js("document.querySelectorAll('#quality .hit').length") == 8
    assert shown.js(
        "(() => { const box = document.querySelector('#quality svg').getBoundingClientRect();"
        "return [...document.querySelectorAll('#quality .dot')].every((d) => { const b = d.getBoundingClientRect();"
        "return b.left >= box.left && b.right <= box.right && b.top >= box.top && b.bottom <= box.bottom; }); })()"
    )
    heights = shown.js(
        "Object.fromEntries([...document.querySelectorAll('#quality .series')].map((s) =>"
        "[s.dataset.method, Number([...s.querySelectorAll('.dot')].pop().getAttribute('cy'))]))"
    )
    assert heights["random"] < heights["share"]  # worse is higher


def test_hover_tells_the_numbers(shown: Page, results: dict) -> None:  # type: ignore[type-arg]
    """The tooltip of a dot has the cell's numbers; away from it the tooltip goes."""
    cell = next(c for c in results["cells"] if (c["method"], c["gain"], c["budget"]) == ("random", "power", 0.5))
    said = shown.point('#quality [data-method="random"] .hit[data-budget="0.5"]')
    assert said is not None
    assert said.startswith("random · gain power")
    assert f"perplexity {cell['perplexity']:.2f}" in said and f"KL {cell['kl']['value']:.4f}" in said
    assert f"realised {100 * cell['realised']:.2f}{SPACE}%" in said
    assert shown.point("#quality h2") is None


def test_the_table_has_the_files_numbers(shown: Page, results: dict) -> None:  # type: ignore[type-arg]
    """Each cell of the main table under both gains, the best one marked, the oracle left out of the race."""
    for number, gain in enumerate(results["grid"]["gains"], start=1):
        shown.click(f"#main-table .segments button:nth-child({number})")
        for cell in (c for c in results["cells"] if c["gain"] == gain):
            place = f'#main-table tr[data-method="{cell["method"]}"] td[data-budget="{cell["budget"]}"]'
            assert shown.js(f"document.querySelector('{place}').textContent") == f"{cell['kl']['value']:.4f}"
        best = min(
            (c for c in results["cells"] if c["gain"] == gain and c["budget"] == 0.5 and c["method"] != "oracle"),
            key=lambda c: c["kl"]["value"],
        )
        place = '#main-table td.best[data-budget="0.5"]'
        marked = f"document.querySelector('{place}').closest('tr').dataset.method"
        assert shown.js(marked) == best["method"]
    assert "xshare" in shown.js("document.querySelector('#main-table').textContent")  # and why it has no cell


def test_the_embedded_numbers_are_the_files(shown: Page, results: dict) -> None:  # type: ignore[type-arg]
    """Not rounded, not lost: what the page computes with is what was measured."""
    assert shown.js("data.compare[0].cells.map((c) => c.perplexity)") == [c["perplexity"] for c in results["cells"]]
    assert shown.js("data.compare[0].cells.map((c) => c.realised)") == [c["realised"] for c in results["cells"]]


def test_heat_maps_have_colours_and_answers(shown: Page, results: dict) -> None:  # type: ignore[type-arg]
    """GSP, RCR and the experts' map are painted; pointing at one names layer, expert and value."""
    maps = shown.js("[...document.querySelectorAll('figure')].map((f) => f.dataset.map)")
    assert maps[:2] == ["gsp", "rcr"] and maps[-1] == "share, gain kept"
    pixels = "c.getContext('2d').getImageData(0, 0, 32, 6).data.some(Boolean)"
    assert all(shown.js(f"[...document.querySelectorAll('canvas')].map((c) => {pixels})"))
    said = shown.point('figure[data-map="gsp"] canvas')
    assert said is not None
    layer, expert = (int(word) for word in said.split("\n")[0].replace("layer ", "").split(", expert "))
    assert said.endswith(f"{results['tables'][str(layer)]['gsp'][expert]:.2f}")


def test_controls_work(shown: Page, results: dict) -> None:  # type: ignore[type-arg]
    """Methods come and go, budgets change, the theme turns; no error comes of it."""
    shown.click("#quality .chip")
    assert shown.js("document.querySelectorAll('#quality .curve').length") == 3
    shown.click("#quality .chip")
    shown.click("#rival .controls label:last-child button:first-child")
    row = next(c for c in results["cells"] if (c["method"], c["gain"], c["budget"]) == ("share", "power", 0.3))
    ace = next(c for c in results["cells"] if (c["method"], c["gain"], c["budget"]) == ("ace", "power", 0.3))
    change = 100 * (row["kl"]["value"] / ace["kl"]["value"] - 1)
    said = shown.point("#rival .series:has(text:first-of-type)")
    assert said is not None and "against ace" in said
    shown_values = shown.js("[...document.querySelectorAll('#rival .series')].map((s) => s.dataset.tip)")
    assert any(f"{abs(change):.2f}{SPACE}%" in text for text in shown_values if text.startswith("share"))
    before = shown.js("getComputedStyle(document.body).backgroundColor")
    shown.click("#theme")
    assert shown.js("getComputedStyle(document.body).backgroundColor") != before
    shown.click("#theme")
    assert shown.errors == []


def test_thresholds_and_tasks(shown: Page, studied: Path) -> None:
    study = json.loads(studied.read_text())
    text = shown.js("document.querySelector('#thresholds').textContent")
    assert all(f"{row['threshold']:.6f}" in text for row in study["workloads"])
    cost = shown.js("document.querySelector('#cost').textContent")
    assert all(f"{row['passes']}" in cost for row in study["cost"])
    tasks = shown.js("[...document.querySelectorAll('#tasks td')].map((cell) => cell.textContent)")
    assert tasks == ["arc_easy", "70.00", "60.00"]
    said = shown.point("#tasks td:last-child")
    assert said is not None and f"against unskipped −10.00{SPACE}%" in said


def test_a_heading_sorts(shown: Page) -> None:
    """Up, then down; what has no number stays behind, the unskipped model on top."""
    column = "[...document.querySelectorAll('#main-table tbody tr')].map((r) => r.lastChild.textContent)"
    for way in (1, -1):
        shown.click("#main-table th:last-child button")
        first, *rest = shown.js(column)
        numbers = [float(text) for text in rest if text != "–"]
        assert numbers == sorted(numbers, reverse=way < 0) and len(numbers) >= 4
        assert rest[len(numbers) :] == ["–"] * (len(rest) - len(numbers))
        assert first == shown.js("number(data.compare[0].dense.perplexity)")
    assert shown.js("document.querySelector('#main-table th:last-child').getAttribute('aria-sort')") == "descending"


def test_files_are_saved(shown: Page, results: dict, simulated: Path) -> None:  # type: ignore[type-arg]
    """The CSV has every cell unrounded; the PNG is a picture of the drawing's size with colours in it."""
    shown.js("var saved = []; save = (name, blob) => saved.push([name, blob]); 0")
    for section, kind in (("main-table", "CSV"), ("quality", "PNG"), ("reads", "CSV")):
        shown.click(f'#{section} [data-save="{kind}"]')
    shown.js("new Promise((done) => { const wait = () => saved.length < 3 ? setTimeout(wait, 20) : done(); wait(); })")
    texts = {name: text for name, text in shown.js("Promise.all(saved.map(async ([n, b]) => [n, await b.text()]))")}
    table = next(text for name, text in texts.items() if name.endswith("-main-table.csv"))
    head, *rows = [line.split(",") for line in table.split("\r\n")[:-1]]
    found = {(r[0], r[1], float(r[2])): dict(zip(head, r, strict=True)) for r in rows}
    assert len(rows) == len(results["cells"])
    for c in results["cells"]:
        row = found[c["method"], c["gain"], c["budget"]]
        assert float(row["kl"]) == c["kl"]["value"] and float(row["change_low"]) == c["change"]["low"]
        assert (row["kl_low"] == "") == (c["kl"]["low"] is None)
    reads = next(text for name, text in texts.items() if name.endswith("-reads.csv"))
    assert len(reads.split("\r\n")) - 2 == len(json.loads(simulated.read_text())["rows"])
    picture = shown.js(
        "createImageBitmap(saved.find(([n]) => n.endsWith('-quality.png'))[1]).then((b) => {"
        "const p = el('canvas', { width: b.width, height: b.height }).getContext('2d'); p.drawImage(b, 0, 0);"
        "const all = p.getImageData(0, 0, b.width, b.height).data;"
        "const seen = new Set(); for (let i = 0; i < all.length; i += 4) seen.add(all.slice(i, i + 3).join());"
        "return [b.width / document.querySelector('#quality svg').getBoundingClientRect().width, seen.size]; })"
    )
    assert picture[0] == pytest.approx(2, rel=0.01) and picture[1] > 20
    assert shown.errors == []


def test_reads_and_speed(shown: Page, simulated: Path) -> None:
    """Three lines by batch; restore runs more slots and reads nothing more; bars as long as the times are."""
    row = json.loads(simulated.read_text())["rows"][-1]
    said = shown.point('#reads [data-line="experts read"] .hit:last-of-type')
    assert said is not None and f"{row['reads']:.1f} of {row['asked']:.1f}" in said
    heights = "(l) => [...l.querySelectorAll('.dot')].map((d) => Number(d.getAttribute('cy')))"
    _, alone, restored = shown.js(f"[...document.querySelectorAll('#reads [data-line]')].map({heights})")
    assert len(alone) == 3 and all(a >= b for a, b in zip(alone, restored, strict=True)) and alone[-1] > restored[-1]
    widths = shown.js("[...document.querySelectorAll('#speed rect')].map((r) => Number(r.getAttribute('width')))")
    assert [w / widths[0] for w in widths] == pytest.approx([1, 6 / 10.5, 4 / 10.5])
    assert "4.00 · 1.50×" in shown.js("document.querySelector('#speed').textContent")


def test_a_phone_in_the_dark(report: Path) -> None:
    """390 points wide: nothing wider than the screen, hover by touch position still works, dark from the start."""
    page = Page(390, 800, "dark")
    try:
        page.open(report)
        assert page.js("document.documentElement.scrollWidth") == 390
        assert page.js("document.documentElement.dataset.theme") == "dark"
        said = page.point("#quality .hit")
        assert said is not None and "perplexity" in said
        assert page.js("tip.getBoundingClientRect().right") <= 390
        assert page.errors == []
    finally:
        page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_cut(width: int, report: Path) -> None:
    """Names in tables and in the navigation are whole; where a table goes on, a shade at its side says so."""
    page = Page(width, 800)
    try:
        page.open(report)
        for selector in ("nav", "td:first-child", "th:first-child"):
            cut = f"[...document.querySelectorAll('{selector}')].filter((e) => e.scrollWidth > e.clientWidth).length"
            assert page.js(cut) == 0, selector
        assert page.js("getComputedStyle(document.querySelector('.scroll')).backgroundImage.includes('gradient')")
    finally:
        page.close()
