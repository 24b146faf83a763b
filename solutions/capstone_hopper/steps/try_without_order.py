"""A try beside step 11: nothing keeps ptxas from moving the wait for the output ahead of the softmax."""

from . import patch

BASE = "step11_persistent.py"
EDITS = (
    ("listed, settled\n", "listed\n"),
    ("        total = settled(total)  # or ptxas waits for the output before the softmax\n", ""),
)

patch.run(__file__, globals())
