"""One process per submission, several at a time, forked from a server that has loaded the slow libraries already.

A worker that fails, hangs or is killed loses its own submission only. When the grader dies, in whatever way, its
workers die with it, and their sandboxes with them.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from grading import outputs, worker
from grading.results import write_json
from grading.submission import HandedIn
from grading.worker import Job

LONGEST = 3  # times the budget of a submission's checks: they run at most twice, and the scenarios once
#: What the server imports, once for all workers.
PRELOADED = ["grading.pool", "grading.scenarios.compare", "tqdm"]


def run_all(job: Job, pending: Mapping[str, tuple[HandedIn, str]], out: Path, jobs: int) -> Iterator[str]:
    """Grade the ``pending`` submissions (with the digest, by student), ``jobs`` at a time; yields each when it ended.

    A worker writes its submission's result, or ends without one: the caller looks. Workers are not forked from the
    caller, whose threads and event loop a fork would wait for.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    waiting, running = list(pending.items()), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                student, (handed_in, digest) = waiting.pop(0)
                process = context.Process(target=_work, args=(job, handed_in, digest, out), daemon=True)
                try:
                    process.start()
                except (OSError, EOFError):  # the server died
                    yield student
                    continue
                running[process.sentinel] = (student, process, time.monotonic())
            for sentinel in multiprocessing.connection.wait(list(running), timeout=1.0):
                student, process, _ = running.pop(sentinel)
                process.join()
                yield student
            for _, process, started in running.values():
                if time.monotonic() - started > LONGEST * job.limits.seconds:
                    _end(process)
    finally:
        for _, process, _ in running.values():
            _end(process)


def _work(job: Job, handed_in: HandedIn, digest: str, out: Path) -> None:
    """The worker: grade, and write the result last."""
    threading.Thread(target=_end_with_grader, daemon=True).start()
    student = handed_in.student
    log = outputs.log_path(out, job.lab, student)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", buffering=1, encoding="utf-8", errors="replace") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        logging.basicConfig(stream=file, level=logging.INFO, force=True)
        try:
            result = worker.grade(job, handed_in, digest, outputs.submitted_path(out, job.lab, student))
            write_json(outputs.result_path(out, job.lab, student), result)
        except BaseException:
            traceback.print_exc()


def _end_with_grader() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _end(process: BaseProcess) -> None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    process.kill()
    process.join()
