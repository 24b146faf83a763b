"""Small steps as CUDA graphs: a step's kernels are recorded once for each size and then launched all together.

A decode step of a small model is some 250 kernels of a few microseconds each, and Python needs longer to launch one
than the GPU to run it. A graph launches them in one call, but with the addresses and sizes that it was recorded with.
So inputs are copied to a fixed place, and a step of S sequences runs in the graph of the next larger *bucket*, its
remaining rows padded: they read nothing, write nothing, and nobody looks at their logits.

Other steps have more tokens than sequences: a few each where drafts are verified, or one each and a prompt where a
request has joined. They are recorded with room for as many tokens per sequence as ``chunks`` says, and a step runs in
the smallest of them that holds its tokens, however they are spread: where a sequence's tokens begin is an input too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .batch import Batch, Layout, Staging

#: Sequences of the smallest buckets; from the last one on, buckets are ``STEP`` apart.
SMALL_BUCKETS, STEP = (1, 2, 4, 8, 16, 32, 48, 64), 32

Compute = Callable[[], Tensor]


def bucket(sequences: int) -> int:
    """Sequences of the smallest graph that holds so many.

    Raises:
        ValueError: fewer than 1.
    """
    if sequences < 1:
        raise ValueError(f"a decode step has at least 1 sequence, got {sequences}")
    for size in SMALL_BUCKETS:
        if sequences <= size:
            return size
    return -(-sequences // STEP) * STEP


def buckets(most: int) -> list[int]:
    """Every bucket that steps of 1 to ``most`` sequences use, the largest first."""
    return sorted({bucket(sequences) for sequences in range(1, most + 1)}, reverse=True)


@dataclass(frozen=True)
class Graph:
    """One recorded step: where its inputs lie, and what computes its logits from them."""

    layout: Layout
    inputs: Tensor
    replay: Compute


class StepGraphs:
    """Runs small steps, each in the graph of its bucket, which is recorded when it is first needed.

    Args:
        compute: logits (R, V) of a batch; launches nothing that depends on the values in it.
        staging: brings batches to the device.
        record: makes of a function without arguments one that does the same again; :class:`CudaRecorder` on a GPU.
            By default the function itself, so that padding and buckets are the same on a CPU.
        chunks: tokens per sequence that the larger graphs have room for; without any only decode steps have graphs.
    """

    def __init__(
        self,
        compute: Callable[[Batch], Tensor],
        staging: Staging,
        record: Callable[[Compute], Compute] = lambda compute: compute,
        chunks: Sequence[int] = (),
    ) -> None:
        self._compute, self._staging, self._record = compute, staging, record
        self.chunks = sorted(chunks)
        self._graphs: dict[tuple[int, int, int], Graph] = {}

    @property
    def recorded(self) -> list[tuple[int, int, int]]:
        """(sequences, tokens per sequence, columns of block tables) of the graphs that there are."""
        return sorted(self._graphs)

    def prepare(self, sequences: int, tokens: int, width: int) -> Graph:
        """The graph of a bucket, so many tokens per sequence and a table width, recorded now if it was not."""
        key = (sequences, tokens, width)
        if key not in self._graphs:
            layout = Layout.of_step(sequences, sequences * tokens, width)
            inputs = torch.zeros(layout.size, dtype=torch.int32, device=self._staging.device)
            inputs[layout.places["slots"]] = -1  # recording runs the step too: it must not write
            batch = layout.unpack(inputs, decode=tokens == 1)
            self._graphs[key] = Graph(layout, inputs, self._record(lambda: self._compute(batch)))
        return self._graphs[key]

    def run(self, arrays: Mapping[str, np.ndarray], decode: bool) -> Tensor | None:
        """Logits (R, V) of a step, valid until the next one: the graph writes them to the same place again.

        Args:
            arrays, decode: of the batch, as :func:`.batch.assemble` makes them.

        Returns:
            None if the step is larger than graphs are.
        """
        sequences, width = arrays["block_tables"].shape
        wanted = len(arrays["tokens"]) / bucket(sequences)
        fits = [1] if decode else [tokens for tokens in self.chunks if wanted <= tokens]
        if not fits:
            return None
        graph = self.prepare(bucket(sequences), fits[0], width)
        self._staging.send(arrays, graph.layout, graph.inputs)
        return graph.replay()[: len(arrays["rows"])]


class CudaRecorder:
    """Records functions as CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, compute: Compute) -> Compute:
        """Run ``compute`` once, so that kernels are compiled and libraries loaded, then record it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            logits = compute()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
