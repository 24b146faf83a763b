"""A CUDA context lost to a kernel's illegal memory access: detected and reported.

After an illegal access every CUDA call of the process fails, whatever it does, until Python starts again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from utils import runtime
from utils.checks import core

RESTART = (
    "this Python process cannot use the GPU any more: restart the notebook's kernel (Kernel > Restart Kernel, in Colab "
    "Runtime > Restart session), then run the setup cell and the cells above this one again"
)


def is_lost() -> bool:
    """Whether this process had a GPU and cannot use it any more."""
    if not runtime.HAS_GPU:
        return False
    for _ in range(2):  # an error that is not final is told once
        try:
            torch.cuda.synchronize(runtime.DEVICE)
        except RuntimeError:
            continue
        return False
    return True


def fail_if_lost(exercise: core.Exercise) -> None:
    """Raise :class:`CheckFailed` where the GPU was lost before this check began."""
    if is_lost():
        cause = "an earlier kernel made an illegal memory access"
        core.fail(exercise, "the CUDA context was lost before this check began", [cause], RESTART)


@contextmanager
def explain_loss(exercise: core.Exercise, details: Sequence[str] = (), reproduce: str = "") -> Iterator[None]:
    """Turn an exception inside the block into a :class:`CheckFailed` that says to restart, if the GPU is lost."""
    try:
        yield
    except core.CheckFailed:
        raise
    except Exception as error:
        if not is_lost():
            raise
        said = (str(error) or type(error).__name__).splitlines()[0]
        text = core.message(exercise, f"CUDA context lost: {said}", details, RESTART, reproduce)
        raise core.CheckFailed(text) from error
