"""Lab 3: what its checks compute with, and what they must say on every seed and with every tile."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from lab_answers import answers, exercises, lab_answered, lab_filled, wrong_answers
from parameters import thorough_but

from solutions import lab3_flash_attention as solution
from solutions.lab3_flash_attention.exercises import backward, forward, gradients, operator, shapes, walk
from utils import reference, runtime
from utils.checks import tensors
from utils.checks.answers import EditedAnswer
from utils.checks.core import CheckFailed

ROOT = Path(__file__).resolve().parent.parent

LAB = "lab3_flash_attention"


def run_check(exercise: str, lab: object, seed: int) -> None:
    """Run an exercise's check on a package's functions."""
    exercises(LAB)[exercise].run_check(lab, seed)


# ---- what rounding decides, on every seed ----
STEP, END = "3.3: one step of the inner loop", "3.3: the end of a row of tiles"
#: Right answers to 3.3 that round elsewhere than the plain one: edits of it.
ROUNDED_ELSEWHERE: dict[str, dict[str, dict[str, str]]] = {
    "as it is": {},
    "the output divided in each step": {
        STEP: {
            "l_i = l_i * alpha +": "before = l_i * alpha\n        l_i = before +",
            "acc = acc * alpha[:, None]": "acc = acc * (before / l_i)[:, None]",
            "p.to(v.dtype)": "(p / l_i[:, None]).to(v.dtype)",
        },
        END: {"acc = acc / tl.where(seen, l_i, 1.0)[:, None]": "acc = acc"},
    },
    "scaled queries": {
        STEP: {
            "tl.dot(q,": "tl.dot((q.to(tl.float32) * scale_log2).to(q.dtype),",
            'input_precision="ieee") * scale_log2': 'input_precision="ieee")',
        }
    },
    "a sum of rounded probabilities": {
        STEP: {"p = tl.exp2(s - m_ij[:, None])": "p = tl.exp2(s - m_ij[:, None]).to(q.dtype).to(tl.float32)"}
    },
    "a maximum that is too large": {STEP: {"tl.max(s, 1)": "tl.max(s, 1) + 3.3"}},
}


@pytest.fixture
def drifting_alone(monkeypatch):
    """Of the cases of exercise 3.3, one tile in float32 and those whose values cancel."""
    drawn = shapes.drawn

    def few(*args, **options):
        return [case for case in drawn(*args, **options) if case.kind in ("one tile", shapes.DRIFTING)]

    monkeypatch.setattr(shapes, "drawn", few)


def assert_named(name: str, folder: Path, seeds: Sequence[int]) -> None:
    """Hold a wrong answer's check to what it must say, seed by seed."""
    wrong = next(wrong for wrong in wrong_answers(LAB) if wrong.name == name)
    with lab_answered(wrong, folder) as lab:
        for seed in seeds:
            with pytest.raises(CheckFailed) as failed:
                run_check(wrong.exercise, lab, seed)
            assert all(words in str(failed.value) for words in wrong.says), f"seed {seed}: {failed.value}"


@pytest.mark.parametrize("name", ["accumulator in float16", pytest.param("sum in float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seeds", thorough_but([range(1, 2), range(2, 7)], range(1, 2)))
def test_what_is_kept_in_16_bits_between_the_steps_is_named_on_every_seed(name, seeds, tmp_path, drifting_alone):
    assert_named(name, tmp_path, seeds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] if place else []) for place, name in enumerate(ROUNDED_ELSEWHERE)],
)
@pytest.mark.parametrize("seeds", thorough_but([range(1), range(1, 6)], range(1)))
def test_what_is_rounded_where_only_a_product_takes_it_passes_on_every_seed(
    name, seeds, tmp_path, drifting_alone, capsys
):
    answer = EditedAnswer("3.3", name, ROUNDED_ELSEWHERE[name]).filled(answers(LAB).right)
    with lab_filled(LAB, tmp_path, answer) as lab:
        for seed in seeds:
            run_check("3.3", lab, seed)
    assert capsys.readouterr().out.count("✓ exercise 3.3 (") == len(seeds)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["one key too few is seen by one", "top left loop", "one query too late"])
def test_a_loop_that_leaves_out_a_tile_is_named_on_every_seed(name, tmp_path):
    assert_named(name, tmp_path, (21, 29))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sum alone looked at", shapes.LARGE),
        pytest.param("sum alone looked at, and for infinity", shapes.LARGE, marks=pytest.mark.thorough),
        pytest.param("first column alone looked at", shapes.LARGE, marks=pytest.mark.thorough),
        pytest.param("output compared with plus infinity", shapes.LARGE, marks=pytest.mark.thorough),
        ("output alone looked at", shapes.TOGETHER),
    ],
)
@pytest.mark.parametrize("seeds", thorough_but([range(1, 2), range(2, 4)], range(1, 2)))
def test_what_overflows_beside_an_anchor_is_named_on_every_seed(name, kind, seeds, tmp_path, monkeypatch):
    everything = operator._anchored_cases
    alone = lambda *args: [case for case in everything(*args) if case.kind == kind]  # noqa: E731
    monkeypatch.setattr(operator, "_anchored_cases", alone)
    assert_named(name, tmp_path, seeds)


@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 16), (16, 64), (128, 64), (64, 128)])
def test_the_last_query_of_a_tile_is_alone_in_a_tile_of_keys_on_every_seed(block_m, block_n):
    for seed in range(10):
        sizes = [case.sizes for case in forward.causal_cases(seed, block_m, block_n)]
        assert any(s["Nq"] % block_m == 0 and s["Nk"] % block_n == 1 and s["Nk"] >= s["Nq"] for s in sizes)


@pytest.mark.parametrize("seed", range(3))
def test_a_gpu_compiles_a_third_of_the_cases_with_an_anchor_and_all_that_outgrow_it(monkeypatch, seed):
    blocks = {torch.float32: (32, 16), torch.bfloat16: (32, 16), torch.float16: (64, 128)}
    everything = operator._anchored_cases(seed, blocks)
    monkeypatch.setattr(operator, "runtime", SimpleNamespace(pick=lambda cpu, gpu: gpu))
    some = operator._anchored_cases(seed, blocks)
    assert set(map(repr, some)) < set(map(repr, everything)) and len(some) < len(everything) / 2
    assert [case.kind for case in some[-10:]] == [case.kind for case in everything[-10:]]


def take_tiles_of_a_gpu(monkeypatch, lab: ModuleType, capability: tuple[int, int]) -> None:
    """Let a package's kernels have the tiles of a GPU, and the check of 3.9 the cases that it has there."""
    tuning = importlib.import_module(f"{lab.__name__}.tuning")
    monkeypatch.setattr(tuning, "runtime", SimpleNamespace(INTERPRET=False, pick=lambda cpu, gpu: gpu))
    monkeypatch.setattr(tuning, "capability_of", lambda device: capability)
    monkeypatch.setattr(operator, "runtime", SimpleNamespace(pick=lambda cpu, gpu: gpu, DEVICE=runtime.DEVICE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", [(9, 0), *(pytest.param(c, marks=pytest.mark.thorough) for c in ((8, 0), (10, 0)))]
)
def test_the_anchored_loop_passes_with_the_tiles_of_a_gpu(capability, monkeypatch, capsys):
    take_tiles_of_a_gpu(monkeypatch, solution, capability)
    run_check("3.9", solution, 39)  # found tiles that held all keys of a case in which some must outgrow the first
    assert capsys.readouterr().out.count("✓ exercise 3.9 (") == 3


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sum alone looked at, and for infinity", "always again", "never tried"])
def test_an_anchored_loop_that_is_wrong_is_named_with_the_tiles_of_a_gpu(name, tmp_path, monkeypatch):
    wrong = next(wrong for wrong in wrong_answers(LAB) if wrong.name == name)
    with lab_answered(wrong, tmp_path) as lab:
        take_tiles_of_a_gpu(monkeypatch, lab, (9, 0))
        with pytest.raises(CheckFailed) as failed:
            run_check("3.9", lab, seed=39)
    assert all(words in str(failed.value) for words in wrong.says), failed.value


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 32), (32, 16), (16, 16), (128, 64), (64, 128)])
def test_the_first_query_that_sees_a_tile_of_keys_ends_its_own_tile_on_every_seed(block_m, block_n):
    for seed in range(10):
        cases = [case for case in backward._cases(seed, block_m, block_n) if case.options.get("causal")]
        first = [block_n - (case.sizes["Nk"] - case.sizes["Nq"]) for case in cases if case.sizes["Nk"] > block_n]
        assert any(query >= 0 and query % block_m == block_m - 1 for query in first)


@pytest.mark.slow
def test_low_scores_are_no_reason_to_refuse_the_solution_on_any_seed():
    for seed in range(36, 60):
        case = backward._low(seed, 32, 16)
        args = gradients.inputs_with_delta(case)
        (target,) = tensors.targets(lambda *x, **o: shapes.attention_gradients(*x[:4], **o)[0], args, case.options)
        dq = solution.flash_dq(*args, False, 0.25)
        assert (dq.cpu().double() - target.right).abs().max() < 0.8 * (target.allowed + gradients.ROUNDING), seed


# ---- what the checks compute with ----
@pytest.mark.parametrize("causal", [False, True])
def test_tiled_attention_without_a_mistake_is_attention(causal):
    for case in shapes.drawn(3, 16, 16, causal=causal):
        if case.kind == "no element" or case.layout == "far":
            continue
        *qkv, do = (x.cpu().double() for x in shapes.with_do(case))
        right = reference.attention(*qkv, **case.options)
        for found in (walk.walk(*qkv, **case.options, block_m=16, block_n=16), shapes.attention(*qkv, **case.options)):
            for one, other in zip(found, right):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        right = reference.attention_backward(*qkv, do, **case.options)
        for function in (walk.gradients, shapes.attention_gradients):
            for one, other in zip(function(*qkv, do, **case.options), right):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_the_cases_hold_every_edge():
    cases = shapes.drawn(5, 32, 16, causal=True)
    sizes = [case.sizes for case in cases]
    assert any(s["Nq"] < s["Nk"] for s in sizes) and any(s["Nq"] > s["Nk"] for s in sizes)
    assert any(s["Hq"] > s["Hkv"] > 1 for s in sizes) and any(s["D"] & (s["D"] - 1) for s in sizes)
    assert any(s["Nq"] == s["Nk"] == 1 for s in sizes) and any(s["B"] == 0 for s in sizes)
    assert {case.dtype for case in cases} == {torch.float32, torch.float16, torch.bfloat16}
    assert {"padded", "transposed", shapes.HEADS_LAST, shapes.MIXED} <= {case.layout for case in cases}
