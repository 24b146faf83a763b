"""What every test starts from: the runtime's choice between GPU and interpreter, and one thread a process."""

import utils.runtime  # noqa: F401  (first: it decides before Triton is imported)

import torch  # isort: skip

# Ranks compute on one thread, and runs of one process that they must equal to the bit have to sum in the same order.
torch.set_num_threads(1)
