"""Triton's interpreter: repaired where it is silently wrong, and observable.

The only package of the course that touches Triton's private interpreter classes. It works on Triton 3.6, 3.7 and 3.9.

``utils.runtime`` imports this package, which repairs, the moment Triton has been imported; nobody else needs to.
:func:`observe` is what ``utils.kernel_profile`` is built on, and :func:`twins` lets it work in a GPU session.
"""

from __future__ import annotations

from utils import device  # first of all: it decides between GPU and interpreter, before Triton is imported
from utils.interpreter.observation import Access, Argument, Launch, Observer, in_launch, observe
from utils.interpreter.repairs import repair, repairs
from utils.interpreter.twin import Tuning, configuration, twins

__all__ = [
    "Access",
    "Argument",
    "Launch",
    "Observer",
    "Tuning",
    "configuration",
    "in_launch",
    "observe",
    "repair",
    "repairs",
    "twins",
]

if device.INTERPRET:
    repair()
