"""What ranks send one another by the ring algorithms: elements of a training step, bytes of a step of serving.

A ring reduce-scatter and a ring all-gather of n elements each send n (N - 1) / N elements from every rank; an
all-reduce is one after the other (Patarasuk and Yuan 2009). For many ranks that is n, n and 2 n.
"""

from __future__ import annotations

from utils.gpt import GPTConfig
from utils.operators import require_sizes
from utils.transformer_math.memory import check_stage


def ring_volume(kind: str, elements: float, world_size: int) -> float:
    """Elements that each rank sends, on average, in a ring collective of a full tensor of ``elements``.

    Args:
        kind: ``"all_reduce"``, ``"reduce_scatter"`` or ``"all_gather"``.

    Raises:
        ValueError: another kind.
    """
    rounds = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    if kind not in rounds:
        raise ValueError(f"kind must be one of {', '.join(rounds)}, got {kind!r}")
    require_sizes(world_size=world_size)
    return rounds[kind] * elements * (world_size - 1) / world_size


def ring_seconds(kind: str, size_bytes: float, world_size: int, bandwidth: float, latency: float = 0.0) -> float:
    """Seconds of a ring collective: (N - 1) steps, twice for an all-reduce, each a latency and a chunk's transfer.

    Args:
        size_bytes: of the full tensor.
        bandwidth: bytes/s that a rank sends (while it receives as much).
        latency: seconds that a step takes however small its message.
    """
    steps = (2 if kind == "all_reduce" else 1) * (world_size - 1)
    return ring_volume(kind, size_bytes, world_size) / bandwidth + steps * latency


def two_level_seconds(kind: str, size_bytes: float, machines: int, gpus: int, inside: float, network: float) -> float:
    """Seconds of a collective in two levels, one after the other: inside of each machine, and over the network.

    Inside, a machine's GPUs leave each other an equal part of the tensor (reduce-scatter) or collect it (all-gather);
    over the network, each GPU exchanges its part with those that have the same place in the other machines (a *rail*),
    over a card of its own. So a card carries ``1 / gpus`` of what it would in one ring through all GPUs.

    Args:
        kind: ``"all_reduce"``, ``"reduce_scatter"`` or ``"all_gather"``.
        size_bytes: of the full tensor.
        machines, gpus: how many machines, and how many GPUs with a card each in one.
        inside: bytes/s that a GPU sends to others of its machine.
        network: bytes/s that a card sends.

    Raises:
        ValueError: another kind.
    """
    within = ring_volume(kind, size_bytes, gpus) / inside
    return within + ring_volume(kind, size_bytes / gpus, machines) / network


def communication_volume(parameters: int, world_size: int, stage: int) -> dict[str, float]:
    """Elements that each rank sends in a step of data-parallel training, by the kind of collective.

    Stage 0 all-reduces the gradients. Stages 1 and 2 reduce-scatter them and all-gather the updated parameters, which
    is as much. Stage 3 all-gathers the parameters before the forward and again before the backward pass, and
    reduce-scatters the gradients: half as much again (Rajbhandari et al. 2020, section 7).

    Returns:
        ``all_reduce`` or ``reduce_scatter`` and ``all_gather``: 2, 2, 2 and 3 Psi (N - 1) / N in sum.
    """
    require_sizes(parameters=parameters, world_size=world_size)
    check_stage(stage)
    if stage == 0:
        return {"all_reduce": ring_volume("all_reduce", parameters, world_size)}
    gathers = 2 if stage == 3 else 1
    return {
        "reduce_scatter": ring_volume("reduce_scatter", parameters, world_size),
        "all_gather": gathers * ring_volume("all_gather", parameters, world_size),
    }


def tensor_parallel_volume(config: GPTConfig, batch: int, seq_len: int | None = None, *, tensor: int) -> float:
    """Elements that each rank sends for the blocks of a tensor-parallel model in one forward and backward pass.

    Each block all-reduces an activation (B, N, C) four times: after attention and after the MLP in the forward pass,
    and before each of them in the backward pass (Shoeybi et al. 2019, section 3).
    """
    n = config.context if seq_len is None else seq_len
    require_sizes(batch=batch, seq_len=n, tensor=tensor)
    return 4 * config.layers * ring_volume("all_reduce", batch * n * config.hidden, tensor)


def tensor_parallel_step_bytes(tokens: int, ranks: int, hidden: int, layers: int, *, element_size: int = 2) -> float:
    """Bytes that each rank sends in one step of a served model whose layers are cut over the ranks.

    There is no backward pass, so each layer all-reduces two activations (T, C), one after attention and one after the
    MLP. A ring sends 2 (N - 1) / N of each: 2 L T C e * 2 (N - 1) / N bytes. With ``tokens=1`` these are the bytes per
    token. Embedding and head are whole on every rank and send nothing.

    Args:
        tokens: T that go through the model in the step: a decode step has one for each sequence.
        ranks: N.
        hidden: C.
        layers: L.
        element_size: e, bytes of an element.

    Raises:
        TypeError, ValueError: sizes that are not positive integers.
    """
    require_sizes(tokens=tokens, ranks=ranks, hidden=hidden, layers=layers, element_size=element_size)
    return 2 * layers * ring_volume("all_reduce", tokens * hidden * element_size, ranks)


def tensor_parallel_step_seconds(
    tokens: int, ranks: int, hidden: int, layers: int, bandwidth: float, latency: float = 0.0, *, element_size: int = 2
) -> float:
    """Seconds of those all-reduces, 2 L :func:`ring_seconds` one after another: each layer waits for the one before.

    With few tokens the latencies are most of it, 2 L * 2 (N - 1) of them, and more ranks make that longer.

    Args:
        tokens, ranks, hidden, layers, element_size: as for :func:`tensor_parallel_step_bytes`, with its errors.
        bandwidth: bytes/s that a rank sends.
        latency: seconds that a step of a ring takes however small its message.
    """
    require_sizes(tokens=tokens, ranks=ranks, hidden=hidden, layers=layers, element_size=element_size)
    return 2 * layers * ring_seconds("all_reduce", tokens * hidden * element_size, ranks, bandwidth, latency)


def pipeline_volume(config: GPTConfig, batch: int, seq_len: int | None = None, *, virtual: int = 1) -> int:
    """Elements that a middle stage sends in one forward and backward pass: an activation on, its gradient back.

    Args:
        virtual: chunks of layers a rank holds; each sends both.
    """
    n = config.context if seq_len is None else seq_len
    require_sizes(batch=batch, seq_len=n, virtual=virtual)
    return 2 * virtual * batch * n * config.hidden


def tokens_to_hide(peak_flops: float, bandwidth: float, *, volume: float = 3.0, element_size: int = 2) -> float:
    """Tokens a rank must work on in a step before arithmetic takes as long as communication, for any model.

    A step computes 6 Psi T FLOPs on T tokens and sends ``volume`` Psi elements, so Psi cancels:
    T = volume * element_size * peak / (6 * bandwidth). With 3 Psi elements of 2 bytes it is peak / bandwidth.

    Args:
        peak_flops: FLOP/s that the rank reaches.
        bandwidth: bytes/s that it sends.
        volume: elements sent for each parameter: 2 for DDP and ZeRO-1 and 2, 3 for ZeRO-3, 1 for what ZeRO-3 adds.
    """
    if not (peak_flops > 0 and bandwidth > 0):
        raise ValueError(f"peak_flops and bandwidth must be positive, got {peak_flops} and {bandwidth}")
    return volume * element_size * peak_flops / (6 * bandwidth)
