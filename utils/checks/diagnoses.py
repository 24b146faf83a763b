"""From a symptom to its likely cause: rules over the evidence that a failed check has gathered.

A rule is a predicate on :class:`Evidence` and the sentence that a student reads when it holds. The first rule that
holds speaks; a lab's own rules come before the generic ones of :mod:`utils.checks.symptoms`. The strongest rule is
:func:`same_as`: the answer equals what a known wrong formula gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from utils.checks.cases import Case
from utils.checks.problem import Problem
from utils.checks.tensors import Difference, Target, agrees, as_outputs, upcast
from utils.checks.tiling import Tiling


def on_cpu(values: Iterable[Any]) -> tuple[Any, ...]:
    """The values, tensors among them on the CPU."""
    return tuple(value.cpu() if isinstance(value, torch.Tensor) else value for value in values)


@dataclass
class CaseResult:
    """One case that was run: what went in, what came out, how it differs, what was seen on the way.

    ``form`` is what is wrong before numbers are compared; ``profile`` is the profiler's, or None; ``configurations``
    is how many an autotuned kernel has, and ``constants`` those of the one it took.
    """

    case: Case
    args: tuple[Any, ...]
    outputs: tuple[Any, ...] = ()
    targets: tuple[Target, ...] = ()
    differences: tuple[Difference, ...] = ()
    form: Problem | None = None
    error: BaseException | None = None
    profile: Any = None
    seen: Any = None
    configurations: int = 1
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> tuple[Difference, ...]:
        return tuple(difference for difference in self.differences if difference.count)

    @property
    def failed(self) -> bool:
        return self.error is not None or self.form is not None or bool(self.wrong)

    def tuned(self, configurations: int, constants: Mapping[str, Any]) -> None:
        """Note how many configurations an autotuned kernel has, and which one it took."""
        self.configurations, self.constants = configurations, constants


def _largest(values: torch.Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


@dataclass
class Evidence:
    """What a rule may look at: the first wrong output of the simplest failed case, and which other cases failed.

    ``position`` is the output's place among the outputs. Tensors of ``difference`` are float64 on the CPU.
    """

    trial: CaseResult
    difference: Difference
    position: int
    trials: Sequence[CaseResult]
    reference: Callable[..., Any]
    tiling: Tiling | None = None
    names: Sequence[str] = field(default_factory=tuple)

    @property
    def case(self) -> Case:
        return self.trial.case

    @property
    def got(self) -> torch.Tensor:
        return self.difference.got

    @property
    def right(self) -> torch.Tensor:
        return self.difference.right

    @property
    def bad(self) -> torch.Tensor:
        return self.difference.bad

    @functools.cached_property
    def args64(self) -> tuple[Any, ...]:
        """The inputs in float64, on the CPU as everything else here."""
        return on_cpu(map(upcast, self.trial.args))

    @functools.cached_property
    def bad_tiles(self) -> np.ndarray | None:
        """Which tiles hold a wrong element, by tile numbers; None without a tiling."""
        return None if self.tiling is None or not self.bad.dim() else self.tiling.bad_tiles(self.bad.numpy())

    def of_each_case(self) -> list[Evidence]:
        """The evidence of every case in which this output is wrong, to tell mistakes apart that one case does not."""
        return [
            replace(self, trial=trial, difference=trial.differences[self.position])
            for trial in self.trials
            if self.position < len(trial.differences) and trial.differences[self.position].count
        ]

    def only(self, predicate: Callable[[Case], bool]) -> bool:
        """Whether a case fails only if ``predicate`` holds for it, and cases for which it does not hold pass."""
        failing = [trial.case for trial in self.trials if trial.failed]
        passing = [trial.case for trial in self.trials if not trial.failed]
        return all(map(predicate, failing)) and any(not predicate(case) for case in passing)

    def close(self, candidate: torch.Tensor) -> bool:
        """Whether the answer equals another tensor, clearly different from the right one, about as nearly as asked."""
        candidate = candidate.detach().double().cpu()
        if candidate.shape != self.got.shape or not candidate.isfinite().any():  # all NaN is no evidence of a formula
            return False
        dtype, allowed = self.trial.targets[self.position].dtype, self.difference.allowed
        if agrees(candidate, self.right, 4 * allowed, dtype).all():
            return False
        if candidate.any() and agrees(candidate, torch.zeros_like(candidate), 4 * allowed, dtype).all():
            return False  # what is next to nothing is no evidence of a formula either
        larger = max(1.0, _largest(candidate) / (_largest(self.right) or 1.0))  # and so is its rounding error
        return bool(agrees(self.got, candidate, 4 * allowed * larger, dtype).all())

    def same_as(self, formula: Callable[..., Any], args: Sequence[Any] | None = None) -> bool:
        """Whether the answer equals what another formula gives for the same inputs (in float64)."""
        try:
            outputs = as_outputs(formula(*(self.args64 if args is None else on_cpu(args)), **self.case.options))
            candidate = outputs[self.position if len(outputs) > 1 else 0]
            return self.got.numel() > 1 and self.close(candidate)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError):  # the formula does not fit this case
            return False

    def findings(self, kind: str) -> list[Any]:
        """The profiler's findings in this case: ``out_of_bounds``, ``uninitialized_reads`` or ``races``."""
        return list(getattr(self.trial.profile, kind, ()))


@dataclass(frozen=True)
class Diagnosis:
    """A rule: when ``applies`` holds for the evidence, the student reads ``cause`` (or what that function writes)."""

    applies: Callable[[Evidence], Any]
    cause: str | Callable[[Evidence], str]


def same_as(formula: Callable[..., Any], cause: str) -> Diagnosis:
    """A rule that holds when the answer equals what ``formula`` gives: a classic wrong answer, written down in PyTorch.

    ``formula`` is called like the reference, with float64 inputs; it returns all outputs or the one that is wrong.
    """
    return Diagnosis(lambda evidence: evidence.same_as(formula), cause)


def diagnose(evidence: Evidence, rules: Sequence[Diagnosis | tuple[Callable[[Evidence], Any], Any]]) -> str:
    """The sentence of the first rule that holds, or the empty string; rules that cannot judge this case are skipped."""
    for rule in rules:
        rule = rule if isinstance(rule, Diagnosis) else Diagnosis(*rule)
        try:
            if rule.applies(evidence):
                return rule.cause if isinstance(rule.cause, str) else rule.cause(evidence)
        except (IndexError, ValueError, RuntimeError, TypeError, KeyError, AttributeError):
            continue
    return ""
