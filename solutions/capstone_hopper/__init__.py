"""FlashAttention for Hopper, written in Gluon: warps with different jobs, copies and products that run beside them.

Lab 3's kernels leave the schedule of a program to Triton's compiler. Here it is written out: a **producer** warp has
the TMA unit fill a ring of tiles in shared memory, **consumer** warpgroups multiply and exponentiate, and
barriers in shared memory (mbarriers) hand tiles to and fro.

The interface and its rules are lab 3's. :func:`flash_attention` takes these kernels where the hardware allows it and
lab 3's portable ones elsewhere; :func:`why_portable` says which, and why.
"""

from __future__ import annotations

from .attention import flash_attention, flash_attention_with_lse, why_portable
