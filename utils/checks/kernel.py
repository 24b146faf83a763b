"""One call that holds a student's kernel to everything an exercise asks: :func:`check_kernel`."""

from __future__ import annotations

import ast
import contextlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from utils import runtime
from utils.checks import core, diagnoses, forbid, symptoms, tensors, traffic
from utils.checks.cases import Case, Cases
from utils.checks.core import Exercise
from utils.checks.diagnoses import Diagnosis, Evidence, Trial
from utils.checks.problem import Problem
from utils.checks.speed import Speed, run_speed
from utils.checks.tiling import Tiling

#: How a kernel covers an output, or a function of the trials (the failed one first) that says so.
TilingOf = Tiling | Callable[[Sequence[Trial]], Tiling | None]

_MOST_CASES_NAMED = 6
_MOST_LINES = 6  # of an exception's text after its first line


def check_kernel(
    exercise: Exercise,
    student: Callable[..., Any],
    reference: Callable[..., Any],
    cases: Cases | Sequence[Case],
    inputs: Callable[[Case], Sequence[Any]],
    *,
    outputs: Sequence[str] = ("out",),
    baseline: Callable[..., Any] | None = None,
    factor: float = 2.0,
    atol: float = 0.0,
    tiling: TilingOf | Mapping[str, TilingOf] | None = None,
    budget: traffic.Budget | None = None,
    inspections: Sequence[Callable[[Trial], Problem | None]] = (),
    forbidden: forbid.Rules | None = None,
    diagnose: Sequence[Diagnosis | tuple] = (),
    speed: Speed | None = None,
    seed: int | None = None,
    races: bool = True,
    notice: str = "",
) -> None:
    """Check a student's function, print one verdict, or raise a message that teaches.

    ::

        check_kernel(
            Exercise("2.5", "softmax of long rows"),
            softmax,
            lambda x: torch.softmax(x, -1),
            Cases({"row": range(1, 6), "col": 32}, magnitude=100),
            lambda case: (case.tensor("x", "row", "col"),),
            tiling=Tiling("row col", grid="row", loops={"col": 32}),
            budget=Budget({"x_ptr": Times("row", "col", times=2)}, {"out_ptr": Times("row", "col")}, exact=True),
            diagnose=[same_as(lambda x: x.exp(), "the rows are not divided by their sums")],
        )

    In this order: the function runs on each case (a stub's ``NotImplementedError`` passes through; any other
    exception is shown with its case); nothing forbidden was called; type, shape, dtype, memory of its own, inputs
    untouched; values against the float64 reference; no access out of bounds, no read of unwritten memory, no race;
    the traffic budget; on a GPU, speed.

    Args:
        exercise: Its number and title, for the message.
        student: The function: ``student(*inputs(case), **case.options)`` gives a tensor or a tuple of tensors.
        reference: The same in plain PyTorch; called with float64 inputs it gives the right values.
        cases: What it is tried on. A :class:`Cases` is drawn from the seed; a list is used as it is.
        inputs: Builds the arguments of a case (``lambda case: (case.tensor("x", "row", "col"),)``).
        outputs: Names of the outputs.
        baseline, factor, atol: The error allowed; see :func:`utils.checks.tensors.targets`.
        tiling: How the grid covers the output, or each named output; or a function that reads it off the trials.
        budget: Memory traffic allowed, on every case that the profiler runs.
        inspections: What else must hold of a right answer: each is asked about every case that the profiler ran, after
            the budget, and says what is wrong.
        forbidden: What may not be called; by default :class:`utils.checks.forbid.Rules` as it is. For an exercise in
            plain PyTorch pass ``Rules(kernel=False)``: nothing is then profiled.
        diagnose: The lab's own rules, tried before the generic ones.
        speed: What it is timed against on a GPU.
        seed: Draws the cases; a fresh one by default.
        races: Whether programs that touch each other's memory are looked for.
        notice: What to notice when it passes.

    Raises:
        CheckFailed: the answer is wrong; the text says where, whose, why, and how to see it again.
        NotImplementedError: the student has not written it yet.
        ValueError: there is no case, or a tiling names no output.
    """
    seed = core.draw_seed(seed)
    drawn = cases.draw(seed) if isinstance(cases, Cases) else list(cases)
    rules = forbid.Rules() if forbidden is None else forbidden
    tilings = tiling if isinstance(tiling, Mapping) else dict.fromkeys(outputs, tiling)
    if not drawn:
        raise ValueError(f"{exercise} needs at least one case")
    if unknown := set(tilings) - set(outputs):
        raise ValueError(f"tiling names {', '.join(sorted(unknown))}, the outputs are {', '.join(outputs)}")

    trials: list[Trial] = []
    for case, profiled in _plan(drawn, rules.kernel):
        if not profiled and any(trial.profile is not None and trial.profile.out_of_bounds for trial in trials):
            break  # on a GPU this kernel might overwrite anything; what the profiler saw says enough
        args = tuple(inputs(case))
        wanted = tensors.targets(reference, args, case.options, baseline=baseline, factor=factor, atol=atol)
        trial = _run(student, case, args, wanted, outputs, profiled, races)
        trials.append(trial)
        if trial.error is not None:
            if len(trials) == 1:
                break  # it will not do better on a harder case
            continue
        nothing_in = any(isinstance(value, torch.Tensor) and value.numel() == 0 for value in args)
        empty = nothing_in or all(target.right.numel() == 0 for target in wanted)
        _stop_at(exercise, forbid.broken_rule(rules, trial.seen, case, empty), case, seed)
        if len(trials) == 1 and (used := forbid.ready_made(student)):
            cause = "the exercise is to write what it does"
            name = getattr(student, "__name__", "the function")
            _stop_at(exercise, Problem(f"{name} uses {used}, a ready-made solution", cause), case, seed)

    names = _argument_names(student)
    for trial in trials:
        if trial.failed:
            _explain(exercise, trial, trials, reference, outputs, tilings, names, (*diagnose, *symptoms.GENERIC), seed)
    for trial in trials:
        if trial.profile is not None:
            _stop_at(exercise, traffic.unsafe(trial.profile), trial.case, seed)
    for trial in trials:
        if trial.profile is not None and budget is not None:
            _stop_at(exercise, traffic.over_budget(budget, trial.profile, trial.case), trial.case, seed)
    for trial in trials:
        for inspect_trial in inspections if trial.profile is not None else ():
            _stop_at(exercise, inspect_trial(trial), trial.case, seed)
    measured, problem = run_speed(speed, student) if speed is not None else ("", None)
    if problem:
        core.fail(exercise, problem.headline, problem.details, problem.cause)
    left_out = ""
    if isinstance(cases, Cases) and "far" in cases.layouts and not any(case.layout == "far" for case in drawn):
        left_out = "offsets beyond 2^31 were not tried: this machine has too little memory"
    core.passed(exercise, "\n  ".join(line for line in (notice, measured, left_out) if line), seed, len(drawn))


def _plan(cases: Sequence[Case], kernel: bool) -> list[tuple[Case, bool]]:
    """The cases in order, and whether each runs under the profiler.

    In the interpreter every case of a kernel does. On a GPU the profiler's interpreter is slow beside it, so it first
    runs one small case of each kind, and then the GPU runs all.
    """
    if not kernel:
        return [(case, False) for case in cases]
    if runtime.INTERPRET:
        return [(case, True) for case in cases]
    first = {case.kind: case for case in reversed(cases) if case.layout == "contiguous"}
    small = [first[kind] for kind in ("one tile", "ragged", "short") if kind in first] or cases[:1]
    return [*((case, True) for case in small), *((case, False) for case in cases)]


def _run(
    student: Callable[..., Any],
    case: Case,
    args: tuple[Any, ...],
    wanted: tuple[tensors.Target, ...],
    outputs: Sequence[str],
    profiled: bool,
    races: bool,
) -> Trial:
    """Run the function on one case and compare what it gives."""
    trial = Trial(case, args, targets=wanted)
    before = [value.detach().clone() if isinstance(value, torch.Tensor) else None for value in args]
    with contextlib.ExitStack() as stack:
        trial.seen = stack.enter_context(forbid.watch())
        if profiled:
            from utils.kernel_profile import profile_kernel

            trial.profile = stack.enter_context(profile_kernel(check_races=races))
        try:
            result = student(*args, **case.options)
            if runtime.HAS_GPU:
                torch.cuda.synchronize(runtime.DEVICE)
        except Exception as error:
            unwritten = _not_implemented(error)
            if unwritten is not None:
                raise unwritten from None
            trial.error = error
            return trial
    trial.outputs = tensors.as_outputs(result)
    named = {n: v for n, v in zip(_argument_names(student), args) if isinstance(v, torch.Tensor)}
    trial.form = _form(trial, outputs, named, before)
    if trial.form is None:
        trial.differences = tuple(map(tensors.difference, outputs, trial.outputs, wanted))
    return trial


def _form(
    trial: Trial, outputs: Sequence[str], named: Mapping[str, torch.Tensor], before: Sequence[torch.Tensor | None]
) -> Problem | None:
    if len(trial.outputs) != len(outputs):
        wanted = f"{len(outputs)} {'is' if len(outputs) == 1 else 'are'} asked for: {', '.join(outputs)}"
        return Problem(f"{len(trial.outputs)} outputs are returned, {wanted}")
    for name, old, new in zip(_fill(named, len(trial.args)), before, trial.args):
        if old is not None and tensors.changed(old, new):
            cause = "write the result into a tensor of its own; callers still need their input"
            return Problem(f"the input {name} was changed in place", cause)
    problems = map(lambda *pair: tensors.wrong_form(*pair, named), outputs, trial.outputs, trial.targets)
    return next((problem for problem in problems if problem), None)


def _fill(names: Sequence[str] | Mapping[str, Any], count: int) -> list[str]:
    return [*names, *(f"argument {i + 1}" for i in range(len(names), count))][:count]


def _argument_names(student: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(student).parameters)
    except (TypeError, ValueError):
        return []


def _not_implemented(error: BaseException) -> NotImplementedError | None:
    """The stub's message behind an exception: raised in a function or in a kernel, or found by the compiler."""
    while error is not None:
        if isinstance(error, NotImplementedError) and _students_frame(error, innermost=True):
            return error
        node = getattr(error, "node", None)  # a compiled kernel cannot raise; the compiler stops at the statement
        if (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and "NotImplementedError" in ast.dump(node.exc)
        ):
            texts = [value.value for value in node.exc.args if isinstance(value, ast.Constant)]
            return NotImplementedError(*texts)
        error = error.__cause__ or error.__context__
    return None


def _students_frame(error: BaseException, innermost: bool = False) -> traceback.FrameSummary | None:
    """The last line of the student's own code in a traceback; with ``innermost`` only if nothing ran below it."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = frames[-1:] if innermost else frames[::-1]
    return next((frame for frame in frames if not forbid.is_library(frame.filename)), None)


def _stop_at(exercise: Exercise, problem: Problem | None, case: Case, seed: int) -> None:
    if problem is not None:
        core.fail(exercise, problem.headline, problem.details, problem.cause, _reproduce(case, seed))


def _reproduce(case: Case, seed: int) -> str:
    return f"seed {seed}, shape {case} ({case.kind})"


def _explain(
    exercise: Exercise,
    trial: Trial,
    trials: Sequence[Trial],
    reference: Callable[..., Any],
    outputs: Sequence[str],
    tilings: Mapping[str, TilingOf | None],
    names: Sequence[str],
    rules: Sequence[Diagnosis | tuple],
    seed: int,
) -> None:
    """Raise the message of a failed case."""
    others = [_which_cases(trials)] if len(trials) > 1 else []
    if trial.error is not None:
        error = trial.error
        while error.__cause__ is not None:  # the interpreter and autograd wrap what happened
            error = error.__cause__
        frame = _students_frame(error) or _students_frame(trial.error)
        lines = [f"in {frame.name}, line {frame.lineno}: {frame.line}"] if frame else []
        said = getattr(error, "error_message", None) or str(error)  # Triton's compiler puts the source first
        headline, *more = f"{type(error).__name__}: {said}".splitlines()
        text = core.message(
            exercise, headline, [*more[:_MOST_LINES], *lines, *others], reproduce=_reproduce(trial.case, seed)
        )
        raise core.CheckFailed(text) from trial.error
    if trial.form is not None:
        core.fail(
            exercise,
            trial.form.headline,
            [*trial.form.details, *others],
            trial.form.cause,
            _reproduce(trial.case, seed),
        )
    wrong = trial.wrong[0]
    position = trial.differences.index(wrong)
    tiling = tilings.get(outputs[position])
    if callable(tiling):
        tiling = tiling([trial, *trials])
    headline, lines = tensors.describe(wrong, tiling)
    evidence = Evidence(trial, wrong, position, trials, reference, tiling, names)
    cause = diagnoses.diagnose(evidence, rules)
    core.fail(exercise, headline, [*lines, *others], cause, _reproduce(trial.case, seed))


def _which_cases(trials: Sequence[Trial]) -> str:
    """``wrong in 3 of 12 cases: ragged, ragged float16; right in: one tile, short``."""

    def labels(failed: bool) -> str:
        found = list(dict.fromkeys(trial.case.label for trial in trials if trial.failed == failed))
        more = [f"{len(found) - _MOST_CASES_NAMED} more"] if len(found) > _MOST_CASES_NAMED else []
        return ", ".join(found[:_MOST_CASES_NAMED] + more)

    count = sum(trial.failed for trial in trials)
    right = f"; right in: {labels(False)}" if count < len(trials) else ""
    return f"wrong in {count} of {len(trials)} cases: {labels(True)}{right}"
