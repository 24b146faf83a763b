"""Gluon kernels on a machine without a Hopper GPU: an emulator that makes everything go wrong that may.

:func:`launch` runs a kernel on the GPU on which its tensors are, and in the emulator where they are on the CPU.
:class:`emulated` chooses the order in which things happen there, and records what each program did.
"""

from __future__ import annotations

from utils.gluon.emulator import Emulator, Product
from utils.gluon.launch import Launch, emulated, launch
from utils.gluon.machine import Fault
