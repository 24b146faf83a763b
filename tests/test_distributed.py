"""A function runs on several ranks, from scripts, notebooks and threads, and its results come back."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import ModuleType

import nbformat
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from nbclient import NotebookClient
from torch import nn

from tests.own_processes import OwnProcesses
from utils.distributed import device, job, launch, launcher, patches, pool, shutdown, start_ahead

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Point:
    x: float


def arrive(value: object, *, scale: int = 1) -> dict[str, object]:
    return {
        "rank": dist.get_rank(),
        "ranks": dist.get_world_size(),
        "value": value,
        "scale": scale,
        "device": device(),
        "threads": torch.get_num_threads(),
        "variable": os.environ.get("MLF_OF_THE_CALLER"),
        "directory": os.getcwd(),
    }


@pytest.mark.slow
def test_each_rank_gets_the_arguments_and_returns_its_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLF_OF_THE_CALLER", "yes")
    monkeypatch.chdir(tmp_path)
    results = launch(arrive, "a", world_size=2, backend="gloo", scale=3)
    same = {"ranks": 2, "value": "a", "scale": 3, "device": torch.device("cpu"), "threads": 1}
    same |= {"variable": "yes", "directory": str(tmp_path)}
    assert results == [{"rank": rank, **same} for rank in range(2)]


@pytest.mark.slow
def test_ranks_can_start_from_nothing_as_those_with_a_gpu_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launcher.START_METHODS, "gloo", "spawn")
    assert launch(dist.get_rank, world_size=2) == [0, 1]


@pytest.mark.slow
def test_closures_classes_and_large_tensors_come_back_right() -> None:
    large = torch.arange(3_000_000, dtype=torch.float64)
    weight = nn.Parameter(torch.ones(3))

    def work() -> tuple:
        rank = dist.get_rank()
        return large * rank, Point(rank), weight * 2, nn.Parameter(large[:2]), large[:5]

    for rank, (big, point, product, parameter, view) in enumerate(launch(work, world_size=2)):
        assert torch.equal(big, large * rank)
        assert point == Point(rank)
        assert torch.equal(product, torch.full((3,), 2.0)) and product.requires_grad
        assert isinstance(parameter, nn.Parameter)
        assert view.untyped_storage().nbytes() == 40, "a view does not bring all that it looks into"


@pytest.mark.slow
def test_the_output_of_every_rank_is_shown_rank_0_first(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("first line of", dist.get_rank())
        print("no end of line", end="")
        print("trouble", file=sys.stderr)

    launch(speak, world_size=2)
    shown = capsys.readouterr()
    assert shown.out == "first line of 0\nno end of line\n[rank 1] first line of 1\n[rank 1] no end of line\n"
    assert shown.err == "[rank 0] trouble\n[rank 1] trouble\n"


@pytest.mark.slow
def test_jobs_run_side_by_side_on_threads() -> None:
    results: dict[int, list] = {}

    def start(number: int) -> None:
        results[number] = launch(partial(arrive, number), world_size=2)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[result["value"] for result in results[number]] for number in range(2)] == [[0, 0], [1, 1]]


@pytest.mark.slow
def test_a_function_of_a_module_that_no_rank_can_import_travels_with_its_code() -> None:
    module = ModuleType("made_up_by_a_test")
    exec("from torch import distributed\nbase = 40\ndef add():\n    return base + distributed.get_rank()", vars(module))
    sys.modules[module.__name__] = module
    try:
        assert launch(module.add, world_size=2) == [40, 41]
    finally:
        del sys.modules[module.__name__]


@pytest.mark.slow
def test_a_rank_that_does_not_end_after_its_return_loses_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_LINGER", 0.5)

    def return_and_linger() -> int:
        threading.Thread(target=threading.Event().wait).start()
        return dist.get_rank()

    assert launch(return_and_linger, world_size=2) == [0, 1]


SCRIPT = """
from utils.distributed import launch
import torch.distributed as dist
print("the script starts")
def double(x):
    print("rank", dist.get_rank())
    return x * factor
factor = 2
print(launch(double, 21, world_size=2))
"""


@pytest.mark.slow
def test_a_script_needs_no_guard_and_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert (run.stdout, run.stderr) == ("the script starts\nrank 0\n[rank 1] rank 1\n[42, 42]\n", "")


@pytest.mark.slow
def test_a_notebook_launches_what_its_cells_define() -> None:
    cells = [SCRIPT, "factor = 3\nprint(launch(double, 21, world_size=2)[1])"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(ROOT)}}).execute()
    text = ["".join(output.text for output in cell.outputs) for cell in notebook.cells]
    assert text == [
        "the script starts\nrank 0\n[rank 1] rank 1\n[42, 42]\n",
        "rank 0\n[rank 1] rank 1\n63\n",
    ]


@pytest.mark.slow
def test_nothing_outlives_a_caller_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(
        "import threading\nfrom utils.distributed import launch\n"
        "launch(lambda: print('here') or threading.Event().wait(), world_size=2)\n"
    )
    caller = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, cwd=ROOT)
    assert caller.stdout.readline() == b"here\n"
    started = psutil.Process(caller.pid).children(recursive=True)
    assert len(started) >= 4
    caller.kill()
    caller.wait()
    caller.stdout.close()
    assert psutil.wait_procs(started, timeout=20)[1] == []


class Stub:
    """Stands for an agent that has ended itself for want of work, or for a new one."""

    def __init__(self, alive: bool = True) -> None:
        self.alive, self.killed, self.folder = alive, False, None

    def is_alive(self) -> bool:
        return self.alive

    def start(self, folder: Path) -> None:
        self.folder = folder

    def kill(self) -> None:
        self.killed = True


def test_a_launcher_that_has_ended_itself_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = Stub(alive=False)
    monkeypatch.setattr(pool, "_idle", [ended])
    monkeypatch.setattr(pool, "Agent", Stub)
    fresh = pool.take(tmp_path)
    assert fresh is not ended and fresh.folder == tmp_path
    assert ended.killed
    pool.give_back(ended)
    assert not pool._idle, "one that has ended is not kept"


def test_what_is_started_ahead_takes_the_next_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool, "_idle", [])
    monkeypatch.setattr(pool, "Agent", Stub)
    start_ahead()
    start_ahead()
    (started,) = pool._idle
    (tmp_path / "accepted").touch()
    assert pool.take(tmp_path) is started and started.folder == tmp_path


def test_with_a_gpu_the_server_imports_what_does_not_look_for_it() -> None:
    modules = pool._preload(1, {})
    assert set(pool._PRELOAD_TORCH) < set(modules) < set(pool._preload(0, {}))
    for environment in ({"MLF_DEVICE": "cpu"}, {"TRITON_INTERPRET": "1"}):
        assert pool._preload(1, environment) == pool._PRELOAD
    program = f"""
import importlib, sys, torch
[importlib.import_module(module) for module in {modules!r}]
assert "utils.runtime" not in sys.modules and not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_is_started_ahead_in_vain_is_gone_after_a_shutdown() -> None:
    shutdown()
    start_ahead()
    (started,) = psutil.Process().children()
    shutdown()
    assert not started.is_running()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"function": 3, "world_size": 2}, TypeError, "launch runs a function, got 3"),
        ({"function": arrive, "world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"function": arrive, "world_size": 2.0}, TypeError, "whole number of ranks, got 2.0"),
        ({"function": arrive, "world_size": 2, "backend": "mpi"}, ValueError, "'gloo' .* got 'mpi'"),
        ({"function": arrive, "world_size": 2, "timeout": 0}, ValueError, "timeout must be a positive"),
        ({"function": arrive, "world_size": 2, "port": 70_000}, ValueError, "between 1 and 65535, got 70000"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        launch(**arguments)


def test_outside_of_a_job_the_device_is_the_cpu() -> None:
    assert device() == torch.device("cpu")


def attend(heads: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Causal attention of 2 x ``heads`` heads of five positions, and what its sum's gradients are."""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, heads, 5, 7, generator=generator).requires_grad_() for _ in range(3)]
    out = F.scaled_dot_product_attention(*qkv, is_causal=True)
    return out.detach(), torch.autograd.grad(out.sum(), qkv)


@pytest.mark.slow
def test_a_rank_without_a_head_attends_to_nothing() -> None:
    """Where there are more ranks than heads (PyTorch 2.11 was killed by SIGFPE)."""
    whole, expected = attend(1)
    (some, gradients), (none, empty) = launch(lambda: attend(1 - dist.get_rank()), world_size=2, backend="gloo")
    assert torch.equal(some, whole) and all(map(torch.equal, gradients, expected))
    assert none.shape == (2, 0, 5, 7) and [part.shape for part in empty] == [none.shape] * 3


@pytest.mark.slow
def test_an_interrupt_of_the_caller_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def linger() -> None:
        print("here")
        threading.Event().wait()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdout, "write", interrupt)
    shutdown()
    children = OwnProcesses()
    with pytest.raises(KeyboardInterrupt):
        launch(linger, world_size=2)
    assert not children(recursive=True)


def test_attention_is_called_only_where_there_are_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: object) -> torch.Tensor:
        called.append(kwargs)
        return query + key + value

    monkeypatch.setattr(F, "scaled_dot_product_attention", patches.of_any_heads(attention))
    assert attend(0)[0].shape == (2, 0, 5, 7) and not called
    assert attend(3)[0].shape == (2, 3, 5, 7) and called == [{"is_causal": True}]


@pytest.mark.parametrize(("version", "repaired"), [("2.11.0+cu130", True), ("2.12.1", False), ("2.13.0+cpu", False)])
def test_a_pytorch_that_needs_no_repair_is_left_alone(version, repaired, monkeypatch: pytest.MonkeyPatch) -> None:
    before = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", before)  # put back after the test
    monkeypatch.setattr(torch, "__version__", version)
    patches.apply_patches()
    assert (F.scaled_dot_product_attention is not before) == repaired
