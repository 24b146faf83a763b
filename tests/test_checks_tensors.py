"""Wrong tensors are found, placed on the tile and program that own them, and explained; right ones pass."""

import math

import numpy as np
import pytest
import torch
from checked_kernels import EXERCISES, check, message

from utils import runtime
from utils.checks.cases import LAYOUTS, Case, Cases, draw_shapes, with_layout
from utils.checks.core import CheckFailed, Exercise
from utils.checks.diagnoses import Diagnosis, same_as
from utils.checks.forbid import Rules
from utils.checks.kernel import check_kernel
from utils.checks.tensors import agrees, targets
from utils.checks.tiling import Tiling
from utils.checks.uninitialized import mark, uninitialized

ATTENTION = Tiling("b h row col", tiles={"row": 64}, grid=("row", "b*h"), noun="query tile")


# ---- tilings


def test_a_wrong_element_is_placed_on_the_program_and_tile_that_own_it():
    assert ATTENTION.describe((0, 1, 64, 0), (1, 2, 204, 32)) == "program (1, 1): query tile rows 64..127"
    assert ATTENTION.describe((1, 1, 203, 5), (2, 2, 204, 32)) == "program (3, 3): query tile rows 192..203"


def test_a_map_shows_the_tiles_of_the_head_with_the_first_wrong_element():
    bad = np.zeros((1, 2, 204, 32), dtype=bool)
    bad[0, 1, 64:128] = bad[0, 1, 200] = True
    assert ATTENTION.map(bad, (0, 1, 64, 0)) == ["wrong query tiles, h=1:   .X.X      ('.' right, 'X' wrong)"]


def test_a_map_of_two_tiled_axes_has_a_line_for_each_row_of_tiles():
    tiling = Tiling("m n", tiles={"m": 16, "n": 32}, grid=("m", "n"))
    bad = np.zeros((40, 70), dtype=bool)
    bad[39, 69] = True
    lines = tiling.map(bad, (39, 69))
    assert [line.strip() for line in lines[1:]] == ["...", "...", "..X"]


def test_a_map_of_many_lines_begins_where_something_is_wrong():
    tiling = Tiling("m n", tiles={"m": 16, "n": 16}, grid=("m", "n"))
    bad = np.zeros((320, 32), dtype=bool)
    bad[200, 20] = True
    lines = [line.strip() for line in tiling.map(bad, (200, 20))[1:]]
    assert lines == ["… 12 lines of tiles above", ".X", *[".."] * 7]
    bad[10, 20] = True
    lines = [line.strip() for line in tiling.map(bad, (10, 20))[1:]]
    assert lines == [".X", *[".."] * 7, "… 12 more lines of tiles"]


def test_flattened_axes_and_one_dimensional_grids_are_described():
    flat = Tiling("row col", tiles={"row*col": 1024}, grid="row*col")
    assert flat.describe((3, 0), (8, 500)) == "program (1): tile elements 1024..2047"
    row_by_row = Tiling("m n", tiles={"m": 16, "n": 16}, grid="m*n")
    assert row_by_row.owner(row_by_row.tile((17, 33), (40, 40)), (40, 40)) == (1 * 3 + 2,)


def test_a_grid_in_another_order_is_described_by_a_function():
    backwards = Tiling(
        "row", tiles={"row": 8}, grid="row", program=lambda tile, counts: (counts["row"] - 1 - tile["row"],)
    )
    assert backwards.describe((0,), (20,)) == "program (2): tile rows 0..7"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"axes": "b b"}, "different names"),
        ({"axes": "row", "tiles": {"row": 0}}, "positive integer, got 0"),
        ({"axes": "row", "grid": "column"}, "'column' is not an axis"),
        ({"axes": "m n", "tiles": {"m*n": 4, "m": 2}}, "one tile only"),
    ],
)
def test_an_impossible_tiling_is_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named.replace("*", r"\*")):
        Tiling(**arguments)


def test_an_index_with_other_axes_than_the_tiling_is_refused():
    with pytest.raises(ValueError, match="axes"):
        ATTENTION.describe((0, 0), (4, 4))


# ---- cases


def test_the_same_seed_draws_the_same_cases_and_values():
    cases = Cases({"row": range(1, 4), "col": 16}, options={"causal": (False, True)})
    assert [str(c) for c in cases.draw(5)] == [str(c) for c in cases.draw(5)]
    assert [str(c) for c in cases.draw(5)] != [str(c) for c in cases.draw(6)]
    first, again = (cases.draw(5)[2].tensor("x", "row", "col") for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, cases.draw(5)[2].tensor("y", "row", "col"))


@pytest.mark.parametrize("seed", range(20))
def test_drawn_shapes_reach_the_edges_of_a_tile(seed):
    shapes = dict(draw_shapes(seed, {"b": range(1, 3), "row": 16, "d": (8, 32)}, zero=True))
    assert shapes["one tile"]["row"] == 16 and shapes["whole tiles"]["row"] % 16 == 0
    assert shapes["whole tiles"]["row"] > 16 and shapes["ragged"]["row"] > 16 and shapes["ragged"]["row"] % 16
    assert 0 < shapes["short"]["row"] < 16 and shapes["no element"]["row"] == 0
    assert shapes["one element"] == {"b": 1, "row": 1, "d": 8}


def test_cases_cover_layouts_dtypes_options_and_large_values():
    cases = Cases(
        {"row": 8, "col": 8},
        layouts=("transposed", "strided"),
        options={"causal": (False, True)},
        magnitude=100,
        fixed=[("wide", {"row": 1, "col": 300})],
    ).draw(3)
    assert {c.layout for c in cases} == {"contiguous", "transposed", "strided"}
    assert {c.dtype for c in cases} == {torch.float32, torch.float16, torch.bfloat16}
    assert {c.options["causal"] for c in cases if c.kind == "ragged" and c.layout == "contiguous"} == {False, True}
    assert any(c.magnitude == 100 for c in cases) and any(c.sizes["col"] == 300 for c in cases)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in ("expanded", "far")])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (1, 1), (0, 3), ()])
def test_a_layout_changes_the_memory_and_not_the_numbers(layout, shape):
    values = torch.randn(shape)
    view = with_layout(values, layout)
    assert torch.equal(view, values) and view.dtype == values.dtype
    if layout in ("padded", "offset") and values.numel() and shape:
        assert view.storage_offset() > 0 and view._base.isnan().any()
    if layout == "strided" and values.numel() > 1:
        assert view.stride(-1) == 2


def test_far_rows_lie_beyond_what_32_bits_count():
    view = with_layout(torch.ones(3, 4, dtype=torch.float16), "far")
    assert 2 * view.stride(0) >= 2**31 and torch.equal(view, torch.ones(3, 4, dtype=torch.float16))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: with_layout(torch.ones(3), "diagonal"), "diagonal"),
        (lambda: draw_shapes(1, {"row": 0}), "'row'"),
        (lambda: draw_shapes(1, {"row": ()}), "'row'"),
        (lambda: draw_shapes(1, {"row": 8}, count=0), "count"),
        (lambda: draw_shapes(-1, {"row": 8}), "-1"),
        (lambda: Case("ragged", {"row": 3}).tensor("x", "col"), "'col'"),
        (lambda: targets(torch.sum, (torch.ones(3),), factor=0.5), "0.5"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()


# ---- the error allowed


def test_memory_from_torch_empty_is_recognised_until_something_writes_it():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64):
        value = torch.empty(6, 4, dtype=dtype).t()
        mark(value)
        value[1] = 0
        assert uninitialized(value).sum() == 18
    assert not uninitialized(torch.tensor([math.nan, 0.0]) / 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_once_is_allowed_and_accumulating_in_half_precision_is_not(dtype):
    a, b = (torch.randn(64, 512, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
    (target,) = targets(lambda a, b: (a * b).sum(-1), (a, b))
    once = (a.float() * b.float()).sum(-1).to(dtype).double()
    assert agrees(once, target.right, target.allowed, dtype).all()
    total = torch.zeros(64, dtype=torch.float16 if dtype == torch.float32 else dtype)
    for i in range(512):
        total = total + (a[:, i] * b[:, i]).to(total.dtype)
    assert not agrees(total.double(), target.right, target.allowed, dtype).all()


@pytest.mark.parametrize("seed", range(30))
def test_a_single_element_may_round_as_a_careful_implementation_does(seed):
    source = torch.Generator().manual_seed(seed)
    a, b = torch.randn(1, 300, generator=source), torch.randn(300, 1, generator=source)
    (target,) = targets(torch.matmul, (a, b))
    in_tiles = sum(a[:, i : i + 64] @ b[i : i + 64] for i in range(0, 300, 64))
    assert agrees(in_tiles.double(), target.right, target.allowed, torch.float32).all()


def test_integers_must_be_equal_and_overflow_in_half_precision_is_right_where_it_is_due():
    (target,) = targets(lambda x: x * 2, (torch.tensor([1, 2]),))
    assert target.allowed == 0
    (target,) = targets(lambda x: x * 2, (torch.tensor([60000.0, 1.0], dtype=torch.float16),))
    assert agrees(torch.tensor([math.inf, 2.0]).double(), target.right, target.allowed, torch.float16).all()


# ---- right kernels pass


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 20261120])
@pytest.mark.parametrize("name", EXERCISES)
def test_a_right_kernel_passes_in_every_dtype_and_layout(name, seed, capsys):
    check(name, seed=seed)
    said = capsys.readouterr().out
    assert said.startswith(f"✓ {EXERCISES[name]['exercise']}: ") and f"(seed {seed})" in said


# ---- wrong kernels are told why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bug", "says"),
    [
        ("add", "one program too far", "each tile holds the values of the tile after it"),
        ("add", "loads ignore the program", "the load offsets do not grow with tl.program_id"),
        ("add", "store ignores the program", "only the first program's tile is written"),
        ("add", "floor grid", "triton.cdiv(size, BLOCK)"),
        ("add", "ignores strides", "only non-contiguous inputs fail"),
        ("add", "fixed in float16", "only about three digits are right"),
        ("add", "float32 out", "expected out.dtype float16, got float32"),
        ("add", "padded out", "padded to whole tiles"),
        ("add", "into x", "input x was modified in place"),
        ("add", "changes x", "input x was modified in place"),
        ("add", "no return", "ends without a return statement"),
        ("add", "column", "expected out.shape (32,), got (32, 1)"),
        ("add", "two", "expected 1 output (out), got 2"),
        ("add", "raises", "RuntimeError: cannot add 32 elements\n  in add, line "),
        ("row sum", "other is one", "only sizes that are no multiple of the tile fail"),
        ("row sum", "float16 sum", "only about three digits are right"),
        ("row sum", "keeps the last tile", "one tile covers col, wrong from the second tile on: look at the loop"),
        ("row sum", "negated", "every element has the wrong sign"),
        ("row sum", "mean", "1/col for col=32"),
        ("row sum", "plus one", "differs by the same constant, 1"),
        ("softmax", "other is zero", "(masks, `other`, what is reduced over them)"),
        ("softmax", "no maximum", "only large values fail: exp overflows"),
        ("softmax", "no rescale", "carried from tile to tile"),
        ("softmax", "not normalised", "the rows are not divided by their sums"),
        ("scale", "no factor", "every element is 0.33 times the expected value"),
        ("scale", "transposed", "this is the transpose of the right result"),
        ("scale", "rows below the first tile", "the first tile along row is right and each later one is wrong"),
        ("scale", "zero", "the result is zero everywhere"),
        ("scale", "square root", "NaN where a finite value is expected"),
        ("matmul", "float16 accumulator", "only about three digits are right"),
        ("matmul", "b first", "this is the transpose of the right result"),
        ("matmul", "swapped", "this is the right result with a and b swapped"),
    ],
)
def test_a_wrong_kernel_is_told_its_likely_cause(name, bug, says):
    seed = sum(map(ord, name + bug))  # another one for each mistake
    text = message(name, bug, seed)
    assert says in text
    assert f"reproduce: seed={seed}, case " in text


def test_sizes_are_no_cause_where_no_size_that_is_a_multiple_of_the_tile_is_right():
    ragged, empty = Case("ragged", {"row": 3, "col": 41}), Case("no element", {"row": 0, "col": 32})
    whole = Case("whole tiles", {"row": 3, "col": 64})
    assert "no multiple of the tile" in message("row sum", "other is one", 7, cases=[ragged, empty, whole])
    assert "no multiple of the tile" not in message("row sum", "other is one", 7, cases=[ragged, empty])


def test_the_second_tile_is_no_cause_where_whole_tiles_are_right_too():
    one, wrong = Case("one tile", {"row": 3, "col": 32}), Case("whole tiles", {"row": 3, "col": 64})
    right = Case("whole tiles", {"row": 3, "col": 64}, magnitude=0.0)
    assert "from the second tile on" in message("row sum", "keeps the last tile", 7, cases=[one, wrong])
    assert "from the second tile on" not in message("row sum", "keeps the last tile", 7, cases=[one, wrong, right])


def test_a_first_tile_that_is_right_in_some_failed_cases_alone_is_no_cause():
    text = message("scale", "rows below the first whole tile", 7)
    assert "(whole tiles)" in text and "likely cause" not in text


def test_an_index_that_overflows_32_bits_is_told_so_and_a_64_bit_one_passes():
    far = Cases({"row": (3,), "col": 32}, dtypes=(torch.float16,), layouts=("far",), count=1)
    check("row sum", cases=far)
    assert "only offsets beyond 2^31 are wrong" in message("row sum", "int32", cases=far)


def test_a_sum_over_the_wrong_axis_is_recognised_by_the_formula_that_it_equals():
    rule = same_as(lambda x: x.sum(0), "this sums over the rows instead of the columns")
    square = [Case("whole tiles", {"row": 32, "col": 32}, seed=3)]
    assert rule.cause in message("row sum", "wrong axis", cases=square, diagnose=(rule,))


@pytest.mark.slow
def test_accumulating_in_half_precision_is_recognised_when_float32_is_right():
    def student(a, b):
        total = torch.zeros(a.shape[0], dtype=a.dtype, device=a.device)
        for column in range(a.shape[1]):
            total = total + a[:, column] * b[:, column]
        return total

    text = message(
        "row sum",
        student=student,
        reference=lambda a, b: (a * b).sum(-1),
        cases=Cases({"row": (40,), "col": 200}, layouts=()),
        inputs=lambda case: (case.tensor("a", "row", "col"), case.tensor("b", "row", "col")),
        factor=4.0,
        budget=None,
        forbidden=Rules(kernel=False),
    )
    assert "right in float32, but too inaccurate in float16" in text


def test_a_failing_check_reads_as_the_course_asks():
    lines = message("add", "floor grid").splitlines()
    assert lines[0] == (
        "exercise 2.1 (vector addition): out: 14 of 46 elements differ (max abs error NaN, tolerance 1.7e-06)"
    )
    assert lines[1] == "  first mismatch: out[n=32], computed by program (1): tile n 32..45"
    assert lines[3] == "  wrong tiles:   .X      ('.' right, 'X' wrong)"
    assert lines[-1] == "  reproduce: seed=1729, case n=46 float32 (ragged)"


def test_a_few_elements_that_are_slightly_wrong_are_not_taken_for_rounding():
    def student(x):
        return torch.cat([x[:1] * 1.001, x[1:2] * 0.999, x[2:]])

    with pytest.raises(CheckFailed, match="2 of 40 elements differ") as failed:
        check_kernel(
            Exercise("1.1", "rounding"),
            student,
            lambda x: x * 1.0,
            Cases({"n": (40,)}, layouts=()),
            lambda case: (1 + case.tensor("x", "n").abs(),),
            forbidden=Rules(kernel=False),
            seed=1,
        )
    assert "three digits" not in str(failed.value)


def check_with_an_option(student) -> None:
    """Check a function of x with an option ``double``, which changes nothing in the right answer."""
    check_kernel(
        Exercise("1.1", "options"),
        student,
        lambda x, double=False: x * 1.0,
        Cases({"n": 16}, options={"double": (False, True)}, layouts=()),
        lambda case: (case.tensor("x", "n"),),
        forbidden=Rules(kernel=False),
        seed=1,
    )


def test_an_option_that_alone_goes_wrong_is_named():
    def student(x, double=False):
        return x.clone() + (x.abs() if double else 0)

    with pytest.raises(CheckFailed, match="only cases with double=True fail"):
        check_with_an_option(student)


def test_an_option_with_which_other_cases_are_right_is_not_named():
    def student(x, double=False):
        return x.clone() + (x.abs() if double and len(x) > 16 else 0)

    with pytest.raises(CheckFailed) as failed:
        check_with_an_option(student)
    assert "double=True" in str(failed.value).splitlines()[-1] and "only cases with" not in str(failed.value)


def test_a_rule_that_cannot_judge_the_evidence_is_passed_over_and_a_labs_rule_comes_first():
    broken = Diagnosis(lambda evidence: evidence.right[10_000], "never said")
    ours = (lambda evidence: evidence.case.dtype == torch.float32, "the lab's own sentence")
    assert "the lab's own sentence" in message("scale", "transposed", diagnose=(broken, ours))


def test_each_output_of_several_is_compared_with_its_own_tiling():
    def student(x):
        return x * 1, (x * 2).sum(-1)

    with pytest.raises(CheckFailed, match=r"first mismatch: total\[row=0\], computed by program \(0\): tile row 0"):
        check_kernel(
            Exercise("1.2", "two outputs"),
            student,
            lambda x: (x * 1, x.sum(-1)),
            Cases({"row": range(2, 4), "col": 8}, layouts=()),
            lambda case: (case.tensor("x", "row", "col"),),
            outputs=("copy", "total"),
            tiling={"total": Tiling("row", grid="row")},
            forbidden=Rules(kernel=False),
            seed=1,
        )


# ---- wrong calls


def test_a_check_without_cases_or_with_a_tiling_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one case"):
        check("add", cases=[])
    with pytest.raises(ValueError, match="names y, the outputs are out"):
        check("add", tiling={"y": Tiling("n")})


def test_cases_run_on_the_device_where_kernels_run():
    assert Case("ragged", {"n": 3}).tensor("x", "n").device.type == runtime.DEVICE.type
