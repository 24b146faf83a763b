"""The way from a textbook kernel to the package's own in eleven steps, one change a step, and three tries beside it.

Each step is one file: its kernel, and ``forward(q, k, v, causal) -> (o, lse)`` for contiguous (B, H, N, D) tensors in
float16 or bfloat16, D 64 or 128, N a multiple of 128. Steps 1 to 6 are plain Triton and run in the interpreter too;
from step 7 on they are written in Gluon, which needs a Hopper GPU to run, though none to be read or compiled. A try
holds its edits of step 11 (:mod:`.patch`).

::

    STEPS                       the eleven steps in order (STEPS[0].number == 1), each a Step:
        .number  .name          1..11, and a short name that is unique ("textbook", "ping-pong"): the key in the record
        .changes                one line: what changes against the step before
        .module                 dotted name of its module, which is imported when it is run
        .source                 text of its tile table and kernel, as in the file, without imports and launch
        .gluon                  whether it is written in Gluon
        .forward(q, k, v, causal) -> (o, lse)
    TRIES                       three more Steps (number 11) that change step 11: "lazy rescaling", "polynomial exp2",
                                "without order" (step 11 less one line: what ptxas does if nothing stops it)
    PACKAGE                     the package's own kernel as a Step: no further diff, only a rate to compare with
    step(3), step("ping-pong")  a Step by number or name (a Step passes through)
    difference(a, b)            unified diff of two steps' sources; a and b as for step()
    new_lines(a, b)             lines of code that b has and a has not (no blank lines, comments or docstrings)
    difference_html(a, b)       the same diff as HTML with inline styles, readable without colours too
    wall()                      what ptxas says to plain Triton's overlap, live on any computer in seconds: a Wall:
        .warning                its sentence on serialised products (C7513, C7514 or alike), "" if there was none
        .text                   its whole report;  .registers, .spilled (bytes)
        wall(overlap=False)     the same kernel with the softmax between the products: no warning
    trace.timeline(item)        intervals of one recorded trace: {"consumer 0": [Interval(what, tile, start, end), ...],
                                "consumer 1": [...], "producer": [...]}, in cycles from the first event; what is one of
                                "scores", "output" (products in flight), "softmax", "copy", "waiting"
    trace.record(name, q, k, v, causal)     such an item, measured now (needs a Hopper GPU)
    trace.busy(item)            share of the traced time, from first to last event, in which products, softmaxes or
                                copies of anyone were under way: {"products": 0.7, "softmax": 0.8, "copies": 0.9}

The record ``attention_steps`` (``utils.records.load("attention_steps").results``)::

    dtype     "bf16"
    steps     [{number, name, kind: "step" | "try" | "package", changes,
                kernels: [{head_dim, causal, registers, spilled_bytes, shared_bytes}]}]
    checks    [{name, head_dim, causal, largest_error, allowed, largest_lse_error}]    against float64
    points    [{batch, heads, seq_len, head_dim, causal, flops, calls_a_lap,
                timed: {name: {seconds, low, high, rounds, flops_per_second}},          names of steps, "cudnn", "flash"
                over_cudnn: {name: {ratio, ratio_low, ratio_high}}}]        above 1: quicker than cuDNN
    traces    [{name, batch, heads, seq_len, head_dim, causal, cost (time with clock reads / time without),
                program, events: {"consumer 0": {event: [cycles]}, ..., "producer": {...}}}]
              consumers' events: asked, keys_there, scores_issued, scores_there, softmax_done, output_issued,
              output_there; producer's: keys_issued, values_issued. Cycles from the first event, one a tile of keys.
"""

from __future__ import annotations

from . import trace
from .ladder import EVERYONE, PACKAGE, STEPS, TRIES, Step, difference, difference_html, new_lines, step
from .wall import Wall, wall
