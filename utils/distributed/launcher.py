"""Starts a job of several ranks, waits for it, and leaves no process behind."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from utils.distributed.faults import DistributedError


def launch(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    backend: str | None = None,
    timeout: float = 120.0,
    collective_timeout: float = 15.0,
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` on ``world_size`` ranks and return the ranks' results in order of rank."""
    if backend is None:
        import torch

        from utils import runtime

        backend = "nccl" if runtime.HAS_GPU and torch.cuda.device_count() >= world_size else "gloo"
    here = Path(tempfile.mkdtemp(prefix="ranks-"))
    agent = None
    try:
        (here / "job.pkl").write_bytes(cloudpickle.dumps((function, args, kwargs)))
        settings = {
            "world_size": world_size,
            "backend": backend,
            "collective_timeout": collective_timeout,
            "path": list(sys.path),
            "directory": os.getcwd(),
        }
        (here / "settings.pkl").write_bytes(pickle.dumps(settings))
        with (here / "agent.log").open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", "utils.distributed.agent", str(here)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=Path(__file__).parents[2],
            )
        try:
            code = agent.wait(timeout)
        except subprocess.TimeoutExpired:
            raise DistributedError(f"the job did not finish in {timeout} s", kind="timeout") from None
        for output in sorted((here / "logs").glob("*/*/0/stdout.log")):
            sys.stdout.write(output.read_text())
        faults = {
            rank: pickle.loads((here / f"fault{rank}.pkl").read_bytes())
            for rank in range(world_size)
            if (here / f"fault{rank}.pkl").exists()
        }
        if code != 0 or faults:
            _explain(here, faults)
        return [pickle.loads((here / f"result{rank}.pkl").read_bytes()) for rank in range(world_size)]
    finally:
        if agent is not None:
            try:
                os.killpg(agent.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            agent.wait()
        shutil.rmtree(here, ignore_errors=True)


def _explain(here: Path, faults: dict[int, dict]) -> None:
    failures = pickle.loads((here / "failures.pkl").read_bytes()) if (here / "failures.pkl").exists() else {}
    killed = {rank: failure for rank, failure in failures.items() if rank not in faults and failure["exit"] != -15}
    if killed:
        rank, failure = min(killed.items(), key=lambda item: item[1]["time"])
        raise DistributedError(f"rank {rank} was ended by signal {-failure['exit']}", rank=rank, kind="killed")
    if faults:
        rank, fault = min(faults.items(), key=lambda item: item[1]["time"])
        raise DistributedError(
            f"rank {rank} raised {fault['message']}\n\n{fault['traceback']}", rank=rank, traceback=fault["traceback"]
        )
    raise DistributedError("the launcher failed:\n" + (here / "agent.log").read_text()[-4000:], kind="launcher")
