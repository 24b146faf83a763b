"""Hidden scenarios of lab 4: a ring, bytes, data parallelism, three stages of ZeRO, an MLP in parts, a pipeline."""

from __future__ import annotations

from types import ModuleType

from grading.scenarios import Draw, Observation, Scenario, lab4_data_parallel, lab4_pipeline, lab4_ring, lab4_tensor
from grading.scenarios.lab4_zero import SCENARIOS as ZERO


def memory(package: ModuleType, seed: int) -> dict[str, Observation]:
    """4.2: every stage, few ranks and many, sizes that do not divide, other byte counts, what the door refuses."""
    draw = Draw(seed, "4.2")
    usual, others = [], []
    for stage in range(4):
        for _ in range(6):
            parameters, ranks = draw.between(1, 10 ** draw.between(1, 12)), draw.random.choice((1, 2, 3, 7, 64, 1000))
            usual.append(float(package.bytes_per_rank(parameters, ranks, stage)))
            sizes = dict(
                zip(
                    ("weight_bytes", "gradient_bytes", "optimizer_bytes"),
                    draw.random.sample((1, 2, 4, 6, 8, 12, 16), 3),
                )
            )
            others.append(float(package.bytes_per_rank(parameters, ranks, stage, **sizes)))
    return {"bytes_per_rank": usual, "bytes_per_rank with other sizes": others}


SCENARIOS = (
    lab4_ring.SCENARIO,
    Scenario("4.2", memory),
    lab4_data_parallel.SCENARIO,
    *ZERO,
    lab4_tensor.SCENARIO,
    lab4_pipeline.SCENARIO,
)
