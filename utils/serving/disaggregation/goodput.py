"""Goodput: the request rate that an arrangement of GPUs sustains while nearly all requests meet their limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from utils.serving.metrics import Report, RequestRecord
from utils.serving.workload import Workload

from .simulate import Arrangement, finished_requests, simulate
from .step_time import StepTime

#: Times as fast as drawn: all requests come at once.
AT_ONCE = 1e9
#: This part of the highest throughput leaves each request alone on the GPUs, as good as always.
ALONE = 1024


@dataclass(frozen=True)
class SLO:
    """A service level objective: limits of TTFT and TPOT in seconds, and the share of requests that must meet both.

    Raises:
        ValueError: a limit that is not over 0, a share outside 0..1.
    """

    ttft: float
    tpot: float
    share: float = 0.9

    def __post_init__(self) -> None:
        for name, limit in (("ttft", self.ttft), ("tpot", self.tpot)):
            if not limit > 0:
                raise ValueError(f"{name} must be over 0 s, got {limit!r}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be over 0 and at most 1, got {self.share!r}")

    def met_by(self, record: RequestRecord) -> bool:
        """Whether a request got its answer within both limits; an answer of one token has no TPOT to exceed."""
        return record.completed and record.ttft <= self.ttft and not record.tpot > self.tpot

    def attainment(self, report: Report) -> float:
        """Share of the requests that met both limits."""
        return sum(map(self.met_by, report.requests)) / len(report.requests)

    def attained(self, report: Report) -> bool:
        """Whether enough requests met both limits."""
        return self.attainment(report) >= self.share

    def attained_at(self, arrangement: Arrangement, workload: Workload, step_time: StepTime) -> bool:
        """Whether :meth:`attained` holds for a simulated report; the simulation ends as soon as that is certain.

        Raises:
            TypeError, ValueError: as :func:`simulate`.
        """
        count, met, missed = len(workload), 0, 0
        for record in finished_requests(arrangement, workload, step_time):
            if self.met_by(record):
                met += 1
            else:
                missed += 1
            if met / count >= self.share:
                return True
            if (count - missed) / count < self.share:
                return False
        raise AssertionError("unreachable: every request has met the limits or missed them")


def request_rate(workload: Workload) -> float:
    """Requests per second that a workload brings.

    Raises:
        ValueError: all requests come at once.
    """
    last = workload.requests[-1].arrival
    if not last > 0:
        raise ValueError("the workload's requests all come at time 0, so it has no rate; draw their arrivals")
    return len(workload) / last


def goodput(
    arrangement: Arrangement, workload: Workload, slo: SLO, step_time: StepTime, *, tolerance: float = 0.02
) -> float:
    """The highest rate, in requests/s, at which a workload meets an SLO (Zhong et al. 2024, section 1).

    The same requests are played at different rates (:meth:`Workload.at_rate`): the rate is doubled or halved until one
    meets the SLO and its double does not, and between the two it is bisected. That takes the share of requests within
    the limits to fall as the rate grows, which it does but for small ups and downs.

    Args:
        tolerance: how far, as a share of it, the returned rate may lie below one that fails.

    Returns:
        A rate at which the SLO was met; 0 if it is not met even at 1/1024 of the highest throughput, where each request
        has the GPUs to itself.

    Raises:
        ValueError: requests that all come at once, a tolerance that is not over 0; or the SLO is met at any rate, which
            means that the workload has too few requests to fill the GPUs.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be over 0, got {tolerance!r}")
    base = request_rate(workload)

    def met(factor: float) -> bool:
        return slo.attained_at(arrangement, workload.at_rate(factor), step_time)

    at_once = simulate(arrangement, workload.at_rate(AT_ONCE), step_time)
    if slo.attained(at_once):
        raise ValueError(f"all {len(workload)} requests meet the SLO even if they come at once: draw more of them")
    low = high = most = at_once.request_rate / base  # what the GPUs can do at all
    if met(low):
        high = 2 * low
        while met(high):
            low, high = high, 2 * high
    else:
        low = high / 2
        while not met(low):
            if low <= most / ALONE:
                return 0.0
            low, high = low / 2, low
    while high > (1 + tolerance) * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if met(middle) else (low, middle)
    return low * base


@dataclass(frozen=True)
class Case:
    """A workload with the SLO that its users expect."""

    name: str
    workload: Workload
    slo: SLO


@dataclass(frozen=True)
class Outcome:
    """What the best arrangement of one kind reaches in a case: requests/s of all its GPUs."""

    case: str
    kind: str
    best: Arrangement
    goodput: float


def sweep(
    cases: Sequence[Case], kinds: Mapping[str, Sequence[Arrangement]], step_time: StepTime, *, tolerance: float = 0.02
) -> list[Outcome]:
    """The goodput of each kind of arrangement in each case, with the best of the arrangements of that kind.

    Args:
        kinds: name of a kind -> its arrangements, for example several token budgets, or several splits of the GPUs. To
            be fair they all have the same number of GPUs.
        tolerance: of :func:`goodput`.

    Returns:
        For each case, in order, one outcome per kind. Of equal arrangements the first is named.

    Raises:
        ValueError: no cases, a kind without arrangements, different numbers of GPUs.
    """
    counts = {arrangement.gpus for arrangements in kinds.values() for arrangement in arrangements}
    if not cases or not kinds or not all(kinds.values()) or len(counts) != 1:
        raise ValueError(
            "sweep needs at least one case and one arrangement of each kind, all with the same number of GPUs, got "
            f"{len(cases)} cases, { ({name: len(each) for name, each in kinds.items()}) } and GPUs {sorted(counts)}"
        )
    outcomes = []
    for case in cases:
        for kind, arrangements in kinds.items():
            reached = [goodput(each, case.workload, case.slo, step_time, tolerance=tolerance) for each in arrangements]
            best = max(range(len(reached)), key=reached.__getitem__)
            outcomes.append(Outcome(case.name, kind, arrangements[best], reached[best]))
    return outcomes
