"""The same work on a Dask cluster: every submission is graded by one of its workers as it would be on one machine.

A worker of the cluster calls :func:`grading.pool.run_all` for one submission at a time per thread: this has a process
and a sandbox of its own there, and the same limits. All machines see the course, the submissions and the folder of
grades at the same paths, and a worker that does not is refused. What a worker has made comes back as bytes, and only
the caller writes it into the folder of grades. Where a worker dies, Dask gives its submission to another.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grading import outputs, sandbox
from grading.lab import ROOT, Lab
from grading.pool import run_all
from grading.results import read_result, write_folder, write_json
from grading.submission import HandedIn
from grading.worker import Job
from utils.atomic_write import write_atomically

CONNECT = 10.0  # seconds in which the scheduler must answer
START = f"start it in {ROOT}, with the environment of the course there"
NO_DASK = "grading on a cluster needs Dask, which is not installed: pip install -e '.[cluster]'"


@dataclass(frozen=True)
class Graded:
    """What a worker made of a submission: the result or None, what was printed, and the files that were read."""

    result: dict[str, Any] | None
    log: bytes
    submitted: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _Here:
    """What a worker must have as the caller has it: the course in one version, and the folder ``expected``."""

    job: Job
    digest: Callable[[Lab], str]
    course: str

    def missing(self) -> str:
        """Why this process cannot grade, with what to do about it; empty if it can."""
        if multiprocessing.current_process().daemon:
            return "it may not start processes: start it with --no-nanny"
        if not self.job.lab.released.is_dir() or self.digest(self.job.lab) != self.course:
            return f"its course, Python or PyTorch is not the caller's: {START}"
        if not self.job.expected.is_dir() or not os.access(self.job.expected, os.W_OK):
            return f"it cannot write into {self.job.expected}: the folder of grades must be shared"
        if self.job.isolated and (why := sandbox.available()):
            return why
        return ""


def run_on(
    address: str, job: Job, pending: Mapping[str, tuple[HandedIn, str]], out: Path, digest: Callable[[Lab], str]
) -> Iterator[str]:
    """Grade the ``pending`` submissions on a cluster; yields each when it ended, as :func:`grading.pool.run_all` does.

    Args:
        address: of the scheduler, such as ``tcp://10.0.0.5:8786``.
        job: the run.
        pending: submission and digest, by student.
        out: the folder of grades.
        digest: of the course and its environment. It is computed by each worker too, and must come to the same.

    Raises:
        ValueError: Dask is not installed, no scheduler answers, it has no workers, or one of them cannot grade.
    """
    try:
        from distributed import Client, as_completed
    except ImportError as error:
        raise ValueError(NO_DASK) from error
    try:
        client = Client(address, timeout=CONNECT)
    except (OSError, ValueError) as error:
        raise ValueError(f"no Dask scheduler answers at {address}: {error}") from error
    here = _Here(job, digest, digest(job.lab))
    with client:
        found = client.run(_missing, here, on_error="return")  # an error where it does not even find this module
        if not found:
            raise ValueError(f"the Dask scheduler at {address} has no workers: start some, then grade again")
        if unfit := [f"{worker}: {_why(answer)}" for worker, answer in sorted(found.items()) if answer]:
            raise ValueError("; ".join(["not every worker of the cluster can grade", *unfit]))
        futures = {
            client.submit(_grade, here, handed_in, of, pure=False): student
            for student, (handed_in, of) in pending.items()
        }
        for future in as_completed(futures):
            student = futures.pop(future)
            if future.status == "finished":
                graded = future.result()
            else:  # it raised, or Dask gave up after several workers had died with it
                graded = Graded(None, f"the cluster did not grade it: {future.exception() or future.status}\n".encode())
            _write(graded, out, job.lab, student)
            yield student


def _why(answer: str | Exception) -> str:
    return answer if isinstance(answer, str) else f"{type(answer).__name__}: {answer}: {START}"


def _missing(here: _Here) -> str:
    sandbox.remove_leftovers()
    return here.missing()


def _grade(here: _Here, handed_in: HandedIn, digest: str) -> Graded:
    """Grade one submission on this worker.

    Raises:
        RuntimeError: this worker, which may have joined late, cannot grade.
    """
    lab, student = here.job.lab, handed_in.student
    if why := here.missing():
        raise RuntimeError(f"a worker of the cluster cannot grade: {why}")
    if gone := [str(path) for _, path in handed_in.paths if not os.path.lexists(path)]:
        raise RuntimeError(f"a worker of the cluster does not see {gone[0]}: the folder of submissions must be shared")
    with tempfile.TemporaryDirectory(prefix=f"mlf-{os.getpid()}-", dir=sandbox.RUNTIME) as scratch:
        out = Path(scratch)
        for _ in run_all(here.job, {student: (handed_in, digest)}, out, 1):
            log, submitted = outputs.log_path(out, lab, student), outputs.submitted_path(out, lab, student)
        return Graded(
            read_result(outputs.result_path(out, lab, student)),
            log.read_bytes() if log.is_file() else b"",
            {path.name: path.read_bytes() for path in submitted.iterdir()} if submitted.is_dir() else {},
        )


def _write(graded: Graded, out: Path, lab: Lab, student: str) -> None:
    """Write what came back where a worker on this machine would have; the result last."""
    write_atomically(outputs.log_path(out, lab, student), graded.log)
    if graded.result is not None:
        write_folder(outputs.submitted_path(out, lab, student), graded.submitted)
        write_json(outputs.result_path(out, lab, student), graded.result)
