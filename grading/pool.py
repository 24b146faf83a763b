"""One process for each submission, several at a time, forked from one that has nbgrader imported already: the nursery.

A worker that fails, hangs or is killed loses its own submission only. When the grader dies, in whatever way, the
nursery and its workers die with it, and their sandboxes with them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from grading import die_with, gradebook, outputs, worker
from grading.lab import ROOT
from grading.results import write_json
from grading.worker import Job

LONGEST = 3  # times the budget of a submission's checks: they run at most twice, and the scenarios once


def run_all(job: Job, pending: Mapping[str, tuple[Path, str]], out: Path, jobs: int) -> Iterator[str]:
    """Grade the ``pending`` submissions (path and digest by student), ``jobs`` at a time; yields each when it ended.

    Whether it has a result is for the caller to see: a worker writes it, or does not. The workers are forked from a
    process of their own, which has nothing of the caller's: neither its threads, which a fork would wait for, nor its
    event loop.
    """
    if not pending:
        return
    reading, writing = os.pipe()
    nursery = subprocess.Popen(
        [sys.executable, "-c", f"from grading.pool import nurse; nurse({writing}, {os.getpid()})"],
        stdin=subprocess.PIPE,
        pass_fds=(writing,),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
    )
    os.close(writing)
    waited_for = set(pending)
    try:
        with contextlib.suppress(BrokenPipeError):  # it died: then nothing comes
            nursery.stdin.write(pickle.dumps((job, dict(pending), out, jobs)))
            nursery.stdin.close()
        with open(reading, encoding="utf-8") as ended:
            for line in ended:
                student = json.loads(line)
                waited_for.discard(student)
                yield student
        yield from sorted(waited_for)  # none, unless the nursery was killed
    finally:
        nursery.kill()  # a no-op at the end of its work; else its workers die with it
        nursery.wait()


def nurse(told: int, parent: int) -> None:
    """The process that the workers are forked from: reads what to do from its standard input.

    Args:
        told: file descriptor that takes the name of each submission that ended, as JSON, one a line.
        parent: process that must be alive.
    """
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted too, and ends this process
    job, pending, out, jobs = pickle.load(sys.stdin.buffer)
    importlib.import_module("grading.scenarios.compare")  # once here, with torch, and not in each worker
    with open(told, "w", encoding="utf-8") as ended:
        for student in _fork_all(job, pending, out, jobs):
            print(json.dumps(student), file=ended, flush=True)


def _fork_all(job: Job, pending: Mapping[str, tuple[Path, str]], out: Path, jobs: int) -> Iterator[str]:
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
    die_with(parent)
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
