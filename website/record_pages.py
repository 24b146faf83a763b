"""The pages of recorded measurements: a list of all, and for each what was measured, where, when and with what.

``write`` puts ``records/index.md``, a page for each benchmark and a copy of its JSON into the site's sources. What a
benchmark measures is told in its own docstring.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from utils import records
from utils.claims.page import title
from utils.course_modules import Course
from utils.fingerprint import files
from utils.records import Record
from utils.units import number
from website import record_charts
from website.course import parts
from website.ledger import markdown, script
from website.places import ROOT, labs, lectures, on_github, page_of
from website.record_figures import label
from website.record_tables import Block, blocks

_COURSE = Course()
#: The course's parts and the keys of their lectures and labs; a record that none of them shows is among the others.
PARTS = {part.label: [lesson.key for lesson in part.lessons] for part in parts()} | {"Others": []}
#: A page's tables take at most so many bytes; longer tables show their first points and the JSON has the rest.
MOST_BYTES = 180_000
_ROWS = (400, 300, 200, 150, 100, 50, 20)

#: A record's page has no list of its sections beside it: that room is its tables'.
_ROOM = "---\nhtml_theme.sidebar_secondary.remove: true\n---\n"

_INDEX = """\
# Records

What a GPU really did. Each record below was made by one benchmark on the device named, and is stored with its
date, the versions that ran and a fingerprint of the measured source: when that source changes, a test fails until
it is measured again. A digest covers the whole file, so that a figure that was edited is refused. Readers without a
GPU see these figures in the notebooks, and claims of kind *measure* rest on them. Where the device is a CPU, nothing
was timed: the record holds the results of a calculation that takes minutes.
"""


def write(source: Path) -> None:
    """Write the pages and the JSON files into ``records/`` of the site's sources."""
    folder = source / "records"
    folder.mkdir(parents=True, exist_ok=True)
    benchmarks = records.benchmark_names()
    (folder / "index.md").write_text(index(benchmarks), encoding="utf-8")
    for benchmark in benchmarks:
        (folder / f"{benchmark}.md").write_text(page(records.load(benchmark)), encoding="utf-8")
        (folder / f"{benchmark}.json").write_bytes(records.path_of(benchmark).read_bytes())


def digest_of(benchmark: str) -> str:
    """The digest that a benchmark's file states; :func:`utils.records.load` refuses a file that does not match it."""
    return json.loads(records.path_of(benchmark).read_text(encoding="utf-8"))["digest"]


# ---- the list ------------------------------------------------------------------------------------------------------


def index(benchmarks: Sequence[str]) -> str:
    """The list of all records as MyST Markdown, a table for each part of the course."""
    loaded = [records.load(benchmark) for benchmark in benchmarks]
    shared = {json.dumps(dict(record.versions), sort_keys=True) for record in loaded}
    ran = f"All ran with {_versions(loaded[0])}" if len(shared) == 1 else "Each page says with which versions it ran"
    lines = [_INDEX, f"**{len(loaded)} records.** {ran}.\n"]
    parts = [part_of(record) for record in loaded]
    for part in PARTS:
        members = [record for record, its in zip(loaded, parts, strict=True) if its == part]
        if members:
            lines += [f"## {part}\n", _list(members)]
    lines += ["```{toctree}\n:hidden:\n", *benchmarks, "```\n", script("../_static")]
    return "\n".join(lines)


def _list(members: Sequence[Record]) -> str:
    lines = [
        ":::{div} records",
        "| measured | device, date | shown in | repeated by |",
        "|:---|:---|:---|:---|",
    ]
    for record in members:
        cells = (
            f"[{heading(record.benchmark)}]({record.benchmark}.md)<br>{_first_sentence(record)}",
            f"{record.device}<br>{record.date}",
            ", ".join(_link(path, short=True) for path in shown_in(record.benchmark)) or "–",
            f"`{record.command}`<br><small>{_count(len(files_of(record.sources)), 'source')}, fingerprint "
            f"`{record.fingerprint[:8]}`, digest `{digest_of(record.benchmark)[:8]}`</small>",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ":::"]) + "\n"


@cache
def files_of(sources: tuple[str, ...]) -> list[str]:
    """The files that a record's fingerprint is taken of."""
    return files(sources, _COURSE)


def heading(benchmark: str) -> str:
    """A benchmark's name as a heading: "Attention blocks"."""
    return _capital(label(benchmark))


def part_of(record: Record) -> str:
    """The part of the course that a record belongs to: that of the first notebook that shows it, else of its lab."""
    shown = [path.stem.split("_")[0] for path in shown_in(record.benchmark)]
    measured = re.findall(r"solutions/(lab\d)_", " ".join(files_of(record.sources)))
    found = (part for place in (*shown, *measured) for part, places in PARTS.items() if place in places)
    return next(found, "Others")


@cache
def shown_in(benchmark: str) -> tuple[Path, ...]:
    """The lectures and labs whose code loads a benchmark's record, in reading order."""
    return tuple(path for path in (*lectures(), *labs()) if benchmark in _loaded_by(path))


@cache
def _loaded_by(notebook: Path) -> frozenset[str]:
    """Benchmarks that a notebook's code loads, or that the checks of a lab load for it."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    if notebook.stem.startswith("lab"):
        checks = notebook.parent / "exercises"
        code += [path.read_text(encoding="utf-8") for path in sorted(checks.glob("*.py"))]
    return frozenset(re.findall(r"records\.load\(\s*[\"'](\w+)[\"']", "\n".join(code)))


# ---- one record ----------------------------------------------------------------------------------------------------


def page(record: Record) -> str:
    """A record's page as MyST Markdown: a chart, all results as tables, then settings and how it was measured."""
    shown = ", ".join(_link(path) for path in shown_in(record.benchmark))
    settings, *tables = results(record.results)
    first, _, words = _words(record).partition("\n\n")
    return "\n".join(
        [
            _ROOM,
            f"# {heading(record.benchmark)}\n",
            first + "\n",
            record_charts.chart(record.benchmark, record.results) + "\n",
            words + "\n",
            f"Shown in: {shown}.\n" if shown else "No notebook draws it; the tests of the lab's kernels rest on it.\n",
            "## Results\n",
            _notes(record.results) + f"All figures in full: {{download}}`{record.benchmark}.json`.\n",
            *map(_markdown, tables or [settings]),
            *(["## Settings and single figures\n", settings.html + "\n"] if tables and settings.html else []),
            "## How it was measured\n",
            _provenance(record) + "\n",
            script("../_static"),
        ]
    )


def results(recorded: object) -> list[Block]:
    """A record's results as tables, as many points of each as fit in :data:`MOST_BYTES`."""
    for rows in _ROWS:
        made = list(blocks(recorded, "", rows))
        if sum(len(block.html.encode()) for block in made) <= MOST_BYTES:
            break
    return made


def _markdown(block: Block) -> str:
    level = min(6, 2 + block.depth)
    lines = [f"{'#' * level} {markdown(_capital(block.heading))}\n"] if block.depth and block.heading else []
    return "\n".join([*lines, block.html, ""])


def _notes(results: object) -> str:
    text = json.dumps(results)
    note = ""
    if '"low"' in text or '"ratio_low"' in text:
        note += "A time is the median of all rounds; the small figures beside it are their 20th and 80th percentile. "
    if '"ratio"' in text:
        note += "A ratio is the median of the ratios within rounds. "
    return note


def _provenance(record: Record) -> str:
    sources = "<br>".join(f"[`{source}`]({on_github(ROOT / source)})" for source in files_of(record.sources))
    rows = (
        ("measured on", markdown(record.device)),
        ("date", record.date),
        ("versions", _versions(record)),
        ("repeated by", f"`{record.command}`"),
        ("measured source", sources),
        ("fingerprint of the source", f"`{record.fingerprint}`"),
        ("digest of the record", f"`{digest_of(record.benchmark)}`"),
    )
    body = "\n".join(f"| {name} | {text} |" for name, text in rows)
    return f":::{{div}} provenance\n| of the record | |\n|:---|:---|\n{body}\n:::"


def _versions(record: Record) -> str:
    names = {"python": "Python", "torch": "PyTorch", "triton": "Triton", "cuda": "CUDA", "numpy": "NumPy"}
    return ", ".join(f"{names.get(name, name)} {version}" for name, version in record.versions.items())


def _words(record: Record) -> str:
    """What was measured, from the docstring of the script that did it."""
    text = ast.get_docstring(ast.parse((ROOT / "benchmarks" / f"{record.benchmark}.py").read_text(encoding="utf-8")))
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"(``?)[^`]+?\1|[<>$*_\[\]{}]", lambda found: found[0] if "`" in found[0] else f"\\{found[0]}", text)


def _first_sentence(record: Record) -> str:
    first = _words(record).split("\n\n")[0].replace("\n", " ")
    return first.replace("|", "\\|")


def _link(path: Path, short: bool = False) -> str:
    text = path.stem.split("_")[0].replace("lab", "lab ") if short else title(path).split(":")[0]
    return f"[{markdown(text)}](/{page_of(path)}.ipynb)"


def _capital(text: str) -> str:
    """A text with a capital first letter, unless its first word has capitals of its own, as cuBLAS has."""
    return text if re.match(r"\S*[A-Z]", text) else text[0].upper() + text[1:]


def _count(count: int, noun: str) -> str:
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"
