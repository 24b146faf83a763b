"""Checks of exercise 1.8: tiles, waves, the last wave's utilisation, and time in whole waves."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from random import Random

from utils.checks.forms import Rate
from utils.checks.question import Case, Mistake, Question

from .rules import LARGE, ONE, asking

RAGGED, WHOLE = "a size that the tile does not divide", "sizes that the tile divides"
FULL, PARTIAL = "a last wave that is full", "a last wave that is not full"
SMALL = 20_000


def covering_tiles(m: int, n: int, tile_m: int, tile_n: int) -> int:
    """Tiles counted by laying them: step over the output, a tile at a time."""
    if (m // tile_m + 1) * (n // tile_n + 1) <= SMALL:
        return sum(1 for _ in range(0, m, tile_m) for _ in range(0, n, tile_n))
    return (m + tile_m - 1) // tile_m * ((n + tile_n - 1) // tile_n)


def wave_sizes(tiles: int, sms: int) -> tuple[int, int]:
    """The number of waves and the tiles of the last one, by handing out tiles until none is left."""
    if tiles > SMALL:
        return (tiles - 1) // sms + 1, (tiles - 1) % sms + 1
    waves = last = 0
    while tiles:
        last = min(tiles, sms)
        tiles -= last
        waves += 1
    return waves, last


def tiled_matmul_seconds(m: int, k: int, n: int, tile_m: int, tile_n: int, sms: int, peak_flops: float) -> float:
    """When the last SM is done: tiles handed out one at a time, each to the SM that is free first."""
    busy = [0] * sms  # in tiles
    tiles = covering_tiles(m, n, tile_m, tile_n)
    for tile in range(tiles):
        busy[tile % sms] += 1  # equal tiles: SMs become free in the order in which they started
    return max(busy) * 2 * tile_m * tile_n * k * sms / peak_flops


def _tile_cases(rng: Random) -> list[Case]:
    cases = []
    for tag in 3 * (RAGGED, WHOLE):
        tile_m, tile_n = rng.sample((16, 32, 64, 128, 256), 2)
        m, n = tile_m * rng.randint(2, 20), tile_n * rng.randint(2, 20)
        if tag == RAGGED:
            m, n = m + rng.randint(1, tile_m - 1), n + rng.randint(1, tile_n - 1)
        cases.append(Case({"m": m, "n": n, "tile_m": tile_m, "tile_n": tile_n}, tag))
    cases.append(Case({"m": 1, "n": 1, "tile_m": 128, "tile_n": 256}, ONE))
    cases.append(Case({"m": 2**56 + 1, "n": 2**33 + 3, "tile_m": 128, "tile_n": 64}, LARGE))
    return cases


def _wave_cases(rng: Random) -> list[Case]:
    cases = []
    for tag in 3 * (PARTIAL, FULL):
        sms = rng.randint(12, 160)
        tiles = sms * rng.randint(1, 9) + (rng.randint(1, sms - 1) if tag == PARTIAL else 0)
        cases.append(Case({"tiles": tiles, "sms": sms}, tag))
    cases.append(Case({"tiles": rng.randint(1, 11), "sms": rng.randint(12, 160)}, "fewer tiles than SMs"))
    cases.append(Case({"tiles": 1, "sms": 1}, ONE))
    cases.append(Case({"tiles": 2**60 + 1, "sms": 64}, LARGE))
    return cases


def _time_cases(rng: Random) -> list[Case]:
    cases = []
    for tag in 4 * (RAGGED, WHOLE):
        tile_m, tile_n = rng.sample((64, 128, 192, 256), 2)
        m, n = tile_m * rng.randint(2, 24), tile_n * rng.randint(2, 24)
        if tag == RAGGED:
            m, n = m + rng.randint(1, tile_m - 1), n + rng.randint(1, tile_n - 1)
        sizes = {"m": m, "k": rng.randint(100, 9000), "n": n, "tile_m": tile_m, "tile_n": tile_n}
        cases.append(Case(sizes | {"sms": rng.randint(12, 160), "peak_flops": rng.randint(20, 2000) * 1e12}, tag))
    sizes = {"m": rng.randint(1, 63), "k": rng.randint(100, 9000), "n": rng.randint(1, 63), "tile_m": 128, "tile_n": 64}
    cases.append(Case(sizes | {"sms": 132, "peak_flops": 1e15}, "a matrix smaller than a tile"))
    return cases


TILES = Question(
    "num_tiles",
    _tile_cases,
    covering_tiles,
    (
        Mistake(
            "the tiles at the border are left out: round up",
            lambda m, n, tile_m, tile_n: (m // tile_m) * (n // tile_n),
            1,
        ),
        Mistake(
            "the area is divided: a tile cannot be cut up to fill gaps elsewhere, so round up in each direction",
            lambda m, n, tile_m, tile_n: -(-m * n // (tile_m * tile_n)),
            2,
        ),
        Mistake(
            "one tile is always added: an exact division needs none",
            lambda m, n, tile_m, tile_n: (m // tile_m + 1) * (n // tile_n + 1),
            1,
        ),
        Mistake(
            "the tile is turned: tile_m goes with m", lambda m, n, tile_m, tile_n: -(-m // tile_n) * -(-n // tile_m), 2
        ),
        Mistake("the tiles of one direction only are counted", lambda m, n, tile_m, tile_n: -(-m // tile_m), 2),
        Mistake(
            "a float is rounded up: m / tile_m loses ones above 2**53, use integers",
            lambda m, n, tile_m, tile_n: ceil(m / tile_m) * ceil(n / tile_n),
            1,
        ),
    ),
    refused={"m": -3, "n": -5, "tile_m": -64, "tile_n": -32},
)
WAVES = Question(
    "num_waves",
    _wave_cases,
    lambda tiles, sms: wave_sizes(tiles, sms)[0],
    (
        Mistake("the last, partial wave is left out: round up", lambda tiles, sms: tiles // sms, 3),
        Mistake("one wave is always added: a full last wave needs none", lambda tiles, sms: tiles // sms + 1, 3),
        Mistake(
            "a float is rounded up: tiles / sms loses ones above 2**53, use integers",
            lambda tiles, sms: ceil(tiles / sms),
            1,
        ),
        Mistake(
            "waves are rounded to the nearest: a wave with one tile takes as long as a full one",
            lambda tiles, sms: round(tiles / sms),
            3,
        ),
    ),
    refused={"tiles": -3, "sms": -8},
)
UTILISATION = Question(
    "last_wave_utilisation",
    _wave_cases,
    lambda tiles, sms: wave_sizes(tiles, sms)[1] / sms,
    (
        Mistake(
            "a full last wave gives 0: tiles % sms is 0 there, and the utilisation 1",
            lambda tiles, sms: tiles % sms / sms,
            4,
        ),
        Mistake(
            "the mean over all waves is taken, not the last one", lambda tiles, sms: tiles / (-(-tiles // sms) * sms), 4
        ),
        Mistake(
            "the idle share is returned, not the busy one", lambda tiles, sms: 1 - wave_sizes(tiles, sms)[1] / sms, 4
        ),
        Mistake("the idle share is returned, not the busy one", lambda tiles, sms: (sms - tiles % sms) / sms, 4),
        Mistake(
            "the tiles of the last wave are returned: divide by the SMs",
            lambda tiles, sms: wave_sizes(tiles, sms)[1],
            4,
        ),
        Mistake("all tiles are divided by the SMs", lambda tiles, sms: tiles / sms, 4),
    ),
    form=Rate(),
    refused={"tiles": -3, "sms": -8},
)


def _seconds(waves: Callable[[int, int], float]) -> Callable[..., float]:
    def computes(m, k, n, tile_m, tile_n, sms, peak_flops):
        turns = waves(covering_tiles(m, n, tile_m, tile_n), sms)
        return turns * 2 * tile_m * tile_n * k / (peak_flops / sms)

    return computes


TIME = Question(
    "tiled_matmul_seconds",
    _time_cases,
    tiled_matmul_seconds,
    (
        Mistake(
            "waves are not rounded: an SM cannot help another with its last tile",
            _seconds(lambda tiles, sms: tiles / sms),
            5,
        ),
        Mistake(
            "only the useful FLOPs are timed: SMs compute whole tiles in whole waves",
            lambda m, k, n, tile_m, tile_n, sms, peak_flops: 2 * m * k * n / peak_flops,
            5,
        ),
        Mistake(
            "one SM is given the whole GPU's rate: it has 1/sms of it",
            lambda **a: tiled_matmul_seconds(**a) / a["sms"],
            6,
        ),
        Mistake("a multiply-add is counted as one operation", lambda **a: tiled_matmul_seconds(**a) / 2, 6),
        Mistake("the tiles are worked off one after another on one SM", _seconds(lambda tiles, sms: tiles), 6),
        Mistake("the last, partial wave is left out", _seconds(lambda tiles, sms: tiles // sms), 5),
        Mistake(
            "k is left out: a tile's outputs are dot products of length k",
            lambda **a: tiled_matmul_seconds(**a) / a["k"],
            6,
        ),
        Mistake("one wave is always added", _seconds(lambda tiles, sms: tiles // sms + 1), 5),
    ),
    form=Rate(),
    refused={"m": -3, "k": -7, "n": -5, "tile_m": -64, "tile_n": -32, "sms": -8, "peak_flops": -2.0},
)


TILES_AND_WAVES = asking(
    "1.8",
    "tiles and waves",
    10,
    (TILES, WAVES, UTILISATION, TIME),
    check="check_waves",
    says="tiles of an output, waves, the last wave's utilisation, and time in whole waves.",
    notice="one row of tiles too many can cost a whole wave: time is a staircase in the size",
)
check_waves = TILES_AND_WAVES.check
