"""The check of exercise 5.7: a step of the engine, and everything of the lab together in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

from utils.checks.core import Exercise, classic
from utils.checks.hidden import Observation, collected

from .engine_step import FAILED, EngineMachine
from .stateful import Workload, check_workloads
from .whole_engine import WholeEngineMachine

WORKLOADS = (
    Workload(
        "Engine with many blocks", EngineMachine, {"blocks": (80, 90), "roomy": True}, times=8,
        hidden=({"requests": 9}, 3),
    ),
    Workload("Engine with few blocks", EngineMachine, {"blocks": (9, 12)}, times=6, hidden=({"requests": 9}, 3)),
    Workload(
        "Engine with requests that fail", EngineMachine, {"blocks": (10, 40), "failing": 0.3}, times=8,
        hidden=({"requests": 9}, 3),
    ),
    Workload("everything together", WholeEngineMachine, times=1, hidden=({"new": 10}, 1)),
)  # fmt: skip
ROWS = classic(
    "zip needs a token for each chunk: one that ends in a prompt, or that failed, has no row in logits",
    3,
)
RAISED = {
    "ArithmeticError: this request cannot be computed": FAILED, "KeyError: 'r": FAILED, "ValueError: zip() arg": ROWS,
}  # fmt: skip


@collected
def observe(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Hidden cases: more requests, and longer texts of the whole engine."""
    for workload in WORKLOADS:
        yield from workload.observe(vars(package), f"{seed}/5.7")


ENGINE = Exercise("5.7", "the engine", points=12, builds_on=("5.1", "5.2", "5.3", "5.4", "5.5", "5.6"), observe=observe)


@ENGINE.checked_by
def check_engine(
    Engine: Callable,
    SpeculativeEngine: Callable,
    ModelRunner: Callable,
    decode: Callable,
    speculative_generate: Callable,
    seed: int | None = None,
) -> None:
    """Exercise 5.7: one step of the engine, and all seven exercises together in it.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    check_workloads(
        ENGINE,
        {
            "Engine": Engine,
            "SpeculativeEngine": SpeculativeEngine,
            "ModelRunner": ModelRunner,
            "decode": decode,
            "speculative_generate": speculative_generate,
        },
        WORKLOADS,
        seed,
        "your scheduler, blocks, kernels and drafts give each request the text that it has alone",
        RAISED,
    )
