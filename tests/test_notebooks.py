"""The notebooks as they are stored, and the rules and tools that keep them so."""

import base64
import copy
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import nbval.plugin
import pytest

from grading.student_copy import _imported, _modules, _named_in
from utils import notebooks
from utils.course_modules import Course

ROOT = notebooks.ROOT
STORED = sorted([*ROOT.glob("notebooks/[!.]*.ipynb"), *ROOT.glob("solutions/*/[!.]*.ipynb")])


def small_notebook(tmp_path: Path, *sources: str) -> Path:
    """A notebook of a setup cell and the given code cells, executed."""
    path = tmp_path / "small.ipynb"
    cells = [nbformat.v4.new_code_cell("pass", metadata={"tags": ["setup"]}, id="setup")]
    cells += [nbformat.v4.new_code_cell(source, id=f"cell-{n}") for n, source in enumerate(sources)]
    notebooks.write(nbformat.v4.new_notebook(cells=cells), path)
    notebooks.stamp(path)
    notebooks.execute(path)
    return path


def run_nbval(*arguments: object) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--nbval",
        "--nbval-current-env",
        *map(str, arguments),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_notebook_was_executed_whole_and_keeps_the_rules(path):
    assert notebooks.problems(path) == []


#: Lines of code that a lecture leaves open, at most: what is drawn, tabulated and asserted is folded.
OPEN_LINES = {"04_triton": 600}


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/[!.]*.ipynb")), ids=lambda path: path.stem)
def test_a_lecture_folds_what_a_reader_can_do_without(path):
    count = 0
    for cell in notebooks.code_cells(notebooks.read(path)):
        folded, tags = notebooks.is_folded(cell), notebooks.tags(cell)
        assert folded or not {"setup", "write-here-check"} & set(tags), cell.id
        assert not (folded and "write-here" in tags), f"{cell.id}: a reader writes in it"
        assert folded or not cell.source.startswith(("plots.", "fig", "display(")), f"{cell.id} only draws"
        count += 0 if folded else sum(bool(line.strip()) for line in cell.source.splitlines())
    assert 50 < count <= OPEN_LINES.get(path.stem, 400)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_notebook_has_one_title_and_its_links_lead_somewhere(path):
    text = "\n".join(cell.source for cell in notebooks.read(path).cells if cell.cell_type == "markdown")
    text = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", text)  # x[(0,)](1) in code is no link
    assert len(re.findall(r"(?m)^# ", text)) == 1
    for target in re.findall(r"\]\((?!https?://|#|attachment:)([^)\s]+)\)", text):
        # a lab's notebook is read in labs/, where its relative links must lead somewhere too
        assert (path.parent / target.split("#")[0]).exists(), f"{path.name} links to {target}"


#: The least height in pixels of a figure's letters (of their em) where the figure is 360 pixels wide, as on a phone.
LEAST_LETTERS = 7.5


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/[!.]*.ipynb")), ids=lambda path: path.stem)
def test_a_phone_shows_no_figure_with_letters_too_small_to_read(path):
    """Of the outlines that the site shows; a cell whose output depends on the machine may wait for that machine."""
    small = []
    for cell in notebooks.code_cells(notebooks.read(path)):
        for output in cell.outputs if "nbval-ignore-output" not in notebooks.tags(cell) else ():
            if svg := output.get("metadata", {}).get("image/png", {}).get("svgz"):
                drawn = gzip.decompress(base64.b64decode(svg)).decode()
                width = float(re.search(r'viewBox="0 0 ([\d.]+) ', drawn)[1])
                scales = re.findall(r'<g [^>]*transform="translate[^"]* scale\(([\d.]+) -\1\)"', drawn)
                least = 100 * min(map(float, scales)) * 360 / width  # letters are outlined at 100 points
                small += [f"{cell.id}: {least:.1f} pixels"] if least < LEAST_LETTERS else []
    assert not small


@pytest.mark.slow
@pytest.mark.parametrize("number", ["05", "06", "07"])
def test_each_displayed_equation_of_part_iii_is_checked_before_the_next_one(number):
    (path,) = ROOT.glob(f"notebooks/{number}_*.ipynb")
    waiting, equations = None, 0
    for cell in notebooks.read(path).cells:
        if cell.cell_type == "code":
            if re.search(r"\b(holds|claim|close)\(|\bassert\b", cell.source):
                waiting = None
        elif "$$" in re.sub(r"(?s)<details>.*?</details>", "", cell.source):  # an answer's are checked with the others
            assert waiting is None, f"nothing checks the equations of cell {waiting}"
            waiting, equations = cell.id, equations + 1
    assert waiting is None, f"nothing checks the equations of cell {waiting}"
    assert equations > 10


@pytest.mark.slow
def test_a_stripped_cell_is_noticed_although_nbval_passes_it(tmp_path):
    path = small_notebook(tmp_path, "print(6 * 7)")
    assert notebooks.problems(path) == []
    stripped = notebooks.read(path)
    stripped.cells[1].outputs = []
    notebooks.write(stripped, path)
    assert any("outputs were stripped" in line for line in notebooks.problems(path))
    stripped.cells[1].execution_count = None  # as a stripping tool leaves it
    notebooks.write(stripped, path)
    assert any("never executed" in line for line in notebooks.problems(path))
    assert run_nbval(path).returncode == 0


@pytest.mark.slow
def test_a_changed_source_or_an_unexecuted_cell_is_noticed(tmp_path):
    path = small_notebook(tmp_path, "print(6 * 7)", "x = 1")
    edited = notebooks.read(path)
    edited.cells[1].source = "print(6 * 8)"
    edited.cells[2].execution_count = None
    notebooks.write(edited, path)
    found = "\n".join(notebooks.problems(path))
    assert "cell 1: its source changed" in found
    assert "cell 2: never executed" in found


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_nbval_takes_no_other_number_for_one_that_is_stored(path, request):
    """nbval's own comparison, of the outputs of each cell that it compares with themselves, one digit changed."""
    changes = 0
    for cell in nbval.plugin.IPyNbFile.from_parent(request.session, path=path).collect():
        if cell.options["check"]:
            stored = cell.cell.outputs
            assert cell.compare_outputs(stored, stored)
            for changed in each_with_a_digit_changed(stored):
                assert not cell.compare_outputs(changed, stored), f"{cell.name} of {path.name}"
                changes += 1
    assert changes


def each_with_a_digit_changed(outputs: list[nbformat.NotebookNode]) -> Iterator[list[nbformat.NotebookNode]]:
    """Copies of a cell's outputs, in each of which the first digit of one text is another."""
    for position, output in enumerate(outputs):
        holders = [(output, "text")] if output.output_type == "stream" else [(output.get("data", {}), "text/plain")]
        for holder, key in holders:
            if digit := re.search(r"\d", holder.get(key, "")):
                changed = copy.deepcopy(outputs)
                place = changed[position] if key == "text" else changed[position].data
                place[key] = other_digit(place[key], digit)
                yield changed


def other_digit(text: str, digit: re.Match) -> str:
    """The text with one of its digits another."""
    return text[: digit.start()] + str((int(digit[0]) + 1) % 10) + text[digit.end() :]


def with_a_digit_changed(path: Path) -> nbformat.NotebookNode:
    """The notebook up to its first compared output with a number in it, one digit of that output another."""
    notebook = notebooks.read(path)
    for position, cell in enumerate(notebook.cells):
        if cell.cell_type != "code" or "nbval-ignore-output" in notebooks.tags(cell):
            continue
        texts = [(o, "text") for o in cell.outputs if o.output_type == "stream"]
        texts += [(o.data, "text/plain") for o in cell.outputs if "text/plain" in o.get("data", {})]
        for holder, key in texts:
            if digit := re.search(r"\d", holder[key]):
                holder[key] = other_digit(holder[key], digit)
                notebook.cells = notebook.cells[: position + 1]
                return notebook
    raise AssertionError(f"{path.name} has no compared output with a number in it")


@pytest.mark.slow
def test_nbval_fails_at_the_cell_whose_stored_number_was_changed_and_only_there(tmp_path):
    """A run from end to end: a lecture, cut after its first compared output."""
    path = STORED[0]
    copy_, report = path.parent / f".{path.stem}_changed_{os.getpid()}.ipynb", tmp_path / "verdicts.xml"
    try:
        notebooks.write(with_a_digit_changed(path), copy_)
        run = run_nbval(copy_, f"--junitxml={report}")
        assert run.returncode == 1, run.stdout[-3000:]
    finally:
        copy_.unlink(missing_ok=True)
    *before, last = [
        [failure.text for failure in case.findall("failure")] for case in ElementTree.parse(report).iter("testcase")
    ]
    assert before and not any(before)
    assert "mismatch" in last[0]


# ---- a notebook opened alone
@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The course as others fetch it, with the setup cells of this working copy."""
    source = tmp_path_factory.mktemp("published") / "course"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    return source


def cell_sources(notebook: str, *ids: str) -> str:
    """The source of some of a notebook's cells, as Python."""
    cells = {cell.id: cell.source for cell in notebooks.read(ROOT / notebook).cells}
    lines = "\n".join(cells[name] for name in ids).splitlines()
    return "\n".join(line for line in lines if not line.startswith("%"))


def run_alone(folder: Path, code: str, repository: Path) -> subprocess.CompletedProcess[str]:
    """Run code where the course is not installed, as on a hosted runtime."""
    # -S leaves out what makes the course's own installation importable; its packages are added by hand
    environment = os.environ | {"MLF_REPOSITORY": str(repository), "PYTHONPATH": sysconfig.get_path("purelib")}
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_a_lecture_opened_alone_fetches_the_course(tmp_path, published):
    """The setup cell, run in an empty folder where the course cannot be imported, clones it and goes on there."""
    code = cell_sources("notebooks/01_gpu_model.ipynb", "setup")
    done = run_alone(tmp_path, f"{code}\nimport utils.runtime, os\nprint(utils.runtime.__file__)", published)
    assert done.returncode == 0, done.stderr
    course = tmp_path / "making-llms-fast"
    told, where = done.stdout.splitlines()
    assert told == f"The course is in {course}. The files of this notebook are in {course / 'notebooks'}."
    assert Path(where) == course / "utils" / "runtime.py"


@pytest.mark.slow
def test_a_lab_opened_alone_fetches_its_modules_and_finds_them_again_after_a_restart(tmp_path, published):
    notebook = "labs/lab3_flash_attention/lab3_flash_attention.ipynb"
    code = cell_sources(notebook, "setup", "imports")
    code += "\nimport lab3_flash_attention, utils\nprint(lab3_flash_attention.__file__)\nprint(utils.__file__)"
    for source in (published, tmp_path / "not asked again"):
        done = run_alone(tmp_path, code, source)
        assert done.returncode == 0, done.stderr
        course = tmp_path / "making-llms-fast"
        assert [os.path.normpath(line) for line in done.stdout.splitlines()[1:]] == [
            str(course / "labs" / "lab3_flash_attention" / "__init__.py"),
            str(course / "utils" / "__init__.py"),
        ]


@pytest.mark.slow
def test_a_lab_opened_alone_takes_the_modules_that_lie_beside_it(tmp_path, published):
    folder = tmp_path / "lab3_flash_attention"
    shutil.copytree(ROOT / "labs" / folder.name, folder)
    code = cell_sources(f"labs/{folder.name}/{folder.name}.ipynb", "setup", "imports")
    done = run_alone(folder, f"{code}\nprint(merge.__code__.co_filename)", published)
    assert done.returncode == 0, done.stderr
    assert os.path.normpath(done.stdout.splitlines()[-1]) == str(folder / "merge.py")


def test_a_notebook_that_cannot_fetch_the_course_says_what_git_says(tmp_path):
    code = cell_sources("notebooks/01_gpu_model.ipynb", "setup")
    done = run_alone(tmp_path, code, tmp_path / "nowhere")
    said = done.stderr.split("RuntimeError: ")[1].splitlines()
    assert said[0].startswith("git clone") and said[0].endswith("failed: is this runtime connected to the internet?")
    assert "does not exist" in said[1]


@pytest.mark.slow
def test_the_setup_cell_installs_every_package_that_a_notebook_imports():
    """All others come with the kernel that runs the notebook (IPython, comm), or with one of these."""
    paths = {
        path.relative_to(ROOT).as_posix(): path
        for path in (*ROOT.glob("notebooks/[0-9]*.ipynb"), *ROOT.glob("solutions/*/*.ipynb"))
    }
    named = {module for name, path in paths.items() for module in _named_in(name, path.read_text(encoding="utf-8"))}
    named |= {f"solutions.{module}" for module in named if module.startswith("lab")}
    files = _imported(Course(ROOT), named)
    named |= {module for file in files for module in _modules((ROOT / file).read_text(encoding="utf-8"), file)}
    imported = {module.split(".")[0] for module in named}
    own = {path.name for path in ROOT.glob("*/")} | {path.name for path in ROOT.glob("solutions/lab*")}
    others = imported - sys.stdlib_module_names - own
    assert others >= {"torch", "tokenizers", "uvicorn"}
    assert others - set(notebooks.NEEDED.split()) == {"IPython", "comm", "PIL", "starlette", "pydantic", "jinja2"}


def test_a_broken_notebook_is_named_in_the_error(tmp_path):
    broken = tmp_path / "broken.ipynb"
    broken.write_text("{not json")
    with pytest.raises(notebooks.NotebookError, match=re.escape(str(broken))):
        notebooks.read(broken)
    broken.write_text(json.dumps({"cells": 3}))
    with pytest.raises(notebooks.NotebookError, match="not a valid notebook"):
        notebooks.read(broken)
    with pytest.raises(notebooks.NotebookError, match="no such notebook"):
        notebooks.read(tmp_path / "missing.ipynb")


def test_a_notebook_without_a_setup_cell_cannot_be_stamped(tmp_path):
    path = tmp_path / "bare.ipynb"
    notebooks.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")]), path)
    with pytest.raises(notebooks.NotebookError, match="exactly one code cell tagged 'setup', has 0"):
        notebooks.stamp(path)


def test_rules_name_the_cell_and_what_is_wrong(tmp_path):
    cell = nbformat.v4.new_code_cell("show(figure)", execution_count=1, metadata={"tags": ["nbval-skip"]})
    cell.outputs = [
        nbformat.v4.new_output("display_data", {"image/png": "AAAA", "text/html": '<img src="https://x.org/a.png">'}),
        nbformat.v4.new_output("stream", name="stderr", text="a warning"),
        nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[]),
    ]
    cell.metadata[notebooks.MARK] = {"outputs": 3, "source": notebooks.source_mark(cell), "device": "cpu"}
    path = tmp_path / "rules.ipynb"
    notebooks.write(nbformat.v4.new_notebook(cells=[cell]), path)
    found = "\n".join(notebooks.problems(path))
    for words in ("setup cell", "nbval-skip", "alternative text", "network", "stderr", "stores an error, ValueError"):
        assert words in found, words


def test_text_that_a_cell_printed_word_by_word_is_stored_as_one_text_in_its_place():
    def out(name, text):
        return nbformat.v4.new_output("stream", name=name, text=text)

    figure = nbformat.v4.new_output("display_data", {"text/plain": "<figure>"})
    joined = notebooks._joined([out("stdout", "Call"), out("stdout", " me\n"), figure, out("stdout", "Ishmael.")])
    assert [o.get("text") for o in joined] == ["Call me\n", None, "Ishmael."]
    assert len(notebooks._joined([out("stdout", "a"), out("stderr", "b"), out("stdout", "c")])) == 3


def live_rows(path: Path) -> Iterator[tuple[str, str, float, float]]:
    """Cell, row, live and recorded number of each stored table with columns "here, now" and "recorded"."""
    for cell in notebooks.code_cells(notebooks.read(path)):
        for output in cell.outputs:
            page = output.get("data", {}).get("text/html", "")
            rows = [re.findall(r"(?s)<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"(?s)<tr.*?</tr>", page)]
            names = [re.sub(r" \(\S+\)$", "", name) for name in rows[0]] if rows else []  # without the unit
            if {"here, now", "recorded"} <= set(names):
                live, recorded = names.index("here, now"), names.index("recorded")
                for row in rows[1:]:
                    numbers = [re.match(r"[\d,]*\.?\d+", row[i]) for i in (live, recorded)]
                    if all(numbers):
                        yield cell.id, row[0], *(float(number[0].replace(",", "")) for number in numbers)


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/[!.]*.ipynb")), ids=lambda path: path.stem)
def test_a_stored_live_column_is_within_15_percent_of_the_record_of_its_device(path):
    far = [
        f"{cell}, {row}: {live:g} beside {recorded:g}"
        for cell, row, live, recorded in live_rows(path)
        if not 1 / 1.15 <= live / recorded <= 1.15
    ]
    assert not far, "measure again on a quiet, warm card, or do not store it:\n" + "\n".join(far)
