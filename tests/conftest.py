"""What every test starts from: the runtime's choice between GPU and interpreter, and one thread a process."""

import functools
import gc
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

import utils.runtime  # first: it decides before Triton is imported
from grading import sandbox
from utils.distributed import pool

import attention_entries  # isort: skip
import fake_stopwatch  # isort: skip
import torch  # isort: skip
import torch.distributed as dist  # isort: skip

# Nothing that is imported or collected is ever garbage: to look for some among millions of objects takes seconds.
gc.disable()
# What only compiles needs no names of source lines, which take the compiler a third of its time.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
# Ranks compute on one thread, and runs of one process that they must equal to the bit have to sum in the same order.
torch.set_num_threads(1)
# Tests of a worker that launch ranks lie minutes apart: the process that has imported PyTorch for ranks waits so long.
pool.IDLE_SECONDS = 900.0

#: Files that take longest, by their names after ``test_``: they come first, so that no worker is left alone with one;
#: those that wait for processes and browsers beside those that compute.
LONGEST = (
    *("site_pages", "student_copy", "distributed", "grading_check_lab", "jupyterlab", "lab3_compile"),
    *("answers_on_ranks", "notebooks", "distributed_faults", "lab6_shared_prefix", "predictions", "lab3_kernels"),
    "grading_formgrader",
    *("capstone", "lab_server", "lab6_flash", "lab6_prefill_decode", "site_ledger", "lab4_tensor_pipeline"),
    *("grading_resume", "grading_traps", "grading_guide", "lab3", "capstone_steps", "compile_only", "lab5_compile"),
    *("lab2_compile", "benchmarks_quantization", "benchmarks_tricks"),
)


#: Files whose tests are shared out exercise by exercise: one worker would be left alone with them.
BY_EXERCISE = ("test_exercises", "test_grading_scenarios")
#: The exercise that a test is for, as its parameters tell: a number, a place, or the name of a wrong answer.
NUMBER = re.compile(r"\[(\d\.\d+)\b")


class ByFileOrExercise(LoadFileScheduling):
    """One worker takes all tests of a file, or of an exercise in a file that is shared out by exercises."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        number = NUMBER.search(nodeid) if Path(file).stem in BY_EXERCISE else None
        return f"{file} {number[1]}" if number else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """What ``--dist loadfile`` means here."""
    return ByFileOrExercise(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first; the others as they were found. On a GPU, without what is about the interpreter.

    What is timed gets three attempts, since something else may take the processor meanwhile.
    """
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            if item.get_closest_marker("timed"):
                item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))
    if utils.runtime.HAS_GPU:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("interpreted")])
        items[:] = [item for item in items if not item.get_closest_marker("interpreted")]
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """From here on garbage is collected, but not looked for among what the tests of all files have imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Nor among what a file's tests leave behind in caches, once they are done."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@functools.cache
def chromium() -> str | None:
    """This machine's Chromium, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@functools.cache
def why_skipped() -> str:
    """Why tests of pages, or of the sandbox, are skipped here, and what to install: one line for all of them."""
    programs = {"chromium": chromium(), "bubblewrap": shutil.which("bwrap")}
    absent = [name for name, path in programs.items() if path is None]
    told = [f"{' and '.join(absent)} not found: apt install {' '.join(absent)}"] if absent else []
    if sandbox.available() and "bubblewrap" not in absent:
        told.append(sandbox.available())
    return "; ".join(told)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a program that is missing: all in one place and for one reason, which pytest prints once."""
    no_page = "browser" in item.fixturenames and not chromium()
    if no_page or (item.get_closest_marker("sandbox") and sandbox.available()):
        pytest.skip(why_skipped())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium of this machine."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture
def tuned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A copy of a lab's tuning table that believes it is on a GPU, in a session that interprets its kernels."""
    spec = importlib.util.find_spec(f"{request.module.PACKAGE}.tuning")
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(utils.runtime, "HAS_GPU", True)
    monkeypatch.setattr(utils.runtime, "INTERPRET", False)
    spec.loader.exec_module(copy)
    return copy


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone: what needs no second rank is tested without starting any."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of benchmarks without a GPU, one kernel of a known name for every call, and readings of a power meter."""
    from benchmarks import power, trace

    def kernels_of(calls: list[Callable[[], object]]) -> list[list[trace.Kernel]]:
        for call in calls:
            call()
        return [[trace.Kernel("gemm_128x256", 1e-5, (7, 1, 1))] for _ in calls]

    for stopwatch in ("utils.timing.cuda_stopwatch", "benchmarks.blocked_stream.stopwatch"):
        monkeypatch.setattr(stopwatch, fake_stopwatch.FakeStopwatch)
    monkeypatch.setattr(trace, "kernels_of", kernels_of)
    alone = functools.partial(power.alone, settle=0, seconds=0, start=lambda: lambda: fake_stopwatch.READINGS)
    monkeypatch.setattr(power, "alone", alone)


@pytest.fixture
def entry_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes the source of an entry of the leaderboard: the right one, with a part replaced or a text added."""

    def write(old: str = "", new: str = "", more: str = "", name: str = "mine.py") -> Path:
        assert old in attention_entries.RIGHT
        path = tmp_path / name
        path.write_text(attention_entries.RIGHT.replace(old, new) + more if old else attention_entries.RIGHT + more)
        return path

    return write


@pytest.fixture
def small_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leaderboard's cases are small ones."""
    monkeypatch.setattr("benchmarks.attention_entry.CASES", attention_entries.SMALL)
