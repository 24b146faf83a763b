"""Jobs that fail: each ends within seconds, says which rank and why, and leaves no process."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.own_processes import OwnProcesses
from utils.distributed import DistributedError, launch, pool, warm
from utils.distributed.output import Output

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
BOUND = 20.0  # seconds within which every fault ends, the start of the processes included


def ranks() -> list[psutil.Process]:
    """Whatever runs below the launcher: this process starts the launcher, that one a server, and that one the ranks."""
    left = []
    for launcher in psutil.Process().children():
        for server in launcher.children():
            left += server.children(recursive=True)
    return left


def failure(function: Callable, *args, world_size: int = 2, **kwargs) -> DistributedError:
    """The error of a job that fails, which must come in time and leave no rank."""
    started = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        launch(function, *args, world_size=world_size, **kwargs)
    assert time.monotonic() - started < BOUND
    assert not ranks()
    print(caught.value)
    return caught.value


#: The processes that these tests have started and that are still there.
children = OwnProcesses()


@pytest.fixture(scope="module", autouse=True)
def launcher() -> Iterator[None]:
    """A launcher that outlives failing jobs, but not this file."""
    pool.shutdown()  # the launcher that another file's tests have kept warm
    children.reset()
    with warm():
        yield
    assert not children()


@pytest.fixture(autouse=True)
def started() -> None:
    """A launcher that is ready: what is bounded here is the time that a fault takes, not the import of PyTorch."""
    if not children():
        launch(nothing, world_size=1)


def nothing() -> None:
    pass


def wait_for_all() -> None:
    dist.all_reduce(torch.ones(4))


def raise_on(rank: int, error: BaseException) -> None:
    if dist.get_rank() == rank:
        print("about to raise")
        raise error
    wait_for_all()


def test_an_exception_on_one_rank_comes_with_its_traceback(capsys) -> None:
    error = failure(raise_on, 1, ValueError("bad luck"), world_size=3)
    assert (error.rank, error.kind) == (1, "exception")
    assert isinstance(error.exception, ValueError)
    assert "rank 1 of 3 raised ValueError: bad luck" in str(error)
    assert "in raise_on" in error.traceback and "worker.py" not in error.traceback
    assert "[rank 1] about to raise" in capsys.readouterr().out
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_exception_on_all_ranks_is_told_once() -> None:
    def divide() -> float:
        return 1 / 0

    error = failure(divide)
    assert error.rank == 0
    assert "ranks 0 and 1 of 2 raised ZeroDivisionError: division by zero" in str(error)


def test_an_exception_that_cannot_be_pickled_is_told_in_words() -> None:
    def refuse() -> None:
        error = OSError("no pickle")
        error.lock = threading.Lock()
        raise error

    error = failure(refuse, world_size=1)
    assert error.exception is None
    assert "raised OSError: no pickle" in str(error)


def test_a_result_that_cannot_be_sent_back_is_told() -> None:
    error = failure(threading.Lock, world_size=1)
    assert error.kind == "exception"
    assert "what the function returns, a lock, must be sent to another process" in str(error)


def test_leaving_by_sys_exit_is_an_exception() -> None:
    error = failure(raise_on, 0, SystemExit(3))
    assert error.rank == 0
    assert "raised SystemExit: 3" in str(error)


def die_on(rank: int, number: int) -> None:
    dist.barrier()
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    wait_for_all()


def test_a_rank_killed_by_sigkill_is_named() -> None:
    error = failure(die_on, 1, signal.SIGKILL, world_size=3)
    assert (error.rank, error.kind) == (1, "killed")
    assert "rank 1 of 3 was killed by SIGKILL" in str(error)
    assert "barrier" in str(error), "its last call"


def test_a_rank_that_crashes_leaves_its_stack() -> None:
    error = failure(die_on, 0, signal.SIGSEGV)
    assert (error.rank, error.kind) == (0, "killed")
    assert "SIGSEGV" in str(error)
    assert "in die_on" in error.traceback


def test_of_a_crash_the_python_lines_are_kept_and_the_functions_of_compiled_code_are_not(tmp_path, capsys) -> None:
    where = tmp_path / "logs" / "run" / "attempt_0" / "1"
    where.mkdir(parents=True)
    python = 'Fatal Python error: Aborted\n\nThread 0x01 [python] (most recent call first):\n  File "mine.py", line 7\n'
    compiled = (
        "\nCurrent thread's C stack trace (most recent call first):\n" + 40 * '  Binary file "c.so", at +0x2 [0x3]\n'
    )
    (where / "stderr.log").write_text(python + compiled + "\nExtension modules: numpy (total: 1)\n")
    output = Output(tmp_path, 2)
    output.show_rest()
    for text in (output.errors(1), capsys.readouterr().err):
        assert 'File "mine.py", line 7' in text and "numpy" in text
        assert "Binary" not in text and "C stack" not in text


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_leaves_its_process_is_named(code: int) -> None:
    def leave() -> None:
        if dist.get_rank() == 1:
            os._exit(code)
        wait_for_all()

    error = failure(leave)
    assert (error.rank, error.kind) == (1, "exit")
    assert "rank 1 of 2 left its process" in str(error)


def test_mismatched_shapes_in_a_collective_are_told_rank_by_rank() -> None:
    def reduce() -> None:
        dist.barrier()
        dist.all_reduce(torch.ones(5 if dist.get_rank() == 1 else 4))

    error = failure(reduce, world_size=3)
    assert (error.rank, error.kind) == (1, "mismatch")
    assert "call 2 in the group of ranks 0, 1 and 2" in str(error)
    where = f"at {Path(__file__).name}:{reduce.__code__.co_firstlineno + 2} in reduce"
    assert f"rank 1 called all_reduce of 5 float32 elements, {where}" in str(error)


def test_different_collectives_are_told_rank_by_rank() -> None:
    def confuse() -> None:
        if dist.get_rank() == 0:
            dist.broadcast(torch.ones(4), src=0)
        else:
            wait_for_all()

    error = failure(confuse)
    assert error.kind == "mismatch"
    assert "rank 0 called broadcast from rank 0 of 4 float32 elements" in str(error)
    assert "rank 1 called all_reduce of 4 float32 elements" in str(error)


def test_a_message_of_another_size_is_told() -> None:
    def exchange() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(4), 0)

    error = failure(exchange)
    assert (error.rank, error.kind) == (1, "mismatch")
    assert "rank 0 called send to rank 1 of 3 float32 elements" in str(error)


def test_a_rank_that_never_arrives_is_named_with_where_it_is() -> None:
    def linger() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            threading.Event().wait()
        wait_for_all()

    error = failure(linger, world_size=3, collective_timeout=2.0)
    assert (error.rank, error.kind) == (1, "timeout")
    assert "rank 1 never arrived: ranks 0 and 2 wait in all_reduce of 4 float32 elements" in str(error)
    assert "the last that rank 1 called was barrier" in str(error)
    assert f"{__file__}:{linger.__code__.co_firstlineno + 3} in linger" in error.traceback


def test_a_rank_that_returns_too_early_is_named_at_once() -> None:
    def leave_early() -> None:
        if dist.get_rank() != 2:
            wait_for_all()

    error = failure(leave_early, world_size=3, collective_timeout=1000.0)
    assert (error.rank, error.kind) == (2, "timeout")
    assert "rank 2 has returned from the function without calling it" in str(error)


def test_a_stopped_rank_is_named() -> None:
    error = failure(die_on, 1, signal.SIGSTOP, collective_timeout=2.0)
    assert (error.rank, error.kind) == (1, "timeout")
    assert "rank 1 does not answer" in str(error)


def test_a_message_that_is_never_sent_names_the_sender() -> None:
    def listen() -> None:
        if dist.get_rank() == 0:
            dist.recv(torch.ones(3), 1)
        threading.Event().wait()

    error = failure(listen, collective_timeout=2.0)
    assert (error.rank, error.kind) == (1, "timeout")
    assert "rank 1 has not sent it: rank 0 waits in recv from rank 1 of 3 float32 elements" in str(error)
    assert "in listen" in error.traceback


def test_a_job_that_takes_too_long_ends() -> None:
    def linger() -> None:
        if dist.get_rank() == 1:
            threading.Event().wait()

    error = failure(linger, timeout=3.0)
    assert (error.rank, error.kind) == (1, "timeout")
    assert "rank 1 of 2 did not return within 3 s" in str(error)
    assert "in linger" in error.traceback


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        error = failure(nothing, port=port)
    assert (error.rank, error.kind) == (0, "port")
    assert f"port {port} is in use" in str(error)
    assert launch(dist.get_rank, world_size=2, port=port) == [0, 1], "free again"


def test_a_port_that_a_rank_finds_in_use_is_told() -> None:
    def listen() -> None:
        if dist.get_rank() == 1:
            with socket.create_server(("127.0.0.1", 0)) as server:
                dist.TCPStore("127.0.0.1", server.getsockname()[1], is_master=True)

    error = failure(listen)
    assert (error.rank, error.kind) == (1, "port")


def test_more_ranks_than_the_machine_has_room_for_are_refused() -> None:
    gpus = torch.cuda.device_count()
    error = failure(nothing, world_size=gpus + 1, backend="nccl")
    assert (error.rank, error.kind) == (gpus, "world_size")
    assert f"this machine has {gpus}" in str(error)
    assert failure(nothing, world_size=100_000).kind == "world_size"


def test_no_process_at_all_is_left_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert children(), "a launcher is kept warm for the next job"
    monkeypatch.setattr(pool, "_keepers", 0)  # as outside of a block of warm()
    failure(raise_on, 1, ValueError("bad luck"))
    assert not children(recursive=True)
