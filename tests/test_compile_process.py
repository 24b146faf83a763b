"""The compiler's process is kept from one order to the next, and replaced where it cannot be."""

import multiprocessing
import os
import signal

import pytest

from utils.compile_only import CompileError, Request, readings
from utils.compile_only import process as module
from utils.compile_only.process import MOST_UNREAD, Compiler
from utils.compile_only.resources import _order

from utils import runtime  # noqa: F401  isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def add_one_kernel(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs) + 1)


def read() -> int:
    """Let it read a kernel; the process that did."""
    (reading,) = readings([Request(add_one_kernel, {"x_ptr": "*fp32"}, {"BLOCK": 128})])
    assert (reading.name, reading.error) == ("add_one_kernel", "")
    return module._kept._process.pid


@pytest.fixture(autouse=True)
def _afresh():
    module.end()
    yield
    module.end()


def test_one_process_reads_what_comes_also_in_another_test(monkeypatch):
    first = read()
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "the next one (call)")
    assert read() == first


def test_another_environment_has_another_process(monkeypatch):
    first = read()
    monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/another-cache")
    assert read() != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def _read_into(queue):
    queue.put(read())


def test_a_forked_process_starts_its_own_and_leaves_its_parents_alone():
    first = read()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_into, args=(queue,))
    child.start()
    assert queue.get(timeout=60) != first
    child.join()
    assert read() == first


@pytest.mark.slow
def test_a_process_that_was_killed_is_replaced():
    first = read()
    os.kill(first, signal.SIGKILL)
    module._kept._process.wait()
    assert read() != first


def test_a_process_that_fails_says_why_and_is_dropped(monkeypatch):
    monkeypatch.setattr(module, "_CHILD", "/nowhere/child.py")
    with pytest.raises(CompileError, match="can't open file"):
        read()
    assert module._kept is None


def test_an_answer_that_was_not_waited_for_is_not_taken_for_the_next(monkeypatch):
    first, answer = read(), Compiler.answer

    def interrupted(self, number):
        monkeypatch.setattr(Compiler, "answer", answer)
        raise KeyboardInterrupt

    monkeypatch.setattr(Compiler, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read()
    assert read() != first


def test_answers_that_nobody_fetches_neither_fill_the_pipe_nor_stand_in_for_others():
    long = "x" * 4000
    order = {**an_order(), "name": long}
    for _ in range(3 * MOST_UNREAD):
        module.begin([order])
    begun = [module.begin([an_order()]) for _ in range(MOST_UNREAD + 4)]
    assert [answer()[0]["name"] for answer in begun] == ["add_one_kernel"] * len(begun)
    assert len(module._kept._answers) == 0


def an_order() -> dict:
    return {**_order(Request(add_one_kernel, {"x_ptr": "*fp32"}, {"BLOCK": 128})), "read": True}
