"""One call that holds a student's kernel to everything an exercise asks: :func:`check_kernel`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from utils import progress, runtime
from utils.checks import core, cuda_context, forbid, symptoms, tensors, traffic
from utils.checks.cases import Case, Cases
from utils.checks.compile_ahead import compile_ahead
from utils.checks.compiled import Compiled, Reader
from utils.checks.core import Exercise
from utils.checks.diagnoses import CaseResult, Diagnosis
from utils.checks.explanations import Advice, TilingOf, explain, reproduce, stop_at
from utils.checks.gpu_cases import for_gpu
from utils.checks.huge import SECONDS, overflow
from utils.checks.problem import Problem
from utils.checks.speed import Speed, run_speed
from utils.checks.stage import Stage
from utils.checks.trials import argument_names, run_case

#: Of programs that are too few to be tried on tensors of more than 2^31 elements.
UNFINISHED = (
    f"offsets beyond 2^31 were not tested to the end: on so large a tensor your last program alone takes over "
    f"{SECONDS:.0f} s of this processor; more programs, with fewer rows each, would also keep a GPU busy"
)
#: What holds of every kernel when it is compiled.
_COMPILED = Compiled()


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
    inspections: Sequence[Callable[[CaseResult], Problem | None]] = (),
    forbidden: forbid.Rules | None = None,
    diagnose: Sequence[Diagnosis | tuple] = (),
    raised: Mapping[str, Advice] | None = None,
    compiled: Compiled | None = _COMPILED,
    huge: Callable[[], Sequence[Any]] | Sequence[Callable[[], Sequence[Any]]] = (),
    speed: Speed | None = None,
    seed: int | None = None,
    races: bool = True,
    why_raced: Callable[[CaseResult], str] = lambda trial: "",
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
            budget=Budget({"x_ptr": Passes("row", "col", times=2)}, {"out_ptr": Passes("row", "col")}, exact=True),
            diagnose=[same_as(lambda x: x.exp(), "the rows are not divided by their sums")],
        )

    In this order: the function runs on each case (a stub's ``NotImplementedError`` passes through; any other
    exception is shown with its case); nothing forbidden was called; type, shape, dtype, memory of its own, inputs
    untouched; values against the float64 reference; no access out of bounds, no read of unwritten memory, no race;
    the traffic budget; on a GPU, speed.

    In a GPU session all of this happens twice: first each case runs in the interpreter under the profiler, which
    carries out no access out of bounds, and only a function that is right there on every case runs compiled. A wrong
    kernel is thus told the same on every machine, and does not take the GPU from the student's Python process. Compiled
    it runs on the cases that bring something new (:mod:`utils.checks.gpu_cases`). Each
    configuration of an autotuned kernel is tried, since the GPU runs them all; the budget holds for the first.

    Args:
        exercise: Its number and title, for the message.
        student: The function: ``student(*inputs(case), **case.options)`` gives a tensor or a tuple of tensors.
        reference: The same in plain PyTorch; called with float64 inputs it gives the right values.
        cases: What it is tried on. A :class:`Cases` is drawn from the seed; a list is used as it is.
        inputs: Builds the arguments of a case (``lambda case: (case.tensor("x", "row", "col"),)``).
        outputs: Names of the outputs.
        baseline, factor, atol: The error allowed; see :func:`utils.checks.tensors.targets`.
        tiling: How the grid covers the output, or each named output; or a function that reads it off the trials.
        budget: Memory traffic allowed, on every case.
        inspections: What else must hold of a right answer: each is asked about every case that the profiler ran, after
            the budget, and says what is wrong.
        forbidden: What may not be called; by default :class:`utils.checks.forbid.Rules` as it is. For an exercise in
            plain PyTorch pass ``Rules(kernel=False)``: nothing is then profiled.
        diagnose: The lab's own rules, tried before the generic ones.
        raised: Words of an exception -> what a student reads who has met it, or a function of the results that says it.
        compiled: What must hold of the kernels when they are compiled, which is looked at without a GPU too; by default
            that they can be, and that no float32 product is rounded to TF32. None for kernels of other exercises.
        huge: Makes arguments with more than 2^31 elements, or several functions that do. In the interpreter the last
            program of each launch runs on them, whose offsets must not overflow (:mod:`utils.checks.huge`).
        speed: What it is timed against on a GPU.
        seed: Draws the cases; a fresh one by default.
        races: Whether programs that touch each other's memory are looked for.
        why_raced: Why they do in a case whose values are right nevertheless; empty where nothing more is known.
        notice: What to notice when it passes.

    Raises:
        CheckFailed: the answer is wrong; the text says where, whose, why, and how to see it again.
        NotImplementedError: the student has not written it yet.
        ValueError: there is no case, or a tiling names no output.
    """
    seed = core.draw_seed(seed)
    drawn = cases.draw(seed) if isinstance(cases, Cases) else list(cases)
    rules = forbid.Rules() if forbidden is None else forbidden
    if not drawn:
        raise ValueError(f"{exercise} needs at least one case")
    tilings = _tilings(tiling, outputs)
    cuda_context.fail_if_lost(exercise)
    names = argument_names(student)
    told = (*diagnose, *symptoms.GENERIC)
    allowed = functools.partial(tensors.targets, reference, baseline=baseline, factor=factor, atol=atol)
    known: dict[int, tuple[tensors.Target, ...]] = {}
    stages = _stages(rules.kernel)
    numbers: Sequence[int] = range(len(drawn))
    unfinished = ""
    while stages:
        stage = stages.pop(0)
        some = {number: drawn[number] for number in (numbers if stage.compiled else range(len(drawn)))}
        found = trials = None  # which hold the tensors of the stage before
        first = stage.profiled and stage.configuration == 0
        reader = Reader(compiled) if first and compiled is not None else None
        found = _run_cases(exercise, student, some, inputs, outputs, allowed, known, stage, rules, races, reader, seed)
        trials = [*found.values()]
        if wrong := [trial for trial in trials if trial.failed]:
            explain(exercise, wrong[0], trials, reference, outputs, tilings, names, told, seed, stage, raised or {})
        _stop_at_traffic(exercise, trials, budget, inspections, why_raced, stage, seed)
        if first:
            if reader is not None and (problem := reader.problem()):
                core.fail(exercise, problem.headline, problem.details, problem.cause, exercise.rerun(seed))
            unfinished = _stop_at_overflow(exercise, student, [huge] if callable(huge) else huge, seed)
            numbers = [[*found][place] for place in for_gpu(trials, others=compiled is None)]
            most = max((trial.configurations for trial in trials), default=1)
            stages = [*(Stage(True, number) for number in range(1, most)), *stages]
    measured = "" if speed is None else _measured(exercise, speed, student)
    lines = (notice, measured, _left_out(cases, drawn, known), unfinished)
    core.passed(exercise, "\n  ".join(line for line in lines if line), seed, len(known))


def _tilings(tiling: TilingOf | Mapping[str, TilingOf] | None, outputs: Sequence[str]) -> Mapping[str, TilingOf | None]:
    """How the grid covers each output."""
    tilings = tiling if isinstance(tiling, Mapping) else dict.fromkeys(outputs, tiling)
    if unknown := set(tilings) - set(outputs):
        raise ValueError(f"tiling names {', '.join(sorted(unknown))}, the outputs are {', '.join(outputs)}")
    return tilings


def _run_cases(
    exercise: Exercise,
    student: Callable[..., Any],
    drawn: Mapping[int, Case],
    inputs: Callable[[Case], Sequence[Any]],
    outputs: Sequence[str],
    allowed: Callable[..., tuple[tensors.Target, ...]],
    known: dict[int, tuple[tensors.Target, ...]],
    stage: Stage,
    rules: forbid.Rules,
    races: bool,
    reader: Reader | None,
    seed: int,
) -> dict[int, CaseResult]:
    """Run the function on cases by their numbers; ``known`` keeps what is right by number, for further stages.

    The launches of cases that are right go to the ``reader``, if there is one. A case with offsets beyond 2^31 is
    left out, and has no result, if the GPU's memory runs out, as where another process has taken what was free.
    """
    if stage.compiled:
        compile_ahead(functools.partial(_call, student, inputs, case) for case in drawn.values())
    trials: dict[int, CaseResult] = {}
    for number, case in progress.steps([*drawn.items()], "case"):
        with tensors.one_thread(), cuda_context.explain_loss(exercise, stage.details, reproduce(exercise, case, seed)):
            try:
                args = tuple(inputs(case))
            except torch.OutOfMemoryError:
                if case.layout != "far":
                    raise
                continue
            if number not in known:
                known[number] = allowed(args, case.options)
            trial = run_case(student, case, args, known[number], outputs, stage.profiled, races, stage.configuration)
        trials[number] = trial
        if trial.error is None:
            _stop_at_forbidden(exercise, rules, trial, student, seed, first=len(trials) == 1)
            if reader is not None and not trial.failed:
                reader.look_at((case.dtype, launch) for launch in trial.profile.launches)
        elif len(trials) == 1:
            break  # it will not do better on a harder case
    return trials


def _call(student: Callable[..., Any], inputs: Callable[[Case], Sequence[Any]], case: Case) -> None:
    """Run the function on a case, whatever it returns."""
    student(*inputs(case), **case.options)


def _stop_at_forbidden(
    exercise: Exercise, rules: forbid.Rules, trial: CaseResult, student: Callable[..., Any], seed: int, first: bool
) -> None:
    """Raise if a case called what is forbidden; the ``first`` one, also if the function uses a built-in solution."""
    nothing_in = any(isinstance(value, torch.Tensor) and value.numel() == 0 for value in trial.args)
    empty = nothing_in or all(target.right.numel() == 0 for target in trial.targets)
    stop_at(exercise, forbid.broken_rule(rules, trial.seen, trial.case, empty), trial.case, seed)
    if first and (used := forbid.find_library(student)):
        name = getattr(student, "__name__", "the function")
        problem = Problem(f"{name} uses a built-in solution, {used}", "implement the operation yourself")
        stop_at(exercise, problem, trial.case, seed)


def _stop_at_traffic(
    exercise: Exercise,
    trials: Sequence[CaseResult],
    budget: traffic.Budget | None,
    inspections: Sequence[Callable[[CaseResult], Problem | None]],
    why_raced: Callable[[CaseResult], str],
    stage: Stage,
    seed: int,
) -> None:
    """Raise if a case left its tensors or the budget, or an inspection finds something, in this order."""
    trials = [trial for trial in trials if trial.profile is not None]
    for trial in trials:
        raced = why_raced(trial) if trial.profile.races else ""
        stop_at(exercise, traffic.unsafe(trial.profile, trial.case, raced), trial.case, seed, stage.said(trial))
    if stage.configuration:
        return
    for trial in trials if budget is not None else ():
        stop_at(exercise, traffic.over_budget(budget, trial.profile, trial.case), trial.case, seed)
    for trial in trials:
        for inspect in inspections:
            stop_at(exercise, inspect(trial), trial.case, seed)


def _stop_at_overflow(
    exercise: Exercise, student: Callable[..., Any], huge: Sequence[Callable[[], Sequence[Any]]], seed: int
) -> str:
    """Raise if an offset overflows on tensors of more than 2^31 elements; returns what was not tried of them."""
    from utils.interpreter import TimeIsUp

    for inputs in huge:
        try:
            found = overflow(student, inputs)
        except TimeIsUp:
            return UNFINISHED
        if found:
            core.fail(exercise, found.headline, found.details, found.cause, exercise.rerun(seed))
    return ""


def _measured(exercise: Exercise, speed: Speed, student: Callable[..., Any]) -> str:
    """What the timing says of a function that is fast enough; raises if it is not."""
    with cuda_context.explain_loss(exercise, ["while its speed was measured, on larger inputs than the cases"]):
        measured, problem = run_speed(speed, student)
    if problem:
        core.fail(exercise, problem.headline, problem.details, problem.cause)
    return measured


def _left_out(cases: Cases | Sequence[Case], drawn: Sequence[Case], tried: Collection[int]) -> str:
    """What this machine could not try, or the empty string; ``tried`` are the numbers of cases that it could."""
    meant = isinstance(cases, Cases) and "far" in cases.layouts
    far = [number in tried for number, case in enumerate(drawn) if case.layout == "far"]
    if not all(far) or (meant and not far):
        return "offsets beyond 2^31 were not tested: this machine has too little memory"
    return ""


def _stages(kernel: bool) -> list[Stage]:
    """How often the cases run, and how; stages for further configurations of an autotuned kernel follow the first."""
    if not kernel:
        return [Stage(False)]
    return [Stage(True)] if runtime.INTERPRET else [Stage(True), Stage(False, compiled=True)]
