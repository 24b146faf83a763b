"""What a function will launch is compiled side by side before it runs; without a GPU the compiler is a known one."""

import threading
from concurrent.futures import Future

import pytest

from utils import runtime
from utils.checks import compile_ahead as module
from utils.checks.compile_ahead import compile_ahead

import triton  # isort: skip
from triton.runtime import _async_compile as asynchronous  # isort: skip


@pytest.fixture
def compiler(monkeypatch):
    """Launches by (kernel, warmup) and the threads that compiled; each compilation waits until two are under way."""
    launches, threads, both = [], set(), threading.Barrier(2, timeout=10)

    def compiled(name):
        both.wait()
        threads.add(threading.get_ident())
        if name == "broken":
            raise ValueError("does not compile")
        return name

    def run(self, name, *, grid, warmup):
        launches.append((name, warmup))
        mode = asynchronous.active_mode.get()
        mode.submit(name, lambda: compiled(name), lambda kernel: launches.append((kernel, "ready")))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(runtime, "INTERPRET", False)
    return launches, threads


def kernel(name):
    """A launch of a kernel of that name."""
    function = object.__new__(triton.JITFunction)
    return lambda: function.run(name, grid=(1,), warmup=False)


def test_kernels_are_compiled_side_by_side_and_not_launched(compiler):
    launches, threads = compiler
    compile_ahead([kernel("a"), kernel("b")])
    assert launches[:2] == [("a", True), ("b", True)] and sorted(launches[2:]) == [("a", "ready"), ("b", "ready")]
    assert len(threads) == 2
    assert asynchronous.active_mode.get() is None


def test_what_does_not_run_or_does_not_compile_is_left_to_the_launch(compiler):
    launches, _ = compiler
    compile_ahead([lambda: 1 / 0, kernel("broken"), kernel("b")])
    assert ("b", "ready") in launches and ("broken", "ready") not in launches
    assert asynchronous.active_mode.get() is None


def test_where_kernels_are_interpreted_nothing_is_called():
    compile_ahead([lambda: pytest.fail("must not run")])


def test_a_compilation_that_takes_long_is_announced(compiler, monkeypatch, capsys):
    monkeypatch.setattr(module, "wait", lambda futures, timeout: type("Waited", (), {"not_done": {Future()}}))
    compile_ahead([kernel("a"), kernel("b")])
    assert capsys.readouterr().out == "compiling 2 forms of your kernels for the GPU ...\n"
