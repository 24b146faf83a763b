"""Triton's interpreter: repaired where it is silently wrong, and observable.

What the course replaces in Triton stands in one table, ``patches.POINTS``: each point with its reason, the issue or
change of Triton that is about it, and the version from which it is not needed. What takes its place is in ``patches``
where Triton is wrong, in ``speed`` where it is slow, and in ``observation`` and ``launching`` where the course adds
something.

The only package of the course that touches Triton's private interpreter classes, imported in ``upstream``. It works on
Triton 3.6 to 3.9.

``utils.runtime`` imports this package, which applies its patches, as soon as Triton has been imported.
:func:`observe` is what ``utils.kernel_profile`` is built on; :func:`interpret_launches` makes it work in a GPU session.
"""

from __future__ import annotations

from utils import device  # first of all: it decides between GPU and interpreter, before Triton is imported
from utils.interpreter.interpreted_kernel import Tuning, configuration, interpret_launches
from utils.interpreter.launching import last_programs
from utils.interpreter.observation import Access, Argument, Launch, Observer, TimeIsUp, in_launch, observe
from utils.interpreter.patches import apply_patches, patches
from utils.interpreter.wrapped import accept_interpreted_kernels

if device.INTERPRET:
    apply_patches()
    accept_interpreted_kernels()
