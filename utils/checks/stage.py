"""How the cases of a check run: in the interpreter or compiled, and which configuration of an autotuned kernel."""

from __future__ import annotations

from dataclasses import dataclass

from utils.checks.diagnoses import CaseResult


@dataclass(frozen=True)
class Stage:
    """One run over all cases.

    ``profiled``: kernels run in the interpreter under the profiler; ``configuration``: which one an autotuned kernel
    takes, from 0; ``compiled``: the stages before found the same kernels right in the interpreter.
    """

    profiled: bool
    configuration: int = 0
    compiled: bool = False

    @property
    def details(self) -> list[str]:
        """What to say about an exception that costs the process its GPU."""
        return ["compiled; in the interpreter no case accesses memory out of bounds"] if self.compiled else []

    def said(self, trial: CaseResult) -> list[str]:
        """What to say about a case that goes wrong at this stage and was right before."""
        if self.compiled:
            return ["every case passes in the interpreter and fails only when the kernel is compiled"]
        if self.configuration:
            constants = ", ".join(f"{name}={value}" for name, value in trial.constants.items())
            return [
                f"with configuration {self.configuration + 1} of @triton.autotune ({constants}); right with the first"
            ]
        return []
