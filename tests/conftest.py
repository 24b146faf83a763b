"""What every test starts from: the runtime's choice between GPU and interpreter, and one thread a process."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

import utils.runtime  # noqa: F401  (first: it decides before Triton is imported)

import torch  # isort: skip

# Ranks compute on one thread, and runs of one process that they must equal to the bit have to sum in the same order.
torch.set_num_threads(1)


#: Files that take longest, from some four minutes down to half of one. They begin first, whatever the number of their
#: tests, so that no worker is left with one of them at the end while the others have nothing to do.
LONGEST = (
    "test_lab3", "test_site_pages", "test_grading_resume", "test_lab2", "test_lab4_answers", "test_grading_guide",
    "test_grading_class", "test_grading_traps", "test_lab4_tensor_pipeline", "test_lab4_data_parallel",
    "test_distributed", "test_lab4_fully_sharded", "test_site_explorers_pages", "test_distributed_faults",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; ``--no-loadscope-reorder`` keeps the order when workers take files in turn."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def chromium() -> str | None:
    """This machine's Chromium, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium of this machine."""
    executable = chromium()
    if executable is None:
        pytest.skip("no Chromium on this machine (chromium, chromium-browser or google-chrome)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield running
        running.close()
