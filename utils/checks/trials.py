"""Runs a student's function on one case and compares what it gives with what is right."""

from __future__ import annotations

import ast
import contextlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from utils import runtime
from utils.checks import cuda_context, forbid, tensors
from utils.checks.cases import Case
from utils.checks.diagnoses import CaseResult
from utils.checks.problem import Problem
from utils.checks.student_files import is_library


def run_case(
    student: Callable[..., Any],
    case: Case,
    args: tuple[Any, ...],
    wanted: tuple[tensors.Target, ...],
    outputs: Sequence[str],
    profiled: bool,
    races: bool,
    number: int = 0,
) -> CaseResult:
    """Run the function on one case and compare what it gives.

    Args:
        student, case, args: What runs, and on what.
        wanted, outputs: What each output should be, and its name.
        profiled: Kernels run in the interpreter under the profiler, which carries out no access out of bounds; in a
            GPU session otherwise compiled.
        races: Whether the profiler looks for races.
        number: Which of its configurations an autotuned kernel takes under the profiler.

    Raises:
        NotImplementedError: the student has not written it yet.
        Exception: what the function raised, where it has cost the process its GPU; any other is in ``trial.error``.
    """
    trial = CaseResult(case, args, targets=wanted)
    before = [value.detach().clone() if isinstance(value, torch.Tensor) else None for value in args]
    with contextlib.ExitStack() as stack:
        trial.seen = stack.enter_context(forbid.record_calls())
        if profiled:
            from utils.interpreter import configuration
            from utils.kernel_profile import profile_kernel

            trial.profile = stack.enter_context(profile_kernel(check_races=races))
            tuning = stack.enter_context(configuration(number))
            stack.callback(lambda: trial.tuned(tuning.most, tuning.taken))
        try:
            result = student(*args, **case.options)
            if runtime.HAS_GPU:
                torch.cuda.synchronize(runtime.DEVICE)
        except Exception as error:
            if cuda_context.is_lost():
                raise
            unwritten = _not_implemented(error)
            if unwritten is not None:
                raise unwritten from None
            trial.error = error
            return trial
        trial.outputs = tensors.plain_outputs(result)
    named = {n: v for n, v in zip(argument_names(student), args) if isinstance(v, torch.Tensor)}
    trial.form = _form(trial, outputs, named, before)
    if trial.form is None:
        trial.differences = tuple(map(tensors.difference, outputs, trial.outputs, wanted))
    return trial


def _form(
    trial: CaseResult, outputs: Sequence[str], named: Mapping[str, torch.Tensor], before: Sequence[torch.Tensor | None]
) -> Problem | None:
    if len(trial.outputs) != len(outputs):
        plural = "" if len(outputs) == 1 else "s"
        return Problem(f"expected {len(outputs)} output{plural} ({', '.join(outputs)}), got {len(trial.outputs)}")
    for name, old, new in zip(_fill(named, len(trial.args)), before, trial.args):
        if old is not None and tensors.changed(old, new):
            cause = "the caller still needs the input: let kernels write to a new tensor only"
            return Problem(f"input {name} was modified in place", cause)
    problems = map(lambda *pair: tensors.wrong_form(*pair, named), outputs, trial.outputs, trial.targets)
    return next((problem for problem in problems if problem), None)


def _fill(names: Sequence[str] | Mapping[str, Any], count: int) -> list[str]:
    return [*names, *(f"argument {i + 1}" for i in range(len(names), count))][:count]


def argument_names(student: Callable[..., Any]) -> list[str]:
    """Names of the function's parameters; none where Python cannot say."""
    try:
        return list(inspect.signature(student).parameters)
    except (TypeError, ValueError):
        return []


def _not_implemented(error: BaseException) -> NotImplementedError | None:
    """The stub's message behind an exception: raised in a function or in a kernel, or found by the compiler."""
    while error is not None:
        if isinstance(error, NotImplementedError) and students_frame(error, innermost=True):
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


def students_frame(error: BaseException, innermost: bool = False) -> traceback.FrameSummary | None:
    """The last line of the student's own code in a traceback; with ``innermost`` only if nothing ran below it."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = frames[-1:] if innermost else frames[::-1]
    return next((frame for frame in frames if not is_library(frame.filename)), None)
