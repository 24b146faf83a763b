"""The overlapped step: the host launches step n + 1 before it reads the tokens of step n (exercise 5.9, voluntary).

To schedule a step it is enough to know *that* a request gets a token. Which one it is matters only to the model, and
the model runs where the token is. So the host launches the step with a placeholder for each token that it has not read,
and the device puts the token there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.serving.virtual_device import VirtualDevice

from .request import Request, Status


def placeholder(row: int) -> int:
    """Stands for the token that the step before gave a row: -1 - row. Tokens are not negative."""
    return -1 - row


def look_up(tokens: Tensor, newest: Tensor) -> Tensor:
    """A step's tokens, with the token in the place of each :func:`placeholder`; it runs on the device.

    The host must not wait for it, so no number is read from either tensor, and no shape depends on their values.

    Args:
        tokens: (T,) int64, tokens and placeholders; it stays as it is.
        newest: (M,) int64, M at least the number of rows: at place r the token that the step before gave row r.

    Returns:
        (T,) int64.
    """
    raise NotImplementedError("Lab 5, exercise 5.9: look the placeholders up")


@dataclass(frozen=True)
class Flight:
    """A step that is launched and not read: the requests of its rows, in their order, and its number."""

    requests: tuple[Request, ...]
    step: int


def admit(waiting: deque[Request], running: list[Request], max_batch: int) -> None:
    """Move requests from the front of ``waiting`` to the end of ``running``, until ``max_batch`` run."""
    while waiting and len(running) < max_batch:
        running.append(waiting.popleft())
        running[-1].status = Status.RUNNING


def accept(request: Request, token: int, ends: Sequence[int], now: float) -> None:
    """Give a request its next token; it is finished after a token of ``ends``, or at its ``limit``."""
    request.append(token, now)
    if token in ends or len(request.tokens) >= request.limit:
        request.status, request.finished = Status.FINISHED, now


def serve_alternating(
    device: VirtualDevice, requests: Iterable[Request], max_batch: int, ends: Sequence[int] = ()
) -> None:
    """Serve requests, first come, first served; each step is read before the next one is launched.

    Args:
        device: runs the steps.
        requests: in the order of their arrival, all there from the beginning.
        max_batch: most requests in a step, at least 1.
        ends: tokens that end a text.
    """
    waiting, running = deque(requests), []
    while waiting or running:
        admit(waiting, running, max_batch)
        fresh = [request.tokens if not request.output else request.tokens[-1:] for request in running]
        step = device.launch([(request.id, tokens) for request, tokens in zip(running, fresh, strict=True)])
        for request, token in zip(running, device.read(step), strict=True):
            accept(request, token, ends, device.now)
        running = [request for request in running if request.status is not Status.FINISHED]


def serve_overlapped(
    device: VirtualDevice, requests: Iterable[Request], max_batch: int, ends: Sequence[int] = ()
) -> None:
    """As :func:`serve_alternating`, with the same texts; each step is launched before the one before it is read.

    A request whose last token by ``limit`` is in flight is in no further step. One that ends by a token of ``ends`` is
    in one more, because the host knows of the end one step late. What that step gives it is surplus, and is dropped.
    """
    waiting, running = deque(requests), []
    flight: Flight | None = None  # launched, and not read
    while waiting or running or flight:
        raise NotImplementedError("Lab 5, exercise 5.9: who takes part")
        raise NotImplementedError("Lab 5, exercise 5.9: launch, then read")
