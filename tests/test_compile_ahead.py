"""What a function will launch is compiled side by side before it runs; without a GPU the compiler is a known one."""

import inspect
import os
import time

import pytest

from utils import runtime
from utils.checks import compile_ahead as module
from utils.checks.compile_ahead import compile_ahead

import triton  # isort: skip
from triton.runtime import _async_compile as asynchronous  # isort: skip


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Launches by (kernel, warmup), and a folder as cache: a file a kernel, in it the process that compiled it.

    A compilation that is not in the cache waits until another one is under way.
    """
    launches, here = [], os.getpid()
    # Triton 3.9 also asks for what cleans up after a compilation that failed.
    takes_cleanup = "cleanup_fn" in inspect.signature(asynchronous.AsyncCompileMode.submit).parameters
    cleanup = (lambda kernel: None,) if takes_cleanup else ()

    def compiled(name):
        file = tmp_path / name
        if not file.exists():
            if name == "broken":
                raise ValueError("does not compile")
            if name == "stuck" and os.getpid() != here:
                time.sleep(60)
            (tmp_path / f"{name} begun").touch()
            end = time.monotonic() + 10
            while len(list(tmp_path.glob("* begun"))) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            file.write_text(str(os.getpid()))
        return name

    def run(self, name, *, grid, warmup):
        launches.append((name, warmup))
        mode = asynchronous.active_mode.get()
        mode.submit(name, lambda: compiled(name), lambda kernel: launches.append((kernel, "ready")), *cleanup)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(runtime, "INTERPRET", False)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    return launches, tmp_path


def kernel(name):
    """A launch of a kernel of that name."""
    function = object.__new__(triton.JITFunction)
    return lambda: function.run(name, grid=(1,), warmup=False)


def test_kernels_are_compiled_in_processes_side_by_side_and_not_launched(compiler):
    launches, cache = compiler
    compile_ahead([kernel("a"), kernel("b")])
    assert launches[:2] == [("a", True), ("b", True)] and sorted(launches[2:]) == [("a", "ready"), ("b", "ready")]
    by = {(cache / name).read_text() for name in ("a", "b")}
    assert len(by) == 2 and str(os.getpid()) not in by
    assert asynchronous.active_mode.get() is None


def test_a_single_kernel_is_compiled_here(compiler, monkeypatch):
    launches, cache = compiler
    (cache / "another begun").touch()
    monkeypatch.setattr(module.os, "fork", lambda: pytest.fail("forks"))
    compile_ahead([kernel("a")])
    assert (cache / "a").read_text() == str(os.getpid()) and launches[-1] == ("a", "ready")


def test_what_does_not_run_or_does_not_compile_is_left_to_the_launch(compiler):
    launches, cache = compiler
    (cache / "another begun").touch()
    compile_ahead([lambda: 1 / 0, kernel("broken"), kernel("b")])
    assert ("b", "ready") in launches and ("broken", "ready") not in launches
    assert asynchronous.active_mode.get() is None


def test_a_process_that_does_not_end_is_ended(compiler, monkeypatch):
    launches, cache = compiler
    (cache / "another begun").touch()
    monkeypatch.setattr(module, "LIMIT", 0.5)
    started = time.monotonic()
    compile_ahead([kernel("stuck"), kernel("b")])
    assert time.monotonic() - started < 10
    assert (cache / "stuck").read_text() == str(os.getpid()) != (cache / "b").read_text()
    assert ("stuck", "ready") in launches


def test_an_interrupt_waits_for_nothing(compiler):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_ahead([kernel("a"), kernel("b"), interrupt])
    assert asynchronous.active_mode.get() is None


def test_where_kernels_are_interpreted_nothing_is_called():
    compile_ahead([lambda: pytest.fail("must not run")])


def test_a_compilation_that_takes_long_is_announced(compiler, monkeypatch, capsys):
    monkeypatch.setattr(module, "PATIENCE", -1.0)
    compile_ahead([kernel("a"), kernel("b")])
    assert capsys.readouterr().out == "compiling 2 forms of your kernels for the GPU ...\n"
