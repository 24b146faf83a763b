"""One rank of a job: joins the process group, runs the function, writes down its result or its fault."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist


def device() -> torch.device:
    """Device of this rank: its own GPU with NCCL, else the CPU."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


class _HostPickler(cloudpickle.Pickler):
    """Pickles tensors of a GPU as tensors of the host."""

    def reducer_override(self, value):
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.cpu().__reduce_ex__(2)
        return super().reducer_override(value)


def _write(path: Path, content: object) -> None:
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        _HostPickler(file).dump(content)
    draft.rename(path)


def run(folder: str, backend: str, collective_timeout: float) -> None:
    """Body of a rank; ``folder`` holds the job and takes the outcome."""
    rank, here = int(os.environ["RANK"]), Path(folder)
    try:
        settings = pickle.loads((here / "settings.pkl").read_bytes())
        sys.path[:] = settings["path"]
        os.chdir(settings["directory"])
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            timeout=timedelta(seconds=collective_timeout),
            device_id=device_id(backend),
        )
        function, args, kwargs = cloudpickle.loads((here / "job.pkl").read_bytes())
        _write(here / f"result{rank}.pkl", function(*args, **kwargs))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        fault = {
            "time": time.time(),
            "message": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
        _write(here / f"fault{rank}.pkl", fault)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def device_id(backend: str) -> torch.device | None:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else None
