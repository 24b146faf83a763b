"""Claims assert what they state, show it the same everywhere, and cannot quietly go missing from the ledger."""

import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import nbformat
import numpy as np
import pytest

from utils.claims import MIME, Claim, ClaimError, LedgerError, claim, ledger, page, problems
from utils.claims.__main__ import main
from utils.claims.page import PAGE
from utils.units import number, quantity, scale

ROOT = Path(__file__).resolve().parent.parent
RIDGE = Claim("roofline.ridge", 989e12 / 3.35e12, 295, "FLOP/B", "data sheet", 0.002, statement="Ridge point")


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(1792, "1,792"), (0, "0"), (-3, "−3"), (295.2238806, "295.22"), (0.5, "0.5"), (98.0, "98"), (1e-5, "1×10⁻⁵"),
     (989e12, "9.89×10¹⁴"), (999999.7, "1,000,000"), (0.12345678, "0.12346"), (-0.25, "−0.25"), (math.inf, "∞"),
     (np.float32(0.125), "0.125"), (np.int64(7), "7"), (99999.5, "100,000"), (123456.0, "123,460")],
)  # fmt: skip
def test_numbers_are_printed_with_fixed_significant_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(3.35e12, "B/s", "3.35 TB/s"), (989e12, "FLOP/s", "989 TFLOP/s"), (1.9e-4, "s", "190 µs"), (12.5, "s", "12.5 s"),
     (4325376, "B", "4,325,376 B"), (290.0, "cycles", "290 cycles"), (0.25, "FLOP/B", "0.25 FLOP/B"), (5.0, "", "5"),
     (1e12, "B/s", "1 TB/s"), (999.0, "B/s", "999 B/s"), (1e3, "B/s", "1 kB/s"), (0.0, "s", "0 s")],
)  # fmt: skip
def test_quantities_take_a_prefix_only_where_one_is_usual(value, unit, text):
    assert quantity(value, unit) == text


def test_a_scale_divides_its_value_into_readable_range():
    assert scale(3.35e12, "B/s") == (1e12, "TB/s")
    assert scale(290.0, "cycles") == (1.0, "cycles")


@pytest.mark.parametrize("bad", ["3", None, True, 1j])
def test_what_is_no_number_is_not_printed_as_one(bad):
    with pytest.raises(TypeError, match="real number"):
        number(bad)


# ---- one claim -----------------------------------------------------------------------------------------------------


def test_a_claim_that_holds_shows_one_line_and_returns_its_value(capsys):
    value = 989e12 / 3.35e12
    assert claim("roofline.ridge", value, 295, unit="FLOP/B", source="data sheet", tolerance=0.002) is value
    assert capsys.readouterr().out == ("✓ roofline.ridge: 295.22 FLOP/B · expected 295 FLOP/B ± 0.2 % · data sheet\n")


def test_a_claim_that_fails_names_id_values_tolerance_and_source():
    with pytest.raises(ClaimError) as error:
        claim("mystery.tiles", 120, 98, unit="tiles", source="syllabus", tolerance=0.01)
    for part in ("mystery.tiles", "120 tiles", "98 tiles", "22.4 %", "± 1 %", "syllabus"):
        assert part in str(error.value)
    assert isinstance(error.value, AssertionError)


@pytest.mark.parametrize(
    ("computed", "expected", "tolerance", "holds"),
    [(98, 98, 0, True), (99, 98, 0, False), (99, 98, 0.02, True), (0.1 + 0.2, 0.3, 0, True), (0.3001, 0.3, 0, False),
     (480.0, (480, 690), 0, True), (479.9, (480, 690), 0, False), (470, (480, 690), 0.03, True), (0, 0, 0, True),
     (-5.0, -5.1, 0.02, True), (-5.0, -5.1, 0.01, False), (True, True, 0, True), ("memory", "memory", 0, True),
     ("memory", "compute", 0, False), (2**60 + 1, 2**60, 0, False)],
)  # fmt: skip
def test_a_claim_holds_within_its_relative_tolerance_or_range(computed, expected, tolerance, holds):
    assert Claim("a.b", computed, expected, tolerance=tolerance).holds is holds


def test_numpy_torch_and_exact_scalars_are_numbers(capsys):
    torch = pytest.importorskip("torch")
    for value in (np.float64(0.5), np.int32(1), torch.tensor(0.5), Fraction(1, 2)):
        claim("a.b", value, (0.5, 1))
    claim("a.b", np.bool_(True))
    assert capsys.readouterr().out.count("✓") == 5


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"id": "Ridge"}, ValueError, "Ridge"),
        ({"id": "ridge"}, ValueError, "dots"),
        ({"id": 3}, TypeError, "3"),
        ({"computed": math.nan}, ValueError, "finite"),
        ({"computed": math.inf}, ValueError, "finite"),
        ({"computed": [1, 2]}, TypeError, r"\[1, 2\]"),
        ({"computed": np.arange(3)}, TypeError, "single number"),
        ({"expected": math.nan}, ValueError, "finite"),
        ({"expected": None}, ValueError, "held against"),
        ({"expected": (3, 2)}, ValueError, "low <= high"),
        ({"expected": (1, 2, 3)}, ValueError, "low, high"),
        ({"expected": "1"}, TypeError, "cannot be held"),
        ({"tolerance": -0.1}, ValueError, "-0.1"),
        ({"tolerance": "1%"}, TypeError, "1%"),
        ({"kind": "guess"}, ValueError, "guess"),
        ({"kind": "state"}, ValueError, "source"),
        ({"kind": "measure", "source": " "}, ValueError, "source"),
        ({"unit": None}, TypeError, "unit"),
        ({"statement": "two\nlines"}, ValueError, "one line"),
        ({"computed": True, "expected": True, "tolerance": 0.1}, ValueError, "tolerance"),
    ],
)
def test_a_malformed_claim_is_refused_by_name(arguments, error, words):
    valid = {"id": "a.b", "computed": 1, "expected": 1}
    with pytest.raises(error, match=words):
        claim(**(valid | arguments))


def test_a_claim_is_stored_and_read_back_the_same():
    for made in (RIDGE, Claim("a.b", 3, (2.5, 4.0)), Claim("a.c", True, True), Claim("a.d", "x", "x")):
        stored = json.loads(json.dumps(made.to_json()))
        again = Claim.from_json(stored)
        assert again.line() == made.line()
        assert again.to_json() == made.to_json()


def test_the_last_bits_of_a_float_do_not_reach_the_output():
    nudged = Claim(RIDGE.id, RIDGE.computed * (1 + 2e-16), *list(vars(RIDGE).values())[2:])
    assert (nudged.line(), nudged.to_html(), nudged.to_json()) == (RIDGE.line(), RIDGE.to_html(), RIDGE.to_json())


def test_html_escapes_what_the_author_wrote_and_has_no_fixed_text_colour():
    text = Claim("a.b", 1, 1, source="<b>&</b>", statement="x < y").to_html()
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in text and "x &lt; y" in text
    assert "background" not in text and "opacity" in text


# ---- notebooks -----------------------------------------------------------------------------------------------------


def write_notebook(folder, name, claims, *, sources=None, title="The roofline"):
    """A notebook as it is after execution: one cell and one stored output for each claim."""
    cells = [nbformat.v4.new_markdown_cell(f"# {title}\n\ntext", id="head")]
    sources = sources or [f'claim("{c.id}", value)' for c in claims]
    for k, (made, source) in enumerate(zip(claims, sources, strict=True)):
        data = {"text/plain": made.line(), "text/html": made.to_html(), MIME: made.to_json()}
        output = nbformat.v4.new_output("display_data", data=data)
        cells.append(nbformat.v4.new_code_cell(source, outputs=[output], execution_count=k + 1, id=f"c{k}"))
    path = folder / f"{name}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


TILES = Claim("mystery.tiles", 98, 98, "tiles")


@pytest.fixture
def course(tmp_path):
    """A folder with one notebook that makes two claims, and its page."""
    write_notebook(tmp_path, "02_roofline", [RIDGE, TILES])
    assert main(["--notebooks", str(tmp_path)]) == 0
    return tmp_path


def check(folder):
    return main(["--check", "--notebooks", str(folder)])


def test_the_ledger_reads_stored_outputs_in_order(course):
    made = ledger([course / "02_roofline.ipynb"])
    assert [(c.id, c.notebook, c.cell) for c in made] == [
        ("roofline.ridge", "02_roofline", 1),
        ("mystery.tiles", "02_roofline", 2),
    ]
    assert made[1] == TILES


def test_a_complete_course_passes_the_check(course, capsys):
    assert check(course) == 0
    assert "[ok] 2 claims" in capsys.readouterr().out


def test_a_changed_number_makes_the_page_out_of_date(course, capsys):
    write_notebook(course, "02_roofline", [RIDGE, Claim("mystery.tiles", 120, 120, "tiles")])
    assert check(course) == 1
    assert "CLAIMS.md is out of date" in capsys.readouterr().out


def test_a_missing_page_fails_the_check(course):
    (course / "CLAIMS.md").unlink()
    assert check(course) == 1


def test_a_claim_whose_output_was_cleared_fails(course, capsys):
    path = course / "02_roofline.ipynb"
    notebook = nbformat.read(path, 4)
    notebook.cells[2].outputs = []
    nbformat.write(notebook, path)
    assert check(course) == 1
    assert "02_roofline, cell 2: the source claims 'mystery.tiles' but the outputs lack it" in capsys.readouterr().out


def test_an_output_whose_claim_left_the_source_fails(tmp_path):
    write_notebook(tmp_path, "02_roofline", [TILES], sources=['claim("mystery.other", 98, 98)'])
    found = "\n".join(problems([tmp_path / "02_roofline.ipynb"]))
    assert "source claims 'mystery.other'" in found and "outputs claim 'mystery.tiles'" in found


def test_a_stored_claim_that_does_not_hold_fails(tmp_path):
    path = write_notebook(tmp_path, "02_roofline", [Claim("mystery.tiles", 120, 98, "tiles")])
    (problem,) = problems([path])
    assert "claim 'mystery.tiles' in 02_roofline does not hold: ✗ mystery.tiles: 120 tiles" in problem


def test_ids_built_in_a_loop_or_a_function_are_recognised(tmp_path):
    a, b = Claim("gpu.latency.l1", 33, 33), Claim("gpu.latency.l2", 200, 200)
    path = write_notebook(
        tmp_path, "01_gpu_model", [a, b, TILES],
        sources=["for k in d:\n    claims.claim(f'gpu.latency.{k}', d[k], d[k])",
                 "claim(id='gpu.latency.' + k, computed=1)",
                 "%time 1\ndef show(x):\n    claim('mystery.tiles', x, 98)\nshow(98)"],
    )  # fmt: skip
    assert problems([path]) == []


def test_one_id_with_two_values_is_an_error_and_twice_the_same_is_not(tmp_path):
    first = write_notebook(tmp_path, "01_gpu_model", [TILES])
    same = write_notebook(tmp_path, "02_roofline", [TILES])
    other = write_notebook(tmp_path, "03_five_tricks", [Claim("mystery.tiles", 120, 120, "tiles")])
    assert len(ledger([first, same])) == 1
    with pytest.raises(
        LedgerError, match=r"98 tiles \(01_gpu_model, cell 1\) and 120 tiles \(03_five_tricks, cell 1\)"
    ):
        ledger([first, other])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("computed", None, "computed must be a number"), ("computed", "98", "cannot be held against"),
     ("expected", [1, 2, 3], "a range is"), ("tolerance", "0", "tolerance must be a number"),
     ("unit", 3, "unit must be a string"), ("kind", "guess", "kind must be one of"), ("id", "Tiles", "got 'Tiles'")],
)  # fmt: skip
def test_a_stored_claim_that_was_edited_is_refused_by_value(tmp_path, key, value, words):
    path = write_notebook(tmp_path, "01_gpu_model", [TILES])
    notebook = json.loads(path.read_text())
    (stored,) = [o["data"][MIME] for c in notebook["cells"] for o in c.get("outputs", []) if MIME in o.get("data", {})]
    stored[key] = value
    path.write_text(json.dumps(notebook))
    with pytest.raises(LedgerError, match=f"01_gpu_model, cell 1: not a stored claim: .*{words}"):
        ledger([path])


def test_a_damaged_notebook_or_output_is_named(tmp_path):
    path = tmp_path / "01_gpu_model.ipynb"
    path.write_text("{}")
    with pytest.raises(LedgerError, match=r"01_gpu_model\.ipynb"):
        ledger([path])
    write_notebook(tmp_path, "01_gpu_model", [TILES])
    path.write_text(path.read_text().replace('"tolerance"', '"tolerances"'))
    with pytest.raises(LedgerError, match="01_gpu_model, cell 1: not a stored claim"):
        ledger([path])


def test_the_page_is_one_readable_table_a_notebook(course):
    text = page([course / "02_roofline.ipynb"])
    assert "## [The roofline](02_roofline.ipynb)" in text
    row = "| Ridge point<br>`roofline.ridge` | 295.22 | 295 | ± 0.2 % | FLOP/B | derive | data sheet |"
    assert row in text
    assert "| `mystery.tiles` | 98 | 98 | exact | tiles | derive | derivation |" in text
    assert text == (course / "CLAIMS.md").read_text()


def test_the_page_puts_both_values_of_a_row_in_one_unit(tmp_path):
    copy = Claim("copy.rate", 2.95e12, (2.8e12, 3.35e12), "B/s", "record | data sheet", kind="measure")
    path = write_notebook(
        tmp_path, "02_roofline", [copy, Claim("copy.bytes", 4_325_376, 4_325_376, "B"), Claim("a.b", True, True)]
    )
    text = page([path])
    assert "| 2.95 | 2.8 to 3.35 | exact | TB/s | measure | record \\| data sheet |" in text
    assert "| 4,325,376 | 4,325,376 | exact | B | derive | derivation |" in text
    assert "| yes | yes | exact | – | derive |" in text


def test_the_courses_own_ledger_holds_and_its_page_is_up_to_date():
    assert problems() == []
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m utils.claims`"


# ---- in a kernel ---------------------------------------------------------------------------------------------------


def run(*command, cwd):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-m", *command], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_in_a_notebook_a_claim_is_shown_once_and_nbval_catches_a_changed_number(tmp_path):
    from nbclient import NotebookClient

    source = 'from utils.claims import claim\nclaim("mystery.tiles", tiles, 98, unit="tiles", tolerance=0.5)'
    cells = [nbformat.v4.new_code_cell("tiles = 98", id="a"), nbformat.v4.new_code_cell("import utils.claims", id="b"),
             nbformat.v4.new_code_cell(source, id="c")]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    environment = {"cwd": str(tmp_path), "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    NotebookClient(notebook, timeout=60).execute(**environment)
    outputs = notebook.cells[2].outputs
    assert len(outputs) == 1, "the returned value must not be echoed below the claim's own line"
    assert outputs[0].data["text/plain"] == "✓ mystery.tiles: 98 tiles · expected 98 tiles ± 50 %"
    assert outputs[0].data[MIME]["computed"] == 98
    path = tmp_path / "01_test.ipynb"
    nbformat.write(notebook, path)
    assert [c.id for c in ledger([path])] == ["mystery.tiles"]

    notebook.cells[0].source = "tiles = 97  # still within the tolerance"
    nbformat.write(notebook, path)
    result = run("pytest", "--nbval", "--nbval-current-env", "-q", "-p", "no:cacheprovider", str(path), cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 failed, 2 passed" in result.stdout and "{'computed': 97}" in result.stdout, result.stdout


@pytest.mark.parametrize(("computed", "expected"), [(10**400, 1), (1.0, 10**400)])
def test_an_integer_beyond_the_floats_is_refused_by_name(computed, expected):
    with pytest.raises(ValueError, match=r"claim 'a\.b': .* must be finite and fit a float, got 1000"):
        claim("a.b", computed, expected)
