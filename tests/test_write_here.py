"""The cells of lectures to write in: unwritten they say so, the folded answer passes, a wrong one is told."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from lab_places import ROOT

from utils import notebooks
from utils.kernel_profile import profile_kernel
from utils.write_here import Diagnostic, compare

#: Cell -> cells before it that its check uses, besides the imports.
USES = {
    "write-keep-s1-cell": ["b1f2dbc9"], "write-resized-cell": ["matrix"], "write-promoted-cell": ["tensor-core"],
}  # fmt: skip
#: Cell -> an edit that makes its answer wrong, and what is said then.
WRONG = {
    "write-resized-cell": (("replace(matrix, element_size=element_size)", "matrix"), "result 3: expected 2, got 4"),
    "write-counted-cell": (("return function(x)", "function(x)"), "it returned None"),
    "write-batches-cell": (("if batch:", "if False:"), "case 1 (7, 3): result 1: expected 3 results"),
    "write-centered-rows-cell": ((", keepdim=True", ""), "case 1: element (0, 1): expected"),
    "write-contiguous-strides-cell": (("axis + 1 :", "axis:"), "case 1: result 1: expected 12, got 24"),
    "write-split-heads-cell": (("seq_len, num_heads,", "num_heads, seq_len,"), "expected the shape (2, 2, 3, 2)"),
    "write-weight-gradient-cell": (("w.grad = None", "pass"), "case 2: element 0: expected"),
    "write-product-gradients-cell": (("w.T", "w"), "case 1: result 1: element (0, 0): expected"),
    "write-softmax-jacobian-cell": (("torch.diag(p)", "p"), "case 1: element (0, 1): expected"),
    "write-gap-above-cell": (("exponent - 7", "-7"), "case 2 (256.0,): expected 2, got 0.0078125"),
    "write-wide-sum-cell": (("sum(dtype=torch.float32)", "sum().float()"), "result 1: expected 1001, got 1000"),
    "write-read-seconds-cell": ((" / 8", ""), "expected 0.00477612, got 0.038209"),
    "write-elements-that-fit-cell": (("2**30", "10**9"), "expected 2.68435e+08, got 2.5e+08"),
    "write-kahan-cell": (("addend = value + lost", "addend = value"), "case 1: expected 5000, got 2048"),
    "write-keep-s1-cell": (('memory.read("s1")\n', 'memory.read("s1")\n    memory.read("y")\n'), "expected 6, got 7"),
    "write-add-bias-cell": (("mask=column < columns", "mask=None"), "outside of its shape"),
    "write-log-softmax-cell": (('other=float("-inf")', "other=0.0"), "case 1: element (0, 0): expected"),
    "write-running-sum-cell": (("range(0, pid + 1)", "range(0, pid)"), "case 1: element 0: expected 8, got 0"),
    "write-attention-step-cell": (("rescale * o + ", "o + "), "result 1: element (0, 0): expected"),
    "write-key-range-cell": (("min(first + block_m, num_queries)", "first + block_m"), "result 2: expected"),
    "write-swiglu-cell": (
        ("G.chunk(t, 1), U.chunk(t, 1)", "*zip(*(p.chunk(2, 1) for p in gate_up.chunk(t, 1)))"), "result 2: element",
    ),
    "write-forward-seconds-cell": (("max(seconds)", "seconds[-1]"), "case 3: expected 18, got 14"),
    "write-round-cell": (("exponent - 3", "exponent - 2"), "case 2: element"),
    "write-scale-cell": (("- 2)", "- 3)"), "case 1: element 0: expected 1, got 0.5"),
    "write-promoted-cell": (("kept +=", "kept ="), "case 2: element 0: expected"),
    "write-document-cell": (("token[:, None] >= token", "token[:, None] > token"), "element (0, 0): expected 1, got 0"),
    "write-absorbed-cell": (("q.shape[1] + r.shape[1]", "c.shape[1] + r.shape[1]"), "case 1: element (0, 0): expected"),
    "write-merge-cell": (("torch.logaddexp(L, L2)", "torch.maximum(L, L2)"), "case 1: result 1: element (0, 0, 0)"),
    "write-route-cell": (("weights / weights.sum(1, keepdim=True)", "weights"), "case 1: result 2: element (0, 0)"),
    "write-dispatch-cell": (("order // experts.shape[1]", "order % len(x)"), "case 1: result 1: element"),
    "write-combine-cell": (("out[order.argsort()]", "out[order]"), "case 1: element (0, 0): expected"),
    "write-zigzag-cell": (("2 * R - 1 - r", "R + r"), "case 1 (16, 2): result 1: element 4: expected 12, got 8"),
    "write-expected-cell": (
        ("rank = seen[parent] = seen.get(parent, -1) + 1", "rank = 0"), "case 2: expected 2.25, got 2.75",
    ),
    "write-rejected-cell": (("rest / rest.sum()", "rest"), "case 1: result 2: element"),
    "write-best-cell": (("(C / 6)", "C"), "case 1: element 0: expected"),
    "write-parabola-cell": (("(2 * c[2])", "c[2]"), "case 1: expected"),
    "write-served-cell": (("(x - 1)", "x"), "case 1: element 0: expected"),
}  # fmt: skip
CELLS = {
    cell.id: (path, cell)
    for path in sorted(ROOT.glob("notebooks/[!.]*.ipynb"))
    for cell in notebooks.read(path).cells if "write-here" in notebooks.tags(cell)
}  # fmt: skip


def answer(id_: str) -> str:
    """The code of the folded answer to a cell."""
    path, _ = CELLS[id_]
    (text,) = (c.source for c in notebooks.read(path).cells if c.id == id_.replace("-cell", "-answer"))
    return re.search(r"<details>\n<summary>Answer</summary>\n\n```python\n(.*?)```", text, re.DOTALL)[1]


def printed(id_: str, written: str, tmp_path: Path, capsys: pytest.CaptureFixture, between: str = "") -> list[str]:
    """The lines that the check below a cell prints when this is written in it."""
    path, _ = CELLS[id_]
    sources = {cell.id: cell.source for cell in notebooks.code_cells(notebooks.read(path))}
    imports = list(sources)[1]  # the cell after the setup
    parts = [
        sources[imports],
        *(sources[name] for name in USES.get(id_, ())),
        written,
        between,
        sources[id_.replace("-cell", "-check")],
    ]
    file = tmp_path / "cells.py"  # a kernel is read from its file
    file.write_text("\n\n\n".join(parts), encoding="utf-8")
    capsys.readouterr()
    exec(compile_(file), {"__name__": "cells"})
    return capsys.readouterr().out.splitlines()


def said(id_: str, written: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> str:
    """The verdict of the check below a cell; lines that are set in, such as what to read, belong to it."""
    return [line for line in printed(id_, written, tmp_path, capsys) if not line.startswith("  ")][-1]


def compile_(file: Path):
    return compile(file.read_text(encoding="utf-8"), str(file), "exec", dont_inherit=True)


def test_lectures_03_04_06_09_15_to_19_and_the_prerequisites_have_cells_to_write_in():
    assert set(CELLS) == set(WRONG)
    assert {path.name[:2] for path, _ in CELLS.values()} == {"00", "03", "04", "06", "09", "15", "16", "17", "18", "19"}


@pytest.mark.slow
@pytest.mark.parametrize("id_", CELLS)
def test_an_unwritten_cell_says_so_its_answer_passes_and_a_wrong_one_is_told(id_, tmp_path, capsys):
    name = re.findall(r"def (\w+)", CELLS[id_][1].source)[-1]
    assert said(id_, CELLS[id_][1].source, tmp_path, capsys) == f"{name}: not written yet"
    assert re.fullmatch(rf"✓ {name}: all \d+ cases agree", said(id_, answer(id_), tmp_path, capsys))
    (before, after), words = WRONG[id_]
    assert before in answer(id_)
    told = said(id_, answer(id_).replace(before, after), tmp_path, capsys)
    assert told.startswith(f"✗ {name}, case ") and words in told


@pytest.mark.parametrize(
    ("got", "expected", "words"),
    [
        (None, 1.0, "it returned None"),
        ((1.0,), (1.0, 2.0), "expected 2 results"),
        (torch.zeros(2), torch.zeros(3), "expected the shape (3,), got (2,)"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), "element 1: expected 2, got nan"),
    ],
)
def test_a_difference_is_said_in_words(got, expected, words, capsys):
    compare(lambda: got, lambda: expected, [()])
    assert words in capsys.readouterr().out


def test_an_error_a_missing_launch_and_the_arguments_are_said(capsys):
    compare(lambda n: [][n], lambda n: n, [(3,)])
    compare(lambda x: x, lambda x: x, [(torch.ones(2),)], profiler=profile_kernel)
    assert capsys.readouterr().out.splitlines() == [
        "✗ <lambda>, case 1 (3,): IndexError: list index out of range",
        "✗ <lambda>, case 1: it launched no kernel",
    ]


# ---- the prerequisites

QUESTIONS = [id_ for id_, (path, _) in CELLS.items() if path.name == "00_prerequisites.ipynb"]
#: Put in front of a check: each of the mistakes that it knows stands in place of what a reader writes.
EACH_MISTAKE = """
def each_mistake(area, yours, reference, cases, *, mistakes, **options):
    for words, wrong in mistakes.items():
        print("mistake:", words)
        wrong.__name__ = "wrong"
        Diagnostic.compare(quiz, area, wrong, reference, cases, mistakes=mistakes, **options)


quiz.compare = each_mistake
"""


@pytest.mark.parametrize("id_", QUESTIONS)
def test_each_mistake_that_a_question_knows_is_found_and_named(id_, tmp_path, capsys):
    lines = printed(id_, answer(id_), tmp_path, capsys, EACH_MISTAKE)
    assert len(lines) >= 8, "each question knows two mistakes or more"
    for words, verdict, cause, read in zip(*[iter(lines)] * 4, strict=True):
        assert verdict.startswith("✗ wrong, case ")
        assert cause == f"  Probable cause: {words.removeprefix('mistake: ')}"
        assert re.fullmatch(r"  To read: .+, https://\S+", read)


def test_a_right_result_has_no_cause_and_a_wrong_one_of_no_known_mistake_has_what_to_read_alone(capsys):
    quiz = Diagnostic({"sums": "a text"}, questions=1)
    for function in (abs, lambda x: x + 1):
        quiz.compare("sums", function, abs, [(-1,), (2,)], mistakes={"the sign.": lambda x: x}, read="a page")
    right, wrong, read = capsys.readouterr().out.splitlines()
    assert right == "✓ abs: all 2 cases agree"
    assert wrong == "✗ <lambda>, case 1 (-1,): expected 1, got 0" and read == "  To read: a page"


def test_a_function_that_changes_its_arguments_is_compared_on_copies(capsys):
    case = torch.ones(2)
    quiz = Diagnostic({"sums": "a text"}, questions=1)
    quiz.compare(
        "sums", torch.Tensor.zero_, torch.exp, [(case,)], mistakes={"zero.": torch.Tensor.zero_}, read="a page"
    )
    assert case.tolist() == [1, 1] and "Probable cause: zero." in capsys.readouterr().out


def test_the_summary_names_the_areas_in_which_a_question_did_not_pass(capsys):
    def unwritten(x):
        raise NotImplementedError

    quiz = Diagnostic({"signs": "a text, https://a.org", "sums": "another text"}, questions=3)
    for area in ("signs", "sums"):
        quiz.compare(area, unwritten, abs, [(1,)], read="a page")
    quiz.summary()
    assert "0 of 3 questions are answered" in capsys.readouterr().out
    quiz.compare("sums", abs, abs, [(1,)], read="a page")
    quiz.compare("sums", unwritten, abs, [(1,)], read="a page")
    capsys.readouterr()
    quiz.summary()
    assert capsys.readouterr().out.splitlines() == [
        "signs  0 of 1 passed, 1 not written",
        "sums   1 of 2 passed, 1 not written",
        "Brush up:",
        "  signs: a text, https://a.org",
        "  sums: another text",
    ]


def test_who_has_checked_some_questions_alone_is_not_told_to_be_ready(capsys):
    quiz = Diagnostic({"signs": "a text"}, questions=2)
    for given, last in (
        (abs, "Not checked yet: 1 of 2 questions."),
        (math.fabs, "Nothing to brush up: you are ready."),
    ):
        quiz.compare("signs", given, abs, [(1,)], read="a page")
        capsys.readouterr()
        quiz.summary()
        assert capsys.readouterr().out.splitlines()[-1].startswith(last)


def test_the_folded_answers_of_all_prerequisites_leave_nothing_to_brush_up(tmp_path, capsys):
    path = CELLS[QUESTIONS[0]][0]
    cells = [cell for cell in notebooks.code_cells(notebooks.read(path)) if "setup" not in notebooks.tags(cell)]
    file = tmp_path / "cells.py"
    file.write_text("\n\n\n".join(answer(c.id) if c.id in QUESTIONS else c.source for c in cells), encoding="utf-8")
    exec(compile_(file), {"__name__": "cells"})
    assert capsys.readouterr().out.splitlines()[-1] == "Nothing to brush up: you are ready. Begin with lecture 01."
