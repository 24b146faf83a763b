"""Importing the runtime first: it decides, before Triton is imported, between the GPU and the interpreter."""

import utils.runtime  # noqa: F401
