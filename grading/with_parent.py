"""``python -m grading.with_parent PID MODULE ...``: run a module in a process that ends when its parent does.

From its first moment on: a module that loads PyTorch takes seconds before it could see to that itself.
"""

from __future__ import annotations

import runpy
import sys

from grading import die_with

if __name__ == "__main__":
    _, parent, *sys.argv = sys.argv
    die_with(int(parent))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
