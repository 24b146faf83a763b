"""What every test starts from: the runtime's choice between GPU and interpreter, and one thread a process."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

import utils.runtime  # noqa: F401  (first: it decides before Triton is imported)

import torch  # isort: skip

# What only compiles needs no names of source lines, which take the compiler a third of its time.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
# Ranks compute on one thread, and runs of one process that they must equal to the bit have to sum in the same order.
torch.set_num_threads(1)


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
        running = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()
