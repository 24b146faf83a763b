"""The mutation engine: what it changes, what becomes of a mutant, and what the report says of it."""

from __future__ import annotations

import textwrap
import time

import pytest
from parameters import thorough_but

from grading.mutation import report
from grading.mutation.operators import mutants
from grading.mutation.run import Result, in_a_process, run
from utils.checks.core import Exercise, message

LINES = """
for start in range(0, n, 2):
    x = load(p + start, mask=start < n, other=0.0)
    total += x.to(torch.float32)
if a and not b:
    out = other.clone()
return out - total, x[:, None]
"""


@pytest.fixture(scope="module")
def made():
    return {(m.operator, m.before, m.after) for m in mutants(LINES)}


@pytest.mark.parametrize(
    ("operator", "after"),
    [
        ("comparison", "x = load(p + start, mask=start <= n, other=0.0)"),
        ("dropped term", "x = load(p, mask=start < n, other=0.0)"),
        ("by one", "for start in range(0, n - 1, 2):"),
        ("dropped argument", "x = load(p + start, other=0.0)"),
        ("dropped argument", "x = load(p + start, mask=start < n)"),
        ("constant", "x = load(p + start, mask=start < n, other=1.0)"),
        ("constant for a name", "x = load(p + 0, mask=start < n, other=0.0)"),
        ("narrower dtype", "total += x.to(torch.bfloat16)"),
        ("forgotten call", "total += x"),
        ("forgotten call", "out = other"),
        ("condition", "if a or (not b):"),
        ("condition", "if True:"),
        ("swapped operands", "return total - out, x[:, None]"),
        ("axis", "return out - total, x[None, :]"),
        ("tuple order", "return x[:, None], out - total"),
        ("statement", "total -= x.to(torch.float32)"),
        ("statement", "pass"),
    ],
)
def test_each_operator_makes_its_mistake_and_leaves_the_other_lines(made, operator, after):
    assert any(kind == operator and line == after for kind, _, line in made), after


def test_a_mutant_differs_from_the_solution_in_what_python_reads_and_from_every_other():
    found = mutants(LINES)
    texts = {mutant.text for mutant in found}
    assert len(texts) == len(found) and textwrap.dedent(LINES).strip("\n") + "\n" not in texts


def test_statements_that_have_nothing_to_do_with_each_other_are_not_reordered():
    assert not [m for m in mutants("a = x + 1\nb = y + 1\n") if m.operator == "calls reordered"]
    assert [m for m in mutants("a = x\nb = a\n") if m.operator == "calls reordered"]
    assert not [m for m in mutants('def f():\n    """Text."""\n    a = x\n') if m.operator == "calls reordered"]


def test_a_reordered_save_for_backward_is_kept_by_hand():
    assert [m for m in mutants("ctx.save_for_backward(q, k)\n") if m.operator == "not saved"]


@pytest.mark.slow
@pytest.mark.parametrize("sample", thorough_but((2, 10), 2))
def test_a_sample_of_mutants_is_caught_by_the_checks(sample):
    found = [*run("lab1", ["1.1", "1.8"], jobs=1, sample=sample), *run("lab3", ["3.1"], jobs=1, sample=sample)]
    known = {**report.equivalents("lab1_roofline"), **report.equivalents("lab3_flash_attention")}
    assert len(found) > 2 * sample
    assert not [result for result in found if report.fate(result, known) in ("survived", "wide", "timeout")]


def endless() -> None:
    while True:
        pass


def waits(seconds: float) -> str:
    time.sleep(seconds)
    return "waited"


def test_a_mutant_that_computes_too_long_is_ended_and_one_that_a_busy_machine_delays_is_not():
    assert in_a_process(0.2, endless) is None
    assert in_a_process(0.2, waits, 0.3) == "waited"


def result(fate: str, after: str, said: str = "") -> Result:
    return Result("3.1: merge", "merge.py", 24, "comparison", "a < b", after, fate, said, 0.1)


def test_the_report_counts_an_equivalent_apart_and_names_survivors(tmp_path, monkeypatch):
    folder = tmp_path / "solutions" / "lab3" / "answers"
    folder.mkdir(parents=True)
    (folder / "equivalent.toml").write_text(
        '[[mutant]]\nplace = "3.1: merge"\nbefore = "a < b"\nafter = "b > a"\nreason = "the same comparison"\n'
    )
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "mutants_in_all", lambda lab, number: 1_200)
    told = 'exercise 3.1 (merge): wrong\n  the maximum: see "classic wrong answers" 2'
    found = [result("survived", "b > a"), result("survived", "a <= b"), result("check", "a > b", told)]
    text = report.write("lab3", "3.1", found).read_text()
    assert "in it (3 of 1,200 mutants, drawn at random), against" in text
    for row in (
        "caught by the check | 1",
        "equivalent | 1",
        "survived | 1",
        "**all** | **3**",
        "told a classic number | 1",
    ):
        assert f"| {row} |" in text
    assert "| 50.0% |" in text
    assert "`a < b` → `a <= b`" in text.split("## Survivors")[1].split("## Equivalent")[0]
    assert "the same comparison" in text.split("## Equivalent")[1]
    assert '(the maximum: see "classic wrong answers" 2)' in text


def test_a_page_has_the_cause_that_the_student_reads_whatever_it_is_called(monkeypatch):
    monkeypatch.setattr(report, "mutants_in_all", lambda lab, number: 1)
    told = message(Exercise("3.1", "merge"), "wrong", ["at row 3"], "the `m`", "check_merge(merge, seed=3)")
    assert report.page("lab3", "3.1", [result("check", "a > b", told)]).endswith(": wrong (the 'm')\n")


def test_an_equivalent_without_a_reason_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "solutions" / "lab3" / "answers"
    folder.mkdir(parents=True)
    (folder / "equivalent.toml").write_text('[[mutant]]\nplace = "p"\nbefore = "a"\nafter = "b"\nreason = " "\n')
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "mutants_in_all", lambda lab, number: 1_200)
    with pytest.raises(ValueError, match="has no reason"):
        report.equivalents("lab3")


def test_a_variable_is_taken_for_its_neighbours_where_mutants_are_few():
    found = {m.after for m in mutants("total = first * torch.sum(second)\n", names=True) if m.operator == "other name"}
    assert found == {
        "total = total * torch.sum(second)",
        "total = second * torch.sum(second)",
        "total = first * torch.sum(first)",
    }
    assert not [m for m in mutants("total = first * second\n") if m.operator == "other name"]
