"""Tiles of an output matrix and the waves in which a GPU's SMs work them off (exercise 1.8)."""

from utils.operators import require_sizes


def num_tiles(m: int, n: int, tile_m: int, tile_n: int) -> int:
    """Tiles of (tile_m, tile_n) that cover an (m, n) output; a tile at the border may stick out.

    Raises:
        ValueError: a size is below 1.
    """
    require_sizes(m=m, n=n, tile_m=tile_m, tile_n=tile_n)
    raise NotImplementedError("Lab 1, exercise 1.8: tiles of an output")


def num_waves(tiles: int, sms: int) -> int:
    """Waves in which ``sms`` SMs, one tile each at a time and all equally fast, work off ``tiles`` tiles.

    Raises:
        ValueError: an argument is below 1.
    """
    require_sizes(tiles=tiles, sms=sms)
    raise NotImplementedError("Lab 1, exercise 1.8: waves")


def last_wave_utilisation(tiles: int, sms: int) -> float:
    """The share of the SMs that have a tile in the last wave: above 0, and 1 when the last wave is full.

    Raises:
        ValueError: an argument is below 1.
    """
    require_sizes(tiles=tiles, sms=sms)
    raise NotImplementedError("Lab 1, exercise 1.8: utilisation of the last wave")


def tiled_matmul_seconds(m: int, k: int, n: int, tile_m: int, tile_n: int, sms: int, peak_flops: float) -> float:
    """Seconds that (m, k) @ (k, n) takes when arithmetic limits: each SM computes whole tiles, one after another.

    Args:
        m: rows of the output.
        k: length of the dot products.
        n: columns of the output.
        tile_m: rows of a tile.
        tile_n: columns of a tile. A tile that sticks out takes as long as any other.
        sms: SMs of the GPU, each with an equal part of the peak rate.
        peak_flops: peak rate of the whole GPU in FLOP/s.

    Raises:
        ValueError: a size is below 1, or the rate is not above zero.
    """
    require_sizes(m=m, k=k, n=n, tile_m=tile_m, tile_n=tile_n, sms=sms)
    if not peak_flops > 0:
        raise ValueError(f"peak_flops must be above zero, got {peak_flops}")
    raise NotImplementedError("Lab 1, exercise 1.8: time in whole waves")
