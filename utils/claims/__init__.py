"""Claims: every figure that the course states, held against what it should be in the cell that computes it.

``claim("roofline.ridge.h100", ridge(gpu("H100")), 295, unit="FLOP/B", tolerance=0.002, source="data sheet")`` asserts
the figure, shows one line in the notebook, and leaves a machine-readable copy in the cell's stored output. The ledger
(``notebooks/CLAIMS.md``) is built from those stored outputs, never from prose:

    python -m utils.claims            write notebooks/CLAIMS.md
    python -m utils.claims --check    fail when it is out of date, or sources and outputs disagree

A claim is about a value that is the same on every machine: a derived one, or a *recorded* measurement
(:mod:`utils.records`) held against its prediction. What this machine measures live is shown beside it, never claimed.
"""

from utils.claims.claim import KINDS, MIME, Claim, ClaimError, LedgerError, claim, keep_quiet
from utils.claims.ledger import ledger, problems
from utils.claims.page import page

keep_quiet()
