"""The pages of claims and records show every figure as the ledger and the records have it, and where each was made."""

import itertools
import json
import re
from html import unescape
from pathlib import Path

import pytest

from utils import records
from utils.claims import ledger as claims_ledger
from utils.claims import page as ledger_page
from utils.units import PREFIXED
from website import ledger, record_charts, record_pages
from website.ledger import markdown
from website.places import ROOT, WEBSITE, lectures
from website.record_figures import label, text, unit_of
from website.record_tables import blocks

pytestmark = pytest.mark.slow

BENCHMARKS = records.benchmark_names()
PREFIXES = {"p": 1e-12, "n": 1e-9, "µ": 1e-6, "m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
SUPERSCRIPT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
#: Half a unit of the fifth digit, relative to the smallest leading digits.
ROUNDED = 5.1e-5


# ---- claims --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def claims_page() -> str:
    return ledger.page()


def rows_of_claims(page: str) -> dict[str, list[str]]:
    """The cells of each claim's row, by the claim's id."""
    rows = {}
    for line in page.splitlines():
        if found := re.search(r'<code id="([^"]+)">', line):
            assert found[1] not in rows, f"{found[1]} stands twice"
            rows[found[1]] = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    return rows


def unescaped(cell: str) -> str:
    return re.sub(r"\\(.)", r"\1", re.sub(r"(?<!\\)<[^>]+>", " ", cell)).strip()


def test_every_claim_of_the_ledger_stands_on_the_page_once(claims_page):
    rows = rows_of_claims(claims_page)
    made = claims_ledger()
    assert list(rows) == [claim.id for claim in made]
    assert f"**{len(made)} claims**" in claims_page
    for claim in made:
        cells = rows[claim.id]
        assert claim.statement in unescaped(cells[0])
        assert f'class="kind kind-{claim.kind}">{claim.kind}<' in cells[4]


def test_figures_and_units_are_those_of_the_ledger_in_the_repository(claims_page):
    rows = rows_of_claims(claims_page)
    compared = 0
    for line in ledger_page().splitlines():
        if found := re.search(r"<br>`([^`]+)`", line):
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            _, computed, expected, tolerance, unit, kind, source = [c.replace("&lt;", "<") for c in cells]
            shown = [unescaped(cell) for cell in rows[found[1]]]
            assert shown[1] == computed, found[1]
            assert shown[2].split() == [*expected.split(), *tolerance.split()], found[1]
            assert (shown[3], shown[4].split(None, 1)) == (unit, [kind, source]), found[1]
            compared += 1
    assert compared == len(rows)


def test_counts_of_each_notebook_add_up(claims_page):
    assert claims_page.count("\n## ") == len({claim.notebook for claim in claims_ledger()})
    for kind in ("derive", "measure", "state"):
        counts = [int(n) for n in re.findall(rf"(\d+) {kind}\b", claims_page)]
        assert counts[0] == sum(counts[1:]) == sum(claim.kind == kind for claim in claims_ledger())


def test_each_claim_links_to_the_nearest_heading_above_its_cell(claims_page):
    rows = rows_of_claims(claims_page)
    paths = {path.stem: path for path in lectures()}
    for claim in claims_ledger():
        path = paths[claim.notebook]
        stem, slug = re.search(r"\]\(/notebooks/([\w.]+)\.ipynb#([^)]+)\)$", rows[claim.id][0]).groups()
        section = next(s for s in ledger.sections(path) if s.slug == slug)
        later = [s.cell for s in ledger.sections(path) if s.cell > section.cell]
        assert stem == claim.notebook
        assert section.cell <= claim.cell and not any(cell <= claim.cell for cell in later), claim.id


def test_headings_in_code_are_no_sections_and_equal_ones_are_numbered(tmp_path):
    cells = ["# A `b` $x^2$ and *c*\n\n```\n# not one\n```\n", "## Same", "## Same\n#### too deep", "## Ünï, code!"]
    notebook = tmp_path / "01_x.ipynb"
    made = [{"cell_type": "markdown", "source": cell} for cell in cells]
    notebook.write_text(json.dumps({"cells": made}), encoding="utf-8")
    assert [s.slug for s in ledger.sections(notebook)] == ["a-b--and-c", "same", "same-1", "ünï-code"]
    assert ledger.section_of(notebook, 1).text == "Same"


def test_text_that_means_something_in_markdown_shows_as_it_is():
    assert ledger.markdown("a|b <c> $d_e$ *f* [g]") == r"a\|b \<c\> \$d\_e\$ \*f\* \[g\]"


# ---- records: every figure -----------------------------------------------------------------------------------------


def figures_of(html: str) -> list[float]:
    """Every figure of a page's tables in SI units, by the header of its column or its own unit."""
    found = []
    for rows, line in re.findall(r'<p class="in-common">In all ([\d,]+) rows: (.*?)\.</p>', html):
        found += figures_in_words(line) * int(rows.replace(",", ""))
    for table in re.findall(r"<table.*?</table>", html):
        head, _, body = table.partition("</thead>")
        headers = re.findall(r"<th[^>]*>(.*?)</th>", head) if body else []
        units = [match[1] if (match := re.search(r'class="unit">\(([^)]+)\)', h)) else "" for h in headers]
        for group in re.findall(r"<tbody>(.*?)</tbody>", body or table):
            rows = re.findall(r"<tr>(.*?)</tr>", group)
            if 'class="shared"' in rows[0]:  # said once for all rows below, or for what a point holds by name
                found += figures_in_words(rows.pop(0)) * (1 if 'scope="row"' in group else len(rows))
            for row in rows:
                for column, inner in enumerate(re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)):
                    parts = [part.rpartition(": ")[2] for part in re.split(r", | <small>| to |</small>", inner)]
                    found += [value for part in parts if (value := si(part, units[column] if units else ""))]
    return found


def figures_in_words(line: str) -> list[float]:
    """The figures of a line such as "time <b>1.5 ms</b> <small>1.4 to 1.6</small>; sizes <b>1, 2 MB</b>"."""
    found = []
    for bold, small in re.findall(r"<b>(.*?)</b>(?: <small>(.*?)</small>)?", line):
        unit = bold.rpartition(" ")[2]
        parts = [part.rpartition(": ")[2] for part in (*bold.split(", "), *small.split(" to "))]
        found += [value for part in parts if (value := si(part, unit))]
    return found


def si(shown: str, unit: str) -> float:
    """A figure as printed, in SI units; 0 for a text."""
    match = re.fullmatch(r"(−?[\d,]*\.?\d+)(?:×10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?(?: (\D\S*))?", shown)
    if not match:
        return 0.0
    value = float(match[1].replace(",", "").replace("−", "-")) * 10.0 ** int((match[2] or "0").translate(SUPERSCRIPT))
    unit = match[3] or unit
    for base in sorted(PREFIXED, key=len, reverse=True):
        if unit.endswith(base) and unit[: -len(base)] in PREFIXES:
            return value * PREFIXES[unit[: -len(base)]]
    return value


def leaves(value) -> list[float]:
    """Every figure of a parsed record but zeros."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) and value else []


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_figure_of_a_record_stands_in_its_tables(benchmark):
    record = records.load(benchmark)
    html = "\n".join(block.html for block in blocks(record.results, "", 10**9))
    shown = sorted(figures_of(html))
    expected = sorted(float(leaf) for leaf in leaves(record.results))
    missing = unmatched(expected, shown)
    assert not missing, f"{len(missing)} of {len(expected)} figures are not on the page, such as {missing[:3]}"


def unmatched(expected: list[float], shown: list[float]) -> list[float]:
    """Figures for which no shown one is left within rounding; both lists are sorted."""
    missing, place = [], 0
    for value in expected:
        while place < len(shown) and shown[place] < value - ROUNDED * abs(value):
            place += 1
        if place < len(shown) and shown[place] <= value + ROUNDED * abs(value):
            place += 1
        else:
            missing.append(value)
    return missing


def test_a_figure_that_is_missing_would_be_found():
    results = {"points": [{"n": 1, "seconds": 0.0123}, {"n": 2, "seconds": 0.0456}]}
    html = "\n".join(block.html for block in blocks(results, "", 1))
    assert unmatched(sorted(leaves(results)), sorted(figures_of(html))) == [0.0456, 2]


# ---- records: pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_record_page_says_what_when_where_and_with_what(benchmark):
    record = records.load(benchmark)
    page = record_pages.page(record)
    raw = json.loads(records.path_of(benchmark).read_text(encoding="utf-8"))
    sources = record_pages.files_of(record.sources)
    for fact in (markdown(record.device), record.date, record.command, record.fingerprint, raw["digest"], *sources):
        assert fact in page, fact
    assert all(version in page for version in record.versions.values())
    assert f"{{download}}`{benchmark}.json`" in page
    assert page.count("\n# ") + page.startswith("# ") == 1
    assert len(page.encode()) < 220_000
    levels = [len(marks) for marks in re.findall(r"^(#+) ", page, re.MULTILINE)]
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), levels
    assert all("\n" not in block.html for block in record_pages.results(record.results))


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_record_page_begins_with_a_chart_of_its_own_figures_and_ends_with_how_it_was_measured(benchmark):
    record = records.load(benchmark)
    page = record_pages.page(record)
    parts = [page.index(part) for part in ('<figure class="record-chart">', "## Results", "## How it was measured")]
    assert parts == sorted(parts)
    drawn = record_charts.chart(benchmark, record.results)
    assert drawn.count("<svg") == 2 and "nan" not in drawn
    said = unescape(re.search(r'aria-label="([^"]*)"', drawn)[1]).partition(". ")[2]
    parts = [part.rpartition(": ")[2] for part in said.split("; ")]
    ends = [value for part in parts for one in re.split(", | at ", part) if (value := si(one, ""))]
    known = leaves(record.results)
    assert ends and not [v for v in ends if not any(abs(v - leaf) <= ROUNDED * abs(v) for leaf in known)]


def test_a_chart_that_finds_no_figure_says_where_it_looked():
    with pytest.raises(ValueError, match="no row of points has"):
        record_charts.choose({"points": [{"n": 1}]}, "points", "seconds")


def test_lines_of_several_measures_are_named_by_the_part_that_differs():
    results = {"points": [{"n": 1, "timed": {"ring": {"seconds": 1.0}, "one GPU": {"seconds": 2.0}}}]}
    chosen = record_charts.choose(results, "points", ["timed.ring.seconds", "timed.one GPU.seconds"], "n")
    assert list(chosen.lines) == ["ring", "one GPU"]


def test_the_list_has_every_record_and_each_is_in_one_part():
    page = record_pages.index(BENCHMARKS)
    for benchmark in BENCHMARKS:
        record = records.load(benchmark)
        assert page.count(f"]({benchmark}.md)") == 1
        assert f"\n{benchmark}\n" in page[page.index("{toctree}") :]
        assert f"`{record.fingerprint[:8]}`" in page and f"`{record_pages.digest_of(benchmark)[:8]}`" in page
    assert f"**{len(BENCHMARKS)} records.**" in page


def test_a_record_is_shown_in_the_notebooks_whose_code_loads_it():
    assert [path.stem for path in record_pages.shown_in("vocabulary")] == ["02_roofline"]
    assert [path.stem[:4] for path in record_pages.shown_in("operators")] == ["02_r", "03_f", "lab1"]
    assert record_pages.shown_in("kernel_errors") == ()


# ---- a made-up record ----------------------------------------------------------------------------------------------

MADE_UP = {
    "dtype": "bf16",
    "shape": {"batch": 2, "seq_len": 512},
    "nothing": [],
    "points": [
        {
            "name": "a <b> & c|d",
            "chosen": True,
            "tile": [64, 128],
            "peak_bytes": [1_500_000, 3_000_000],
            "timed": {
                "ours": {"seconds": 0.001, "flops_per_second": 5e14},
                "theirs": {"seconds": 0.002, "flops_per_second": 2.5e14},
            },
            "of_copy": {"ratio": 0.9},
        },
        {"name": "second", "chosen": False, "tile": [], "timed": {"ours": {"seconds": 0.5}}, "extra": None},
    ],
    "nested": [
        {"world_size": 2, "spans": [{"lane": "compute", "start": 0.0, "end": 1e-6}] * 9},
        {"world_size": 4, "spans": []},
    ],
    "histogram": list(range(25)),
    "deep": {"l1": {"counts": list(range(13))}, "l2": {"counts": list(range(13))}},
}


def html_of(results, rows=100) -> str:
    return "\n".join(f"{block.depth} {block.heading}\n{block.html}" for block in blocks(results, "", rows))


def test_a_made_up_record_with_nested_values_renders():
    html = html_of(MADE_UP)
    assert "a &lt;b&gt; &amp; c|d" in html and "<b> &" not in html
    assert '<th scope="col">time <span class="unit">(ms)</span></th>' in html
    assert '<td class="n">1</td><td class="n">500</td>' in html  # 1 ms and 500 TFLOP/s, beside theirs
    assert '<th scope="row">theirs</th><td class="n">2</td><td class="n">250</td>' in html
    assert "peak <b>1.5, 3 MB</b>; of copy: ratio <b>0.9</b></div></th></tr><tr>" in html  # said above the point's rows
    assert "64, 128" in html and "chosen <b>yes</b>" in html and "chosen <b>no</b>" in html
    second = [line for line in html.splitlines() if line.startswith("2 ")]
    assert second == ["2 world size 2", "2 world size 4, spans –", "2 l1", "2 l2"]
    assert "3 spans" in html and "3 counts" in html
    assert {"24", "12", "2", "512"} <= set(re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", html))
    assert html.count("<table") == html.count("</table>") and html.count("<tr>") == html.count("</tr>")


def heads_of(html: str) -> list[str]:
    return [re.sub("<[^>]+>", "", head) for head in re.findall(r'<th scope="col">(.*?)</th>', html)]


def test_what_was_measured_stands_right_behind_what_tells_rows_apart():
    shapes = [("wide", 64), ("wide", 96), ("tall", 64), ("tall", 96)]
    points = [
        {"kind": kind, "n": n, "flops": k, "bytes_moved": k, "seconds": k / 1e3, "spills": k % 2}
        for k, (kind, n) in enumerate(shapes, 1)
    ]
    heads = ["kind", "n", "time (ms)", "operations (FLOP)", "bytes moved (B)", "spills"]
    assert heads_of(html_of({"points": points})) == heads


def test_rows_that_share_a_name_stand_below_it_and_what_a_point_holds_by_name_below_the_point():
    points = [{"kind": kind, "n": n, "depth": d, "seconds": n * d} for kind in "ab" for n in (1, 2) for d in (3, 4)]
    html = html_of({"points": points})
    assert heads_of(html) == ["n", "depth", "time (s)"]
    assert re.findall(r'class="shared" colspan="3"><div>(.*?)</div>', html) == ["kind <b>a</b>", "kind <b>b</b>"]
    named = html_of(MADE_UP)
    assert re.search(
        r'colspan="3"><div>name <b>second</b>.*?</tr><tr><th scope="row">ours</th><td class="n">500', named
    )


def test_every_table_scrolls_in_a_box_that_the_keyboard_reaches():
    html = html_of(MADE_UP)
    boxes = re.findall(r'<div class="table-box" role="region" tabindex="0" aria-label="[^"]+"><table', html)
    assert len(boxes) == html.count("<table")


def test_a_table_that_is_too_long_shows_its_first_points_and_says_so():
    many = {"points": [{"n": n, "seconds": 0.001 * n} for n in range(1, 5001)]}
    html = "\n".join(block.html for block in record_pages.results(many))
    assert len(html.encode()) <= record_pages.MOST_BYTES
    assert "The first 400 of 5,000 points." in html
    assert "The first" not in html_of({"points": many["points"][:50]})


@pytest.mark.parametrize(
    ("path", "unit"),
    [(("seconds",), "s"), (("ttft", "p50"), "s"), (("kernels", "seconds", "gemm"), "s"), (("peak_bytes",), "B"),
     (("bytes_per_second",), "B/s"), (("bytes_per_cycle_per_sm",), "B/cycle"), (("load_cycles",), "cycles"),
     (("flops",), "FLOP"), (("best", "matmul_flops_per_second", "bf16"), "FLOP/s"), (("n",), ""), (("dtype",), ""),
     (("cache_bytes_per_token",), "B"), (("block_size",), ""), (("ratio_low",), "")],
)  # fmt: skip
def test_a_unit_is_what_the_names_say(path, unit):
    assert unit_of(path) == unit


def test_labels_and_texts_read_as_words():
    assert label("micro_batches") == "micro batches" and label("peak_bytes") == "peak" and label("bytes") == "bytes"
    assert label("past_l1") == "past L1" and label("fence_cycles") == "fence"
    assert label("calls_a_lap") == "calls per lap"
    assert label("kernel_seconds") == "kernel time" and label("seconds") == "time"
    assert label("dram__sectors_read.sum") == "dram__sectors_read.sum"
    assert text(None) == "–" and text([]) == "–" and text(True) == "yes" and text([0.001, 2.0], "s") == "1 ms, 2 s"


def test_no_page_names_a_place_of_one_machine():
    for path in (WEBSITE / "references.bib", *(WEBSITE / "pages").glob("*.md")):
        assert str(ROOT) not in path.read_text(encoding="utf-8"), Path(path).name
