"""Checks of exercise 1.7: the sectors that a warp's addresses touch, and the useful share of what moves."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from random import Random

from utils.checks.forms import Rate
from utils.checks.question import Case, Mistake, Question

from .rules import asking

SECTOR = 32
ALIGNED, MISALIGNED, STRIDED, WIDE = (
    "neighbours, aligned",
    "a misaligned base",
    "a stride",
    "accesses that straddle sectors",
)
SHARED, SCATTERED, MASKED = "lanes that share addresses", "addresses in no order", "fewer than 32 lanes"


def _bytes_wanted(addresses: Sequence[int], access_bytes: int) -> set[int]:
    return {address + i for address in addresses for i in range(access_bytes)}


def sectors_touched(addresses: Sequence[int], access_bytes: int) -> int:
    """Byte by byte: the sector of every byte that a lane wants."""
    return len({byte // SECTOR for byte in _bytes_wanted(addresses, access_bytes)})


def useful_fraction(addresses: Sequence[int], access_bytes: int) -> float:
    """Byte by byte: those wanted over those in the sectors that hold them."""
    wanted = _bytes_wanted(addresses, access_bytes)
    return len(wanted) / len({byte // SECTOR * SECTOR + i for byte in wanted for i in range(SECTOR)})


def _linear(base: int, step: int, access_bytes: int, tag: str, lanes: int = 32) -> Case:
    addresses = [base + step * lane for lane in range(lanes)]
    written = f"[{base} + {step} * lane for lane in range({lanes})]"
    return Case({"addresses": addresses, "access_bytes": access_bytes}, tag, f"{written}, access_bytes={access_bytes}")


def _address_cases(rng: Random) -> list[Case]:
    base = 128 * rng.randint(1, 2**12)
    cases = [_linear(base, size, size, ALIGNED) for size in (2, 4, 8, 16)]
    cases += [_linear(base + size * rng.randint(1, 32 // size - 1), size, size, MISALIGNED) for size in (2, 4, 8)]
    cases += [_linear(base, size * rng.randint(2, 40), size, STRIDED) for size in (2, 4, 8)]
    cases += [_linear(base + rng.randint(29, 31), step, 4, WIDE) for step in (32, 64, 96)]
    cases += [
        _linear(base + 16, 48, 64, WIDE),
        _linear(base + 20, 4096, 160, WIDE),
        _linear(base, 0, 4, SHARED),
        _linear(base, 4, 4, MASKED, rng.randint(1, 31)),
    ]
    cases.append(_linear(2**40 + 12, 12, 12, MISALIGNED))
    scattered = [base + 4 * rng.randrange(256) for _ in range(32)]
    cases.append(Case({"addresses": scattered, "access_bytes": 4}, SCATTERED))
    cases.append(_linear(base + 31 * 4, -4, 4, "descending addresses"))
    return cases


def _units(addresses: Sequence[int], access_bytes: int, unit: int) -> int:
    return len({byte // unit for byte in _bytes_wanted(addresses, access_bytes)})


def _span(addresses: Sequence[int], access_bytes: int) -> int:
    return (max(addresses) + access_bytes - 1) // SECTOR - min(addresses) // SECTOR + 1


SECTORS = Question(
    "sectors_touched",
    _address_cases,
    sectors_touched,
    (
        Mistake(
            "the bytes are added up and divided by 32: that holds only for neighbours from an aligned base",
            lambda addresses, access_bytes: ceil(len(addresses) * access_bytes / SECTOR),
            1,
        ),
        Mistake(
            "only the first byte of each access is looked at: an access may straddle sectors",
            lambda addresses, access_bytes: len({address // SECTOR for address in addresses}),
            2,
        ),
        Mistake(
            "only the first and the last byte of each access are looked at: a wide access covers sectors between them",
            lambda addresses, access_bytes: len({b // SECTOR for a in addresses for b in (a, a + access_bytes - 1)}),
            2,
        ),
        Mistake(
            "the byte after the access is taken along: the last byte is at address + access_bytes - 1",
            lambda addresses, access_bytes: len(
                {s for a in addresses for s in range(a // SECTOR, (a + access_bytes) // SECTOR + 1)}
            ),
            2,
        ),
        Mistake(
            "each lane's sectors are added up: lanes that want the same sector share it",
            lambda addresses, access_bytes: sum(sectors_touched([address], access_bytes) for address in addresses),
            3,
        ),
        Mistake(
            "one sector a lane is counted: lanes that want the same sector share it",
            lambda addresses, access_bytes: len(addresses),
            3,
        ),
        Mistake("everything between the lowest and the highest address is counted", _span, 4),
        Mistake(
            "cache lines of 128 bytes are counted, not sectors of 32",
            lambda addresses, access_bytes: _units(addresses, access_bytes, 128),
            5,
        ),
        Mistake(
            "units of 64 bytes are counted, not sectors of 32",
            lambda addresses, access_bytes: _units(addresses, access_bytes, 64),
            5,
        ),
        Mistake("distinct addresses are counted, not sectors", lambda addresses, access_bytes: len(set(addresses)), 3),
        Mistake(
            "bytes are counted, not sectors",
            lambda addresses, access_bytes: SECTOR * sectors_touched(addresses, access_bytes),
            5,
        ),
        Mistake(
            "sectors are taken to begin at the lowest address: they begin at multiples of 32",
            lambda addresses, access_bytes: sectors_touched([a - min(addresses) for a in addresses], access_bytes),
            1,
        ),
    ),
    refused={"addresses": [64, -32], "access_bytes": -4},
)
USEFUL = Question(
    "useful_fraction",
    _address_cases,
    useful_fraction,
    (
        Mistake(
            "a byte that two lanes want is counted twice: it comes once",
            lambda addresses, access_bytes: (
                len(addresses) * access_bytes / (SECTOR * sectors_touched(addresses, access_bytes))
            ),
            6,
        ),
        Mistake(
            "the inverse is returned: useful over moved is at most 1",
            lambda addresses, access_bytes: 1 / useful_fraction(addresses, access_bytes),
            6,
        ),
        Mistake(
            "the wasted share is returned",
            lambda addresses, access_bytes: 1 - useful_fraction(addresses, access_bytes),
            6,
        ),
        Mistake(
            "sectors are not turned into bytes",
            lambda addresses, access_bytes: SECTOR * useful_fraction(addresses, access_bytes),
            6,
        ),
        Mistake(
            "bytes are counted over cache lines of 128, not sectors of 32",
            lambda addresses, access_bytes: (
                len(_bytes_wanted(addresses, access_bytes)) / (128 * _units(addresses, access_bytes, 128))
            ),
            5,
        ),
        Mistake(
            "addresses are counted, not bytes: each lane wants access_bytes of them",
            lambda addresses, access_bytes: len(set(addresses)) / (SECTOR * sectors_touched(addresses, access_bytes)),
            6,
        ),
        Mistake(
            "the result is clipped at 1 where lanes share bytes: count each byte once instead",
            lambda addresses, access_bytes: min(
                1.0, len(addresses) * access_bytes / (SECTOR * sectors_touched(addresses, access_bytes))
            ),
            6,
        ),
    ),
    form=Rate(),
    refused={"addresses": [64, -32], "access_bytes": -8},
)


ACCESS_PATTERN = asking(
    "1.7",
    "sectors of an access pattern",
    10,
    (SECTORS, USEFUL),
    check="check_sectors",
    says="sectors of 32 byte addresses, and the share of the moved bytes that is useful.",
    notice="a misaligned warp pays one sector more; a stride of eight floats pays eight times as much",
)
check_sectors = ACCESS_PATTERN.check
