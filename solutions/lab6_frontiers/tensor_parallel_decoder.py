"""The decoder of :mod:`utils.serving` cut over the ranks of a group, for a runner that computes its steps.

Letters: T tokens, R rows of logits, N ranks, C hidden size, H query heads, G key and value heads, D head dimension.

Each rank has H / N query heads with the G / N key and value heads that they read, and 1 / N of the MLP's width. The
matrices of queries, keys, values, gates and ups are cut by columns, those of the two outputs by rows (lab 4; Shoeybi et
al. 2019, section 3), so a layer calls two all-reduces of T C elements. A rank's cache holds the keys and values of its
own heads.

Norms, embedding and head stay whole on every rank. So every rank has all logits, and nothing but the layers' sums is
sent. What that costs: a rank holds and reads the whole head, which with many ranks and a large vocabulary becomes the
larger part of a step. There the head is cut too, at an all-gather of the logits a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from solutions.lab4_zero.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from solutions.lab5_serving.cuda_graphs import Compute, CudaRecorder, StepGraphs
from solutions.lab5_serving.fused_decoder import FusedDecoder, Layer
from solutions.lab5_serving.runner import ModelRunner
from utils.serving import Decoder, ModelConfig


def share_of(config: ModelConfig, ranks: int) -> ModelConfig:
    """The sizes of one rank's part of a decoder: its ``parameters`` and ``kv_bytes_per_token`` are the rank's.

    Raises:
        ValueError: ``ranks`` does not divide the query heads, the key and value heads, or the width of the MLP.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    names = ("num_heads", "num_kv_heads", "intermediate_size")
    odd = [f"{name} = {getattr(config, name)}" for name in names if getattr(config, name) % ranks]
    if odd:
        raise ValueError(
            f"{ranks} ranks need a multiple of {ranks} of each of {', '.join(names)}, got {', '.join(odd)}"
        )
    return replace(config, **{name: getattr(config, name) // ranks for name in names})


class TensorParallelDecoder(Decoder):
    """This rank's part of a decoder; ``hidden`` and ``logits`` are those of the whole, the same on all ranks.

    Args:
        model: the whole, with the same weights on all ranks. It is not changed. What is cut is copied; embedding, head
            and norms are shared with it.
        group: the ranks that share it, by default all.

    Attributes:
        config: of this rank's part (:func:`share_of`).
        group: the ranks.

    Raises:
        ValueError: as :func:`share_of`.
    """

    def __init__(self, model: Decoder, group: ProcessGroup | None = None) -> None:
        with torch.device("meta"):
            super().__init__(share_of(model.config, dist.get_world_size(group)))
        self.group = group
        self.embed_tokens, self.norm, self.lm_head = model.embed_tokens, model.norm, model.lm_head
        self.frequencies = model.frequencies
        for mine, whole in zip(self.layers, model.layers, strict=True):
            self._cut(mine, whole)
        self.train(model.training)

    def _cut(self, mine: nn.Module, whole: nn.Module) -> None:
        """Give a layer its part of the whole one."""
        mine.input_layernorm, mine.post_attention_layernorm = whole.input_layernorm, whole.post_attention_layernorm
        group, head_dim = self.group, self.config.head_dim
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(whole.self_attn, name)
            setattr(mine.self_attn, name, ColumnParallelLinear.from_linear(linear, group, unit=head_dim))
        mine.self_attn.o_proj = RowParallelLinear.from_linear(whole.self_attn.o_proj, group, unit=head_dim)
        if self.config.qk_norm:  # every head's norm is the same
            mine.self_attn.q_norm, mine.self_attn.k_norm = whole.self_attn.q_norm, whole.self_attn.k_norm
        for name in ("gate_proj", "up_proj"):
            setattr(mine.mlp, name, ColumnParallelLinear.from_linear(getattr(whole.mlp, name), group))
        mine.mlp.down_proj = RowParallelLinear.from_linear(whole.mlp.down_proj, group)


def shard(model: Decoder, group: ProcessGroup | None = None) -> TensorParallelDecoder:
    """This rank's part of a loaded decoder; one that is cut already is returned as it is.

    The whole's layers are freed with the whole: ``model = shard(load_model(folder))``.

    Raises:
        ValueError: as :func:`share_of`, or a model that is cut over another group.
    """
    if not isinstance(model, TensorParallelDecoder):
        return TensorParallelDecoder(model, group)
    if group is not None and group is not model.group:
        raise ValueError("the model is cut over another group of ranks already")
    return model


class TensorParallelFusedDecoder(FusedDecoder):
    """Lab 5's fused decoder over one rank's weights.

    Two all-reduces a layer of T C elements, but the last layer's second has only the R rows whose logits are wanted.

    Args:
        model: this rank's part.
        positions: as for :class:`FusedDecoder`.
    """

    def __init__(self, model: TensorParallelDecoder, positions: int) -> None:
        self._group, self._adds_biases = model.group, dist.get_rank(model.group) == 0
        super().__init__(model, positions)

    def _layer(self, layer: nn.Module) -> Layer:
        joined = super()._layer(layer)
        # A bias of the output is added before the sum over the ranks here, so by one of them.
        return joined if self._adds_biases else replace(joined, output_bias=None, down_bias=None)

    def _normed(self, stream: Tensor, added: Tensor | None, weight: Tensor) -> Tensor:
        if added is not None:  # this rank's summand of what attention or the MLP adds
            dist.all_reduce(added, group=self._group)
        return super()._normed(stream, added, weight)


class RankRecorder(CudaRecorder):
    """Records functions that call NCCL as CUDA graphs; all ranks record the same ones in the same order.

    Only this thread is held to what a recording allows: NCCL's watchdog, another thread, asks for its events meanwhile.
    """

    def __call__(self, compute: Compute) -> Compute:
        """Run ``compute`` once, on all ranks, so that NCCL has its connections; then record it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class TensorParallelRunner(ModelRunner):
    """Lab 5's runner of one rank's part of a model; all ranks run the same steps.

    Args:
        model: this rank's part.
        num_blocks, block_size, attention: as for :class:`ModelRunner`; the blocks hold this rank's heads.
        fused: run :class:`TensorParallelFusedDecoder`; None: on a GPU.
        cuda_graphs: as for :class:`ModelRunner`, but off by default. On GPUs the graphs record NCCL's all-reduces too
            (:class:`RankRecorder`): a decode step is then launched at once instead of kernel by kernel.
        options: the other arguments of :class:`ModelRunner`.

    Raises:
        TypeError: a model that is not cut.
        ValueError: as :class:`ModelRunner`.
    """

    def __init__(
        self,
        model: TensorParallelDecoder,
        num_blocks: int,
        block_size: int = 16,
        *,
        fused: bool | None = None,
        cuda_graphs: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(model, TensorParallelDecoder):
            raise TypeError(f"the runner takes what shard(model, group) returns, got a {type(model).__name__}")
        super().__init__(model, num_blocks, block_size, fused=False, cuda_graphs=cuda_graphs, **options)
        if model.device.type == "cuda" if fused is None else fused:
            self._fused = TensorParallelFusedDecoder(model, min(model.config.max_seq_len, num_blocks * block_size))
        if self.graphs is not None and model.device.type == "cuda":
            self.graphs = StepGraphs(self.compute, self._staging, RankRecorder(), self.graphs.chunks)
