"""Exercise 7.1: the consumer of a ring of tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType

import torch

from utils import runtime
from utils.checks.attempt import tail
from utils.checks.cases import Case
from utils.checks.core import Exercise, classic, draw_seed, fail, generator, passed
from utils.checks.forbid import record_calls
from utils.checks.hidden import Draw, Observation, Observed
from utils.checks.problem import Problem
from utils.checks.tensors import plain_outputs
from utils.compile_only import CompileError, Request, readings, resource_usages
from utils.gluon import Fault, Launch, emulated

from .protocol import explained, of_fault

Multiply = Callable[..., torch.Tensor]
#: Tiles that pass through a ring, and its stages: one, two, three, odd, even, more than there are stages and fewer.
RINGS = ((2, 2), (1, 4), (3, 2), (8, 2), (7, 3), (4, 4), (11, 4))
DEPTH, SIDE = 64, 128


def _cases(seed: int) -> list[Case]:
    draw = generator(seed)
    cases = []
    for tiles, stages in RINGS:
        kind = f"{tiles} tile{'s' if tiles > 1 else ''}, ring of {stages}"
        K = DEPTH * (tiles - 1) + 8 * draw.randint(1, 8)
        sizes = {"M": draw.randint(1, SIDE), "N": 8 * draw.randint(1, SIDE // 8), "K": K}
        cases.append(Case(kind, sizes, torch.bfloat16, options={"stages": stages}, seed=seed))
    sizes = {"M": SIDE + draw.randint(1, SIDE), "N": SIDE + 8 * draw.randint(1, SIDE // 8), "K": 5 * DEPTH}
    return [*cases, Case("four programs", sizes, torch.bfloat16, options={"stages": 4}, seed=seed)]


def _orders(seed: int) -> Iterator[tuple[str, dict[str, int]]]:
    """The orders in which things happen: the two in which one side is always ahead, and two that are drawn."""
    yield "the consumer goes first, tiles arrive as late as they may", {"first": 0}
    yield "the producer goes first, products end as late as they may", {"first": -1}
    for drawn in (seed, seed + 1):
        yield f"the order is drawn from {drawn}", {"seed": drawn}


def _factors(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return case.tensor("a", "M", "K"), case.tensor("b", "N", "K")


def _wrong(c: object, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where C is not A B^T, which bfloat16 rounds to 8 bits and float32 sums before."""
    exact = a.double() @ b.double().T
    return ~((c.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-3 * a.shape[1] ** 0.5)


def _difference(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Problem | None:
    """Where the values are wrong."""
    wrong = _wrong(c, a, b)
    if not wrong.any():
        return None
    exact, (m, n) = a.double() @ b.double().T, wrong.nonzero()[0].tolist()
    where = f"where: c[m={m}, n={n}], program ({m // SIDE}, {n // SIDE}); "
    where += f"{int(wrong.sum()):,} of {wrong.numel():,} elements differ"
    return Problem(f"c: expected {exact[m, n]:.5g}, got {c[m, n]:.5g}", "", (where,))


def _summed(launch: Launch, problem: Problem) -> Problem:
    """Wrong values with the product that does not add to those before it, where one does not."""
    adding = [adds for who, what, _, adds in launch.programs[0].events if (who, what) == ("consumer", "product")]
    if all(adding[1:]):
        return problem
    alone = adding.index(False, 1)
    cause = (
        f"product {alone} does not add to the sum of those before it: it takes the accumulator that the last one gave"
    )
    return Problem(problem.headline, classic(cause, 6), problem.details)


def _stored_elsewhere(launch: Launch) -> Problem | None:
    """A program whose tile of C is not stored where it belongs, once."""
    for run in launch.programs:
        row, column = (SIDE * at for at in run.program)
        stores = [(where, at) for _, what, where, at in run.events if what == "store"]
        if stores != [("c_tile", [row, column])]:
            said = " and ".join(f"{where} at {at}" for where, at in stores) or "nothing"
            headline = f"program {run.program} stores {said}, expected c_tile at {[row, column]}"
            cause = (
                "TMA takes the coordinates of the tile in C, rows first"
                if stores
                else "TMA copies c_tile to C at the end"
            )
            return Problem(headline, classic(cause, 8))
    return None


def _computed_elsewhere(launch: Launch, c: object) -> Problem | None:
    """A result that is not what the last launch wrote into fresh memory."""
    if not isinstance(c, torch.Tensor):
        return None
    (c,) = plain_outputs(c)
    for before, after in zip(launch.before, launch.after, strict=True):
        same = after.shape == c.shape and after.dtype == c.dtype and torch.equal(after.nan_to_num(), c.nan_to_num())
        if same and (before == after).sum() <= max(8, after.numel() // 2):
            return None
    return Problem("multiply does not return what its last launch wrote", "the launch is given: leave it as it is")


def _emulate(multiply: Multiply, case: Case, order: dict[str, int]) -> Problem | None:
    """What is wrong in one order of events, or None."""
    a, b = (x.cpu() for x in _factors(case))
    tiles, stages = -(-a.shape[1] // DEPTH), case.options["stages"]
    fresh = record_calls() if order.get("first") == 0 else nullcontext()  # new memory then holds NaN, no old product
    with emulated(**order) as launches:
        try:
            with fresh:
                c = multiply(a, b, **case.options)
        except Fault as fault:
            run = launches[-1].programs[-1]
            problem = of_fault(fault, run, stages, tiles)
            return Problem(problem.headline, problem.cause, (f"where: program {run.program}", *problem.details))
        except NotImplementedError:
            raise
        except Exception as error:
            return Problem(f"multiply raised {type(error).__name__}: {error}", "", tuple(tail(error)))
    if not launches:
        return Problem("multiply launches no kernel", "the launch is given: leave it as it is")
    for run in launches[-1].programs:
        if problem := explained(run, stages, tiles):
            return Problem(problem.headline, problem.cause, (f"where: program {run.program}",))
    if problem := _stored_elsewhere(launches[-1]):
        return problem
    if problem := _difference(c, a, b):
        return _summed(launches[-1], problem)
    if order.get("first") == 0 and (problem := _computed_elsewhere(launches[-1], c)):
        return problem
    most = max(run.most_in_flight for run in launches[-1].programs)
    if "first" in order and tiles > 1 and most < 2:
        headline = "expected product 0 to be under way when product 1 is issued, but it has been waited for"
        return Problem(headline, classic("each product is waited for before the next one is issued", 9))
    return None


# ---- what a GPU makes of it ----
_UNDER_WAY = (
    "what warpgroup_mma returns is a sum under way, which has a type of its own, and a name in a loop keeps its type: "
    "keep what warpgroup_mma_wait returns, acc = warpgroup_mma_wait(1, [acc])"
)


def _request(launch: Launch) -> Request:
    types = {
        name: f"tensordesc<bf16{list(given.block_shape)},{given.layout!r}>" if hasattr(given, "layout") else "i32"
        for name, given in zip(launch.kernel.arg_names, launch.arguments)
    }
    return Request(launch.kernel, types, launch.constants, warnings=True, **launch.options)


def compiled(launch: Launch) -> Problem | None:
    """What is wrong with a launch's kernel when it is compiled for sm_90, or None."""
    request = _request(launch)
    try:
        (used,) = resource_usages([request])
    except CompileError as error:
        headline = "the emulator runs the kernel, and Triton does not compile it for sm_90"
        said = str(error).splitlines()
        try:
            (reading,) = readings([request])
        except CompileError:  # Triton's reader gives up before it comes to a line
            return Problem(headline, "", tuple(said[:4]))
        of_ptxas = [line for line in said if line.startswith("ptxas")]
        at = [f"at: {reading.line}"] if reading.line else []
        cause = _UNDER_WAY if "changed type" in reading.error and "warpgroup_mma_accumulator" in reading.error else ""
        return Problem(headline, cause, (*at, *(reading.error.strip().splitlines()[:4] or of_ptxas or said[:4])))
    if used.spills:
        headline = f"the compiled kernel spills: {used.stack_bytes} bytes of local memory per thread, expected 0"
        return Problem(headline)
    if used.warnings:
        return Problem("ptxas serialises the products: they no longer run beside anything", "", used.warnings[:2])
    return None


def _on_a_gpu(multiply: Multiply, case: Case) -> Problem | None:
    """What is wrong with the values that a Hopper GPU gives, or None."""
    a, b = _factors(case)
    c = multiply(a, b, **case.options)
    problem = _difference(c.cpu(), a.cpu(), b.cpu())
    if problem:
        return Problem(f"on {runtime.gpu_name()}, not in the emulator: {problem.headline}", "", problem.details)
    return None


def _is_hopper() -> bool:
    return runtime.HAS_GPU and torch.cuda.get_device_capability(runtime.DEVICE) == (9, 0)


def _observe(lab: ModuleType, seed: int) -> dict[str, Observation]:
    """Further numbers of tiles in rings of every size, in orders of their own."""
    draw, observed = Draw(seed, "7.1"), Observed()
    for stages in (2, 3, 4):
        for tiles in (1, stages + draw.between(0, 1), 3 * stages + draw.between(0, 3)):
            M, N, K = draw.between(1, 140), 8 * draw.between(1, 20), DEPTH * (tiles - 1) + 8 * draw.between(1, 8)
            a, b = (draw.normal(rows, K, dtype=torch.bfloat16) for rows in (M, N))
            for words, order in (("consumer first", {"first": 0}), ("producer first", {"first": -1}), ("mixed", {})):
                with emulated(seed=seed, **order):
                    observed[f"multiply, {tiles} tiles, ring of {stages}, {words}"] = lab.multiply(a, b, stages=stages)
    return observed


CONSUMER = Exercise("7.1", "the consumer", points=100, observe=_observe)


@CONSUMER.checked_by
def check_consumer(multiply: Multiply, seed: int | None = None) -> None:
    """Exercise 7.1: a consumer that takes tiles from a ring, and has one product under way while it waits.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    cases = _cases(seed)

    def told(problem: Problem | None, case: Case, order: str = "") -> None:
        if problem is None:
            return
        cause = f"likely cause: {problem.cause}" if problem.cause else ""
        details = (*problem.details, *([f"order: {order}"] if order else ()))
        fail(CONSUMER, problem.headline, details, cause, f"{CONSUMER.rerun(seed)}, case {case} ({case.kind})")

    for case in cases:
        for words, order in _orders(seed):
            told(_emulate(multiply, case, order), case, words)
    with emulated() as launches:
        multiply(*(x.cpu() for x in _factors(cases[-1])), **cases[-1].options)
    told(compiled(launches[-1]), cases[-1])
    if _is_hopper():
        for case in cases:
            told(_on_a_gpu(multiply, case), case)
    notice = (
        "one product is under way while the next tile is waited for, and the kernel compiles for sm_90 without spills"
    )
    passed(CONSUMER, notice, seed, len(cases))
