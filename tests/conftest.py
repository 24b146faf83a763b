"""Importing the runtime first: it decides, before Triton is imported, whether kernels run on the GPU or in the interpreter."""

import utils.runtime  # noqa: F401
