"""One rank of a job: joins the process group, runs the function, writes down its result or its fault."""

from __future__ import annotations

import faulthandler
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from utils.distributed import calls, patches

#: How the names begin of what the elastic agent sets for a rank; every other environment variable is the caller's.
_OF_THE_RANK = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC_")


def device() -> torch.device:
    """Device of this rank: its own GPU with NCCL, the CPU otherwise (also outside of ``launch``)."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class HostPickler(cloudpickle.Pickler):
    """Pickles what travels between the caller and a rank.

    A tensor arrives on the CPU, whichever GPU it was on, and a view brings its own elements only, not the storage it
    looks into.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.layout == torch.strided:
            if value.is_cuda or value.grad_fn is not None:
                value = value.detach().cpu().requires_grad_(value.requires_grad)
            if value.untyped_storage().nbytes() > value.numel() * value.element_size():
                value = value.detach().clone().requires_grad_(value.requires_grad)
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)


def pack(value: Any, words: str) -> bytes:
    """``value`` as bytes, functions and classes of a notebook included; ``words`` says what it is."""
    content = io.BytesIO()
    try:
        HostPickler(content, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        error.add_note(f"{words} must be sent to another process and cannot be pickled (send plain data or tensors)")
        raise
    return content.getvalue()


def write(path: Path, content: bytes) -> None:
    """Write a file that others see only when it is whole."""
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.rename(path)


class CallLog:
    """Writes one line for each collective of this rank, for the caller to compare with the other ranks'."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()
        self._numbers: dict[tuple[Any, ...], int] = {}

    def __call__(self, call: calls.Call) -> None:
        message = call.kind in ("send", "recv")
        key = (call.group, call.kind, call.peer, call.tag) if message else (call.group,)
        line = {"time": time.monotonic(), "at": calls.caller(), **vars(call)}
        with self._lock:
            line["number"] = self._numbers[key] = self._numbers.get(key, 0) + 1
            os.write(self._file, (json.dumps(line) + "\n").encode())


def run(folder: str) -> None:
    """Body of a rank; ``folder`` holds the job and takes the outcome."""
    rank, here = int(os.environ["RANK"]), Path(folder)
    try:
        write(here / f"pid{rank}", str(os.getpid()).encode())
        settings = pickle.loads((here / "settings.pkl").read_bytes())
        _settle(here, rank, settings)
        _join(settings)
        function, args, kwargs = pickle.loads((here / "job.pkl").read_bytes())
        # in step: what one rank imports longer than another is no delay of its first collective
        (here / f"ready{rank}").touch()
        _wait_for(here / "start")
        with calls.listen(CallLog(here / f"calls{rank}")):
            result = function(*args, **kwargs)
        write(here / f"result{rank}", pack(result, f"what the function returns, a {type(result).__name__},"))
    except BaseException as error:
        _report(here, rank, error)
        # stay: a rank that went would take its peers with it, and the caller would have to tell cause from effect
        _wait_for(here / "never")
    # the last to return still needs the others: a gloo rank that went would break its peers' connections
    _wait_for(here / "finish")
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()


def _settle(here: Path, rank: int, settings: dict[str, Any]) -> None:
    """Make this process like the caller's: environment, directory, import path; and watch whether it lives."""
    agent = multiprocessing.parent_process()
    if agent is not None:
        threading.Thread(target=_end_with, args=(agent.sentinel,), daemon=True).start()
    own = {name: value for name, value in os.environ.items() if name.startswith(_OF_THE_RANK)}
    os.environ.clear()
    os.environ.update(settings["environment"] | own)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    sys.path[:] = settings["path"]
    sys.argv[:] = settings["argv"]
    os.chdir(settings["directory"])
    sys.stdout.reconfigure(line_buffering=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable()
    # the caller asks a rank that others wait for where it is
    faulthandler.register(signal.SIGUSR1, (here / f"stack{rank}").open("w"), all_threads=True)


def _join(settings: dict[str, Any]) -> None:
    """Join the process group of all ranks."""
    gpu = None
    if settings["backend"] == "nccl":
        from utils import runtime  # noqa: F401  (chooses the first GPU when it is imported: before this rank's own)

        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)
    else:
        torch.set_num_threads(1)
        patches.apply_patches()
    # the caller notices a rank that does not arrive; the backend's own limit, a little later, is there for messages
    patience = timedelta(seconds=settings["collective_timeout"] + 1)
    dist.init_process_group(settings["backend"], timeout=patience, device_id=gpu)


def _report(here: Path, rank: int, error: BaseException) -> None:
    """Write the fault file: the traceback from the function on, and the exception where it can be pickled."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    written = "".join(traceback.format_exception(type(error), error, trace))
    try:  # after the traceback is written: a failure to pickle leaves a note on it
        exception = pack(error, "the exception")
        pickle.loads(exception)
    except Exception:
        exception = b""
    fault = {"type": type(error).__name__, "text": str(error), "traceback": written, "exception": exception}
    write(here / f"fault{rank}", pickle.dumps(fault))
    sys.stdout.flush()
    sys.stderr.flush()


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
