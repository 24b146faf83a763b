"""What a student's answer is held against: numbers, tensors, memory traffic, forbidden shortcuts, speed."""

import utils.runtime  # noqa: F401  (decides where kernels run, before anything here imports Triton)
