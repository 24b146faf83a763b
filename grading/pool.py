"""One process for each submission, several at a time, forked from one that has nbgrader imported already.

A worker that fails, hangs or is killed loses its own submission only. When this process dies, in whatever way, its
workers die with it, and their sandboxes with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from grading import gradebook, outputs, worker
from grading.results import write_json
from grading.worker import Job

PR_SET_PDEATHSIG = 1
LONGEST = 3  # times the budget of a submission's checks: they run at most twice, and the scenarios once


def run_all(job: Job, pending: Mapping[str, tuple[Path, str]], out: Path, jobs: int) -> Iterator[str]:
    """Grade the ``pending`` submissions (path and digest by student), ``jobs`` at a time; yields each when it ended.

    Whether it has a result is for the caller to see: a worker writes it, or does not.
    """
    importlib.import_module("grading.scenarios.compare")  # once here, with torch, and not in each worker
    context = multiprocessing.get_context("fork")
    waiting, running = list(pending.items()), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                student, (path, digest) = waiting.pop(0)
                process = context.Process(
                    target=_work, args=(job, student, path, digest, out, os.getpid()), daemon=True
                )
                process.start()
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


def _work(job: Job, student: str, path: Path, digest: str, out: Path, parent: int) -> None:
    """The worker: grade, and write the result last, when everything else of it is in place."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = outputs.log_path(out, job.lab, student)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", buffering=1, encoding="utf-8", errors="replace") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        logging.basicConfig(stream=file, level=logging.INFO, force=True)
        gradebook.QUIET.setLevel(logging.INFO)
        status = 1
        try:
            places = (outputs.autograded_path(out, job.lab, student), outputs.submitted_path(out, job.lab, student))
            write_json(outputs.result_path(out, job.lab, student), worker.grade(job, path, digest, *places))
            status = 0
        except BaseException:
            traceback.print_exc()
        file.flush()
    os._exit(status)


def _end(process: BaseProcess) -> None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    process.kill()
    process.join()
