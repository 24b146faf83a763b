"""The home page: its map says what the notebooks say, its figure what the records say, and its links lead somewhere."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from utils import records
from utils.attention_math import AttentionShape, standard_cost
from utils.units import number, quantity
from website import course, course_map, facts, hero, teaching
from website.places import labs, lectures, page_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "website" / "pages"
STATIC = ROOT / "website" / "static"
LESSONS = sorted(page_of(path) for path in (*lectures(), *labs()))


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the generators write."""
    source = tmp_path_factory.mktemp("source")
    hero.write(source)
    course_map.write(source)
    return source


# ---- the course as data
@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("**Know first:** notebooks 01 to 03 (program, warp, 07).\n**Time:** 5 minutes", ("01", "02", "03")),
        ("**Know first:** notebook 04, section 7 (row softmax); notebook 03.\n**Time:** 5", ("03", "04")),
        ("**Know first:** notebooks 02 (two clocks), 04 (Triton) and 05.", ("02", "04", "05")),
        ("**Know first**: lecture [10 A](../../notebooks/10_a.ipynb); for 5.4 and 5.10 also lab 3.", ("10", "lab3")),
        ("**Know first:** Python, and how matrices multiply.", ()),
    ],
)  # fmt: skip
def test_what_a_notebook_names_as_known_is_read_from_its_line(line, keys):
    assert course.known_first(line) == keys


def test_a_notebook_that_does_not_say_what_to_know_or_how_long_it_takes_is_refused():
    with pytest.raises(ValueError, match="Know first"):
        course.known_first("# 15 Something")
    with pytest.raises(ValueError, match=r"\*\*Time:\*\*"):
        course.minutes_of("# 15 Something")


def test_times_are_read_with_and_without_exercises():
    assert course.minutes_of("**Time:** 75 minutes, and 45 for the exercises. Lab 3 follows.") == (75, 45)
    assert course.minutes_of("**Time**: about 6 hours for nine exercises, 100 points in all.") == (360, 0)


def test_every_lecture_and_lab_of_the_repository_is_in_one_part():
    found = [lesson.page for lesson in course.lessons()]
    assert sorted(found) == LESSONS
    assert [part.numeral for part in course.parts()] == ["I", "II", "III", "IV", "V", "", "VI"]
    assert all(sum(lesson.is_lab for lesson in part.lessons) == 1 for part in course.parts())


def test_lectures_come_in_reading_order_and_need_only_what_comes_before():
    order = [lesson.key for lesson in course.lessons()]
    numbers = [key for key in order if not key.startswith("lab")]
    assert numbers[:17] == [f"{n:02}" for n in range(1, 18)] and numbers == sorted(numbers)
    for lesson in course.lessons():
        assert all(order.index(key) < order.index(lesson.key) for key in lesson.needs), lesson.name


# ---- the map
@pytest.mark.parametrize("lesson", course.lessons(), ids=lambda lesson: lesson.key)
def test_the_lines_to_a_lesson_are_those_that_its_notebook_states(lesson):
    into = {edge.source for edge in course_map.edges() if edge.target == lesson.key}
    assert into <= set(lesson.needs)
    implied = set().union(*({key} | course.ancestors(key) for key in into))
    assert set(lesson.needs) <= implied, "what is stated and not drawn must follow from what is drawn"


@pytest.mark.parametrize("draw", [course_map.draw_rows, course_map.draw_column])
def test_both_drawings_have_every_lesson_once_and_every_edge(draw):
    drawn = draw()
    assert sorted(re.findall(r'href="([^"]+)\.html"', drawn)) == LESSONS
    lines = {(a, b) for a, b in re.findall(r'data-from="(\w+)" data-to="(\w+)"', drawn)}
    assert lines == {(edge.source, edge.target) for edge in course_map.edges()}
    assert drawn.count("aria-label=") == len(LESSONS)
    for lesson in course.lessons():
        assert f">{course.hours(lesson.minutes)}<" in drawn
        assert all(f">{line}<" in drawn or line in drawn for line in course_map.wrap(lesson.title, 16)[:1])


@pytest.mark.parametrize("place", [course_map.rows, lambda: course_map.column()[0]])
def test_no_two_lessons_of_a_drawing_overlap(place):
    for a, b in combinations(place().values(), 2):
        assert a.right < b.x or b.right < a.x or a.bottom < b.y or b.bottom < a.y


def test_no_line_crosses_a_lesson_or_lies_on_another():
    placed = course_map.rows()
    router = course_map._Router(placed)
    runs: list[tuple[str, tuple[float, ...]]] = []
    for edge in course_map.edges():
        points = router.route(edge)
        for (ax, ay), (bx, by) in pairwise(points):
            assert ax == bx or ay == by
            low_x, high_x, low_y, high_y = min(ax, bx), max(ax, bx), min(ay, by), max(ay, by)
            for key, box in placed.items():
                inside = low_x < box.right and high_x > box.x and low_y < box.bottom and high_y > box.y
                assert not inside, f"{edge} runs through {key}"
            runs.append((f"{edge}", (low_x, high_x, low_y, high_y)))
    for (one, a), (other, b) in combinations(runs, 2):
        along = a[0] == a[1] == b[0] == b[1] or a[2] == a[3] == b[2] == b[3]
        meet = a[0] <= b[1] and b[0] <= a[1] and a[2] <= b[3] and b[2] <= a[3]
        assert one == other or not (along and meet), f"{one} lies on {other}"


def test_titles_fit_into_their_boxes():
    for lesson in course.lessons():
        lines = course_map.wrap(lesson.title, 16)
        assert len(lines) <= 3 and max(map(len, lines)) <= 17, lines
        assert len(lesson.title) <= 34, "the narrow map has one line for a title"


# ---- the figure
def test_the_figures_numbers_are_those_of_the_record():
    memory = records.load("attention_memory").results
    times = {(t["way"], t["seq_len"]): t["seconds"] for t in memory["times"] if t["pass"] == "forward"}
    peaks = {(m["way"], m["seq_len"]): m["peak_bytes"] for m in memory["memory"] if m["pass"] == "forward"}
    shown = hero.lengths()
    assert [length.n for length in shown] == [n for way, n in sorted(times) if way == "ours" and n >= hero.SHORTEST]
    for length in shown:
        assert length.seconds == times["ours", length.n] and length.peak == peaks["ours", length.n]
        assert length.eager_seconds == times.get(("eager", length.n))
        assert length.eager_peak == peaks.get(("eager", length.n))
        shape = AttentionShape(1, memory["shape"]["heads"], length.n, memory["shape"]["head_dim"])
        assert length.eager_bytes == standard_cost(shape, memory["dtype"]).bytes
        assert length.least == 2 * 4 * shape.query_elements + 4 * shape.rows  # Q, K, V, O in 16 bits, L in 32
        assert length.scores == 2 * shape.score_elements


def test_where_eager_attention_did_not_fit_its_scores_are_larger_than_the_gpu():
    refused = records.load("attention_memory").results["refused"]
    for length in hero.lengths():
        if length.eager_seconds is None:
            assert f"eager, forward, N = {length.n}" in refused
            assert length.scores > hero.data()["gpuBytes"]


def test_what_the_script_draws_as_eager_memory_ends_at_the_measured_peak():
    for length in hero.lengths():
        output = hero.shape_at(length.n).query_elements * 2
        assert length.eager_peak is None or length.eager_peak == 2 * length.scores + output


def test_the_counters_are_shown_for_the_shape_that_they_were_read_for():
    traffic = records.load("attention_traffic").results
    start = hero.start_length()
    assert start.n == traffic["large_shape"]["seq_len"]
    rows = {row["name"]: row for row in traffic["large"]}
    for counted, row in zip(start.counted, (rows["eager"], rows["ours"]), strict=True):
        written = counted - row["hbm_bytes_read"]  # some of it waits in the L2 cache
        assert written == row["sm_bytes_written"] >= row["hbm_bytes_written"]
    assert [length.n for length in hero.lengths() if length.counted] == [start.n]
    assert start.counted[0] == pytest.approx(start.eager_bytes, rel=0.05)
    assert start.counted[1] == pytest.approx(start.least, rel=0.01)


def test_the_still_figure_has_every_number_its_device_and_its_date():
    drawn, start = hero.figure(), hero.start_length()
    for value, unit in (
        (start.eager_seconds, "s"), (start.seconds, "s"), (start.eager_bytes, "B"), (start.least, "B"),
        (start.eager_peak, "B"), (start.peak, "B"), (start.counted[0], "B"), (start.counted[1], "B"),
    ):  # fmt: skip
        assert quantity(float(value), unit, 3) in drawn
    assert f"{number(start.eager_seconds / start.seconds, 2)}×" in drawn
    assert f"{number(start.counted[0] / start.counted[1], 2)}×" in drawn
    for benchmark in ("attention_memory", "attention_traffic"):
        record = records.load(benchmark)
        assert f"{record.device}, {record.date}" in drawn
    assert drawn.count("<title") == drawn.count("<desc") == 2
    assert 'class="hero-controls" hidden' in drawn, "without a script there is nothing to press"


def test_the_kernels_tile_is_the_one_that_the_record_chose():
    (rows, keys), held = hero.on_chip()
    points = records.load("attention_blocks").results["points"]
    chosen = [p["tile"] for p in points if p["chosen"] and p["head_dim"] == 64]
    assert [rows, keys] == chosen[0][:2]
    assert held["Q"] == rows * 64 * 2 and held["S, P"] == rows * keys * 4


# ---- the facts
def test_the_facts_are_counted():
    counts = [count for count, *_ in facts.facts()]
    ledger = (ROOT / "notebooks" / "CLAIMS.md").read_text(encoding="utf-8")
    assert f"\n{counts[0]} claims: " in ledger
    assert counts[1] == facts.wrong_answers() > 500
    assert counts[2] == len(list((ROOT / "utils" / "records").glob("*.json")))
    assert "Made on NVIDIA H100 80GB HBM3 and NVIDIA H200;" in facts.facts_html()


# ---- pages
def test_the_table_of_contents_has_the_lessons_in_reading_order_by_their_names():
    """Sphinx, whose warnings are errors, holds that every page is in one table and that none is missing."""
    blocks = re.findall(r"```\{toctree\}(.*?)```", (PAGES / "index.md").read_text(encoding="utf-8"), re.DOTALL)
    assert all(":hidden:" in block and ":caption:" in block for block in blocks)
    entries = [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]
    titled = dict(re.fullmatch(r"(?:(.+) <)?([^<>]+)>?", entry).groups()[::-1] for entry in entries)
    named = [(page, titled[page]) for page in titled if page in LESSONS]
    assert named == [(lesson.page, lesson.name) for lesson in course.lessons()]


def test_the_readmes_words_are_the_pages_words(staged):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("laptop", "browser", "hardware"):
        made = (staged / "_generated" / f"{name}.txt").read_text(encoding="utf-8").strip()
        assert made.replace("| you have |", "| |", 1) in readme, "a piece without links is the README's to the letter"
    assert "make lab\n" in (staged / "_generated" / "laptop.txt").read_text(encoding="utf-8")
    assert "T4 and other GPUs" in (staged / "_generated" / "hardware.txt").read_text(encoding="utf-8")


def test_a_piece_whose_words_are_gone_is_refused(monkeypatch):
    monkeypatch.setitem(teaching.PIECES, "gone", ("README.md", "words that nobody wrote", ""))
    with pytest.raises(ValueError, match="words that nobody wrote"):
        teaching.piece("gone")


# ---- times
def test_the_table_of_times_adds_up():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in teaching.times_table().splitlines()[2:]]

    def minutes(text: str) -> int:
        hours = re.fullmatch(r"(\d+) h(?: (\d\d))?", text)
        return 60 * int(hours[1]) + int(hours[2] or 0) if hours else int(text.removesuffix(" min"))

    table = [[minutes(cell) for cell in row[1:]] for row in rows]
    assert [sum(column) for column in zip(*table[:-1], strict=True)] == table[-1]
    assert all(row[-1] == sum(row[:-1]) for row in table)


@pytest.mark.parametrize(
    ("minutes", "text"), [(75, "75 min"), (120, "2 h"), (165, "2 h 45"), (185, "3 h 05"), (60, "1 h")]
)
def test_hours_are_written_as_a_reader_says_them(minutes, text):
    assert course.hours(minutes) == text


def test_the_home_page_is_light_and_asks_nobody_else(staged):
    own = [staged / hero.FILE, staged / facts.FILE, staged / course_map.FILE, STATIC / "home.js", STATIC / "home.css"]
    texts = [path.read_text(encoding="utf-8") for path in own]
    assert sum(len(text.encode()) for text in texts) < 150_000
    for path, text in zip(own, texts, strict=True):
        assert not re.search(r"(?:https?:)?//[a-z]", re.sub(r"^\s*//.*$", "", text, flags=re.M)), path.name


# ---- in a browser


def opened(browser: Any, staged: Path, script: bool = True, **options: Any) -> Any:
    """A tab with the figure and the map alone, as the page has them; its errors fail the test."""
    figure, graph = ((staged / name).read_text(encoding="utf-8") for name in (hero.FILE, course_map.FILE))
    css, js = ((STATIC / name).read_text(encoding="utf-8") for name in ("home.css", "home.js"))
    body = f'<div class="bd-article">{figure}{graph}</div>' + (f"<script>{js}</script>" if script else "")
    page = f'<!doctype html><html lang="en" data-theme="light"><title>Home</title><style>{css}</style>{body}</html>'
    tab = browser.new_page(**options)
    tab.on("pageerror", lambda error: pytest.fail(f"the script failed: {error}"))
    tab.set_content(page)
    return tab


METERS = """[...document.querySelectorAll('.hero-panels section')].map(s => ['time', 'bytes', 'memory'].map(
    n => s.querySelector('[data-' + n + ']').textContent))"""
AT = """t => { const r = document.querySelector('.buttons input'); r.value = t; r.dispatchEvent(new Event('input')) }"""


def value(text: str) -> float:
    amount, unit = text.split()
    return float(amount) * {"µ": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}.get(unit[:-1], 1)


@pytest.mark.slow
def test_the_script_ends_every_run_at_the_numbers_of_the_record(browser, staged):
    tab = opened(browser, staged, reduced_motion="reduce")
    for length in hero.lengths():
        tab.check(f'input[name="hero-n"][value="{length.n}"]', force=True)
        for at in (None, 1000):  # as it was opened, and at the end of a run
            if at is not None:
                tab.evaluate(AT, at)
            eager, flash = tab.evaluate(METERS)
            assert [value(x) for x in flash] == pytest.approx([length.seconds, length.least, length.peak], rel=5e-3)
            if length.eager_seconds is None:
                assert eager == ["–"] * 3 and tab.is_visible(".no-fit")
            else:
                expected = [length.eager_seconds, length.eager_bytes, length.eager_peak]
                assert [value(x) for x in eager] == pytest.approx(expected, rel=5e-3) and tab.is_hidden(".no-fit")
    tab.close()


@pytest.mark.slow
def test_halfway_the_counts_are_those_of_the_walk(browser, staged):
    tab = opened(browser, staged, reduced_motion="reduce")
    start, tiles = hero.start_length(), hero.TILES
    at = 20.5  # tiles of the walk: two rows are done, the third is at its fifth tile
    tab.evaluate(AT, 1000 * start.seconds * at / tiles**2 / start.eager_seconds)
    eager, flash = tab.evaluate(METERS)
    reads = start.reads[0] * 3 / tiles + start.reads[1] + start.reads[2]
    assert value(flash[1]) == pytest.approx(reads + start.writes * 2 / tiles, rel=5e-3)
    assert value(flash[2]) == pytest.approx(start.peak * 2 / tiles, rel=5e-3)
    assert value(eager[0]) == value(flash[0]) == pytest.approx(start.seconds * at / tiles**2, rel=5e-3)
    assert tab.locator('[data-way="flash"] .s.chip').get_attribute("data-s") == "20"
    assert tab.locator('[data-way="flash"] .io.chip').count() == 4, "Q, K, V and O, each a tile"
    assert tab.locator('[data-way="flash"] .s.on').count() == 0, "no score is ever stored"
    tab.close()


@pytest.mark.slow
def test_the_figure_steps_plays_pauses_and_honours_reduced_motion(browser, staged):
    tab = opened(browser, staged, reduced_motion="reduce")
    assert tab.locator(".buttons button").count() == 4 and tab.get_attribute("button >> nth=0", "aria-label") == "Play"
    tab.wait_for_timeout(1500)
    assert tab.input_value(".buttons input") == "1000", "both have run, and nothing moves by itself"
    tab.click('button[aria-label="Back to the start"]')
    tab.click('button[aria-label="One step forward"]')
    assert "keys 512" in tab.text_content(".say")
    tab.click('button[aria-label="One step back"]')
    assert "keys 0–511" in tab.text_content(".say")
    tab.focus('button[aria-label="Play"]')
    tab.keyboard.press("Enter")
    assert tab.get_attribute("button >> nth=0", "aria-label") == "Pause"
    tab.keyboard.press("Enter")
    assert tab.get_attribute("button >> nth=0", "aria-label") == "Play"
    tab.close()
    moving = opened(browser, staged, viewport={"width": 1200, "height": 1600})
    moving.wait_for_timeout(1500)
    assert moving.input_value(".buttons input") == "1000", "the finished run waits for its reader"
    moving.click('button[aria-label="Play"]')
    moving.wait_for_function("Number(document.querySelector('.buttons input').value) < 1000")
    moving.click('button[aria-label="Pause"]')
    held = moving.input_value(".buttons input")
    moving.wait_for_timeout(200)
    assert moving.input_value(".buttons input") == held
    moving.close()


@pytest.mark.slow
def test_without_scripts_the_figure_is_whole_and_nothing_scrolls_sideways(browser, staged):
    for width in (360, 390, 1280):
        for script in (True, False):
            tab = opened(browser, staged, script, viewport={"width": width, "height": 800}, reduced_motion="reduce")
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (width, script)
            assert tab.is_visible(".verdict") and tab.is_visible(".hero-controls") == script
            assert tab.is_visible(".map-rows") == (width == 1280) and tab.is_visible(".map-column") == (width != 1280)
            tab.close()


@pytest.mark.slow
def test_a_lesson_with_focus_shows_all_that_it_builds_on(browser, staged):
    tab = opened(browser, staged, viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    for lesson in course.lessons():
        tab.focus(f'.map-rows [data-key="{lesson.key}"]')
        lit = tab.evaluate("[...document.querySelectorAll('.map-rows .node.needed')].map(n => n.dataset.key)")
        assert set(lit) == {lesson.key} | course.ancestors(lesson.key)
    tab.close()
