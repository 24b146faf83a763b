"""Hidden scenarios of lab 1: counts, rates and times for sizes that no release holds."""

from __future__ import annotations

from types import ModuleType

from grading.scenarios import Draw, Observation, Scenario


def dot_product(package: ModuleType, seed: int) -> dict[str, Observation]:
    """1.1: one element, odd lengths, lengths beyond 2**53, elements of 1 to 16 bytes."""
    draw = Draw(seed, "1.1")
    lengths = [1, 2, draw.between(3, 99), draw.between(10**5, 10**7), 2**53 + 2 * draw.between(1, 10**6) + 1]
    sizes = [1, 2, 4, 8, 16]
    draw.random.shuffle(sizes)
    return {
        "dot_product_flops": [package.dot_product_flops(n) for n in lengths],
        "dot_product_bytes": [package.dot_product_bytes(n, size) for n, size in zip(lengths, sizes)],
    }


SCENARIOS = (Scenario("1.1", dot_product),)
