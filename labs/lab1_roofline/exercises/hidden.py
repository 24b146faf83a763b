"""Hidden scenarios of lab 1: counts, rates and times for sizes that no release holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from utils.checks.hidden import Draw, Observation
from utils.simt import If, Op

#: Beyond this a float loses ones.
EXACT = 2**53


def dot_product(package: ModuleType, seed: int) -> dict[str, Observation]:
    """1.1: one element, odd lengths, a length beyond 2**53, elements of 1 to 16 bytes."""
    draw = Draw(seed, "1.1")
    lengths = [1, 2, draw.between(3, 99), draw.between(10**5, 10**7), EXACT + 2 * draw.between(1, 10**6) + 1]
    sizes = draw.random.sample([1, 2, 4, 8, 16], 5)
    return {
        "dot_product_flops": [package.dot_product_flops(n) for n in lengths],
        "dot_product_bytes": [package.dot_product_bytes(n, size) for n, size in zip(lengths, sizes)],
    }


def matmul(package: ModuleType, seed: int) -> dict[str, Observation]:
    """1.2: vectors as matrices, ragged sizes, a product beyond 2**53."""
    draw = Draw(seed, "1.2")
    shapes = [(1, 1, 1), (1, draw.between(2, 500), 1), (draw.between(2, 90), 1, draw.between(2, 90))]
    shapes += [tuple(draw.between(3, 5000) for _ in range(3)) for _ in range(3)]
    shapes += [tuple(10**6 + 2 * draw.between(1, 10**5) + 1 for _ in range(3))]
    sizes = [draw.random.choice([1, 2, 4, 8]) for _ in shapes]
    return {
        "matmul_flops": [package.matmul_flops(*shape) for shape in shapes],
        "matmul_bytes": [package.matmul_bytes(*shape, size) for shape, size in zip(shapes, sizes)],
        "matmul_bytes of one shape in 1, 2, 4 and 8 bytes": [
            package.matmul_bytes(*shapes[4], size) for size in (1, 2, 4, 8)
        ],
    }


def relu_softmax(package: ModuleType, seed: int) -> dict[str, Observation]:
    """1.3: one row, one column, long rows, each way to carry a softmax out."""
    draw = Draw(seed, "1.3")
    lengths = [1, draw.between(2, 999), EXACT + 2 * draw.between(1, 10**6) + 1]
    shapes = [(1, 1), (1, draw.between(2, 300)), (draw.between(2, 300), 1)]
    shapes += [(draw.between(2, 5000), draw.between(2, 60_000)) for _ in range(3)]
    sizes = [1, 2, 4, 8]
    observed: dict[str, Observation] = {
        "relu_flops": [package.relu_flops(n) for n in lengths],
        "relu_bytes": [package.relu_bytes(n, size) for n in lengths for size in sizes],
        "softmax_flops": [package.softmax_flops(*shape) for shape in shapes],
    }
    for method in ("fused", "three_pass", "eager"):
        observed[f"softmax_bytes with method {method!r}"] = [
            package.softmax_bytes(*shape, size, method) for shape in shapes for size in sizes
        ]
    return observed


def attention(package: ModuleType, seed: int) -> dict[str, Observation]:
    """1.4: more queries than keys, more keys than queries, one of either, counts beyond 2**53."""
    draw = Draw(seed, "1.4")

    def small() -> int:
        return draw.between(2, 40)

    few, many = draw.between(3, 30), draw.between(40, 90)
    lengths = [(1, 1), (1, many), (many, 1), (few, few), (few, many), (many, few)]
    shapes = [(small(), small(), *pair, draw.between(3, 200)) for pair in lengths]
    for longer, shorter in ((200_000, 150_000), (100_000, 300_000)):  # odd numbers, so that the product is odd
        lengths = [longer + 2 * draw.between(1, 9999) + 1, shorter + 2 * draw.between(1, 9999) + 1]
        shapes.append((2 * draw.between(60, 90) + 1, 2 * draw.between(60, 90) + 1, *lengths, draw.between(300, 900)))
    sizes = [draw.random.choice([1, 2, 4, 8]) for _ in shapes]
    return {
        "attention_flops": [package.attention_flops(*shape, causal=False) for shape in shapes],
        "attention_flops with causal": [package.attention_flops(*shape, causal=True) for shape in shapes],
        "attention_bytes with materialize": [
            package.attention_bytes(*shape, size, materialize=True) for shape, size in zip(shapes, sizes)
        ],
        "attention_bytes in one kernel": [
            package.attention_bytes(*shape, size, materialize=False) for shape, size in zip(shapes, sizes)
        ],
    }


def ridge(package: ModuleType, seed: int) -> dict[str, Observation]:
    """1.5: both sides of the ridge, batches that are whole, weights for which no batch is enough."""
    draw = Draw(seed, "1.5")
    gpus = [(draw.random.uniform(10, 3000) * 1e12, draw.random.uniform(0.3, 9) * 1e12) for _ in range(4)]
    intensities = [draw.random.uniform(0.01, 5), draw.random.uniform(5, 5000), 1e7]
    layers = [
        (draw.between(4000, 20_000), draw.between(4000, 20_000), size, draw.random.uniform(50, 600) * 1e12, 2e12)
        for size in (1, 2, 4)
    ]
    layers += [(draw.between(2, 60), draw.between(2, 60), 2, draw.random.uniform(200, 900) * 1e12, 2e12)]
    side = 2 ** draw.between(6, 11)
    unit = 2.0 ** draw.between(20, 40)
    # powers of two, exact however one solves for the batch
    layers += [(2 * side, 2 * side, 2, side / 2 * unit, unit)]
    layers += [(side, side, size, side / size * unit, unit) for size in (1, 2, 4)]
    layers += [(draw.between(300, 900), draw.between(300, 900), 2, 1e12, 3e13)]
    return {
        "ridge_point": [package.ridge_point(*gpu) for gpu in gpus],
        "attainable_rate": [package.attainable_rate(intensity, *gpu) for gpu in gpus for intensity in intensities],
        "smallest_compute_bound_batch": [package.smallest_compute_bound_batch(*layer) for layer in layers],
    }


def _points(draw: Draw, dtypes: list[str], peak: float, bandwidth: float) -> list[dict[str, Any]]:
    """Measurements whose rates lie below ``peak`` FLOP/s and ``bandwidth`` bytes/s, and reach both once a dtype."""
    points = []
    for number, dtype in enumerate(dtypes):
        share = 1.0 if number == 0 else draw.random.uniform(0.3, 0.9)
        for kind in ("compute", "memory", "neither"):
            seconds = draw.random.uniform(1e-6, 1e-3)
            done = 1.0 if kind == "compute" else draw.random.uniform(0.1, 0.6)
            moved = 1.0 if kind == "memory" else draw.random.uniform(0.1, 0.6)
            counts = {
                "flops": round(done * share * peak * seconds),
                "bytes": round(moved * share * bandwidth * seconds),
            }
            points.append({"kind": "add", "params": {"n": 1}, "dtype": dtype, "seconds": seconds, **counts})
    draw.random.shuffle(points)
    return points


def prediction(package: ModuleType, seed: int) -> dict[str, Observation]:
    """1.6: counts of zero, points of GPUs that do not exist, dtypes that only the other 16-bit dtype tells about."""
    draw = Draw(seed, "1.6")
    times = [(0, 1, 1e12, 1e12), (draw.between(1, 10**9), 1, 3e12, 2e12), (1, draw.between(1, 10**9), 3e12, 2e12)]
    times += [
        (draw.between(1, 10**13), draw.between(1, 10**11), draw.random.uniform(1, 900) * 1e12, 1e12) for _ in range(4)
    ]
    # rates at which gelu and layer norm are bound by arithmetic, or copies and additions by memory, by far
    slow = _points(draw, ["fp32", "bf16", "fp16"], draw.random.uniform(1, 9) * 1e9, draw.random.uniform(1, 9) * 1e12)
    fast = _points(draw, ["fp16", "fp32", "bf16"], draw.random.uniform(1, 9) * 1e15, draw.random.uniform(1, 9) * 1e11)
    half = _points(draw, ["bf16"], 7e14, 2e12)
    single = [point for point in slow if point["dtype"] == "fp32"]
    n = draw.between(10**8, 10**9)
    kinds = [("gelu", {"n": n}), ("axpy", {"n": n}), ("layer_norm", {"rows": draw.between(10**4, 10**5), "cols": 4096})]
    kinds += [("add", {"n": n}), ("gelu", {"rows": draw.between(10**4, 10**5), "cols": 3000})]
    return {
        "predict_seconds": [package.predict_seconds(*time) for time in times],
        "measured_bandwidth": [package.measured_bandwidth(points) for points in (slow, fast, half, half[:1])],
        "measured_peak": [
            package.measured_peak(points, dtype) for points in (slow, fast) for dtype in ("fp32", "bf16", "fp16")
        ],
        "measured_peak where only the other 16-bit dtype was measured": package.measured_peak(half, "fp16"),
        "measured_peak where nothing tells about the dtype: a ValueError that names it": _refuses(
            lambda: package.measured_peak(single, "fp16"), "fp16"
        ),
        "predict_operator": [
            package.predict_operator(kind, params, dtype, points)
            for points, dtype in ((slow, "fp32"), (slow, "bf16"), (fast, "fp16"))
            for kind, params in kinds
        ],
    }


def _refuses(call: Callable[[], object], named: str) -> bool:
    """Whether a call raises a ValueError that names what is wrong."""
    try:
        call()
    except ValueError as error:
        return named in str(error)
    return False


def sectors(package: ModuleType, seed: int) -> dict[str, Observation]:
    """1.7: any order, lanes that share bytes, masked lanes, accesses that straddle several sectors."""
    draw = Draw(seed, "1.7")

    def somewhere() -> int:
        return draw.between(0, 4000)

    base, step = somewhere(), draw.between(5, 300)
    accesses = [
        ([base], 1),
        ([32 * draw.between(0, 9) + 31], 2),
        ([32 * draw.between(0, 9)], 32),
        ([base + step * lane for lane in range(32)], 4),
        ([base + 4 * lane for lane in range(32)], 4),
        ([base - base % 32 + 16 * lane for lane in range(31, -1, -1)], 16),
        ([base + 2 * (lane // 4) for lane in range(draw.between(5, 31))], 2),
        ([base + (step + 400) * lane for lane in range(draw.between(2, 12))], draw.between(160, 300)),
        ([32 * draw.between(0, 900) for _ in range(20)], 8),
        ([somewhere() for _ in range(32)], draw.between(3, 24)),
        ([draw.between(0, 60) for _ in range(32)], draw.between(5, 12)),
    ]
    return {
        "sectors_touched": [package.sectors_touched(list(addresses), size) for addresses, size in accesses],
        "useful_fraction": [package.useful_fraction(list(addresses), size) for addresses, size in accesses],
    }


def waves(package: ModuleType, seed: int) -> dict[str, Observation]:
    """1.8: whole and ragged tiles, tiles larger than the matrix, full last waves, counts beyond 2**53."""
    draw = Draw(seed, "1.8")
    tile_m, tile_n = draw.between(3, 300), draw.between(3, 300)
    outputs = [(1, 1), (tile_m, tile_n), (tile_m * draw.between(2, 9), tile_n * draw.between(2, 9))]
    outputs += [(tile_m * draw.between(2, 9) + 1, tile_n * draw.between(2, 9) - 1), (tile_m - 1, 40 * tile_n + 1)]
    outputs += [(draw.between(1, 9000), draw.between(1, 9000)) for _ in range(3)]
    sms = draw.between(7, 160)
    counts = [1, sms - 1, sms, sms + 1, sms * draw.between(3, 40), sms * draw.between(3, 40) + draw.between(1, sms - 1)]
    beyond = [3 * (EXACT + draw.between(1, 10**9)) + 1 for _ in range(12)]
    peak = draw.random.uniform(1, 900) * 1e12
    return {
        "num_tiles": [package.num_tiles(m, n, tile_m, tile_n) for m, n in outputs],
        "num_tiles beyond 2**53": [package.num_tiles(rows, 1, 3, 1) for rows in beyond],
        "num_waves": [package.num_waves(tiles, sms) for tiles in counts],
        "num_waves beyond 2**53": [package.num_waves(tiles, 3) for tiles in beyond],
        "last_wave_utilisation": [package.last_wave_utilisation(tiles, sms) for tiles in counts],
        "tiled_matmul_seconds": [
            package.tiled_matmul_seconds(m, draw.between(1, 5000), n, tile_m, tile_n, sms, peak) for m, n in outputs
        ],
    }


def divergence(package: ModuleType, seed: int) -> dict[str, Observation]:
    """1.9: programs with branches in branches, for warps of 1 to 64 lanes."""
    draw = Draw(seed, "1.9")
    cases = [([], 32), ([Op("A", draw.between(2, 9))], 32)]
    cases += [(_program(draw, depth, size), size) for depth in (1, 2, 3) for size in (1, 7, 32, 32, 64)]
    default = _program(draw, 3, 32)
    return {
        "warp_cycles": [*(package.warp_cycles(*case) for case in cases), package.warp_cycles(default)],
        "wasted_lane_cycles": [
            *(package.wasted_lane_cycles(*case) for case in cases),
            package.wasted_lane_cycles(default),
        ],
    }


def _program(draw: Draw, depth: int, lanes: int) -> list[Op | If]:
    """A program with branches in branches; some sides are empty, some conditions hold for all lanes or none."""
    program: list[Op | If] = [Op("A", draw.between(1, 9))]
    for _ in range(2 if depth else 0):
        yes = frozenset(draw.random.sample(range(lanes), draw.between(0, lanes)))
        otherwise = _program(draw, depth - 1, lanes) if draw.between(0, 3) else []
        program.append(If(yes.__contains__, _program(draw, depth - 1, lanes), otherwise))
        program.append(Op("B", draw.between(1, 9)))
    return program


def layer(package: ModuleType, seed: int) -> dict[str, Observation]:
    """1.10: layers of any size, and shares of classes with other names."""
    draw = Draw(seed, "1.10")
    sizes = [(1, 1, 1, 1)]
    for _ in range(4):
        heads = draw.between(2, 20)
        sizes.append((draw.between(2, 40), draw.between(2, 900), heads * draw.between(3, 90), heads))
    names = [f"class {number}" for number in range(draw.between(4, 6))]
    amounts = [
        {name: draw.between(0, 10**12) for name in names},
        {"only": draw.between(1, 99)},
        {"left": 0, "right": draw.between(1, 99)},
        {"a": draw.random.uniform(0.1, 9), "b": draw.random.uniform(0.1, 9)},
    ]
    classes = ("contraction", "normalisation", "element-wise")
    forward = [package.layer_flops(*size, False) for size in sizes]
    both = [package.layer_flops(*size, True) for size in sizes]
    shared = [package.shares(dict(amount)) for amount in amounts]
    return {
        "the names in what layer_flops returns": [_names(table) for table in (*forward, *both)],
        "layer_flops of the forward pass": [_values(table, classes) for table in forward],
        "layer_flops with the backward pass": [_values(table, classes) for table in both],
        "the names in what shares returns": [_names(table) for table in shared],
        "shares": [_values(table, amount) for table, amount in zip(shared, amounts)],
    }


def _names(table: Any) -> Observation:
    """A dictionary's keys, in any order; anything else as it is."""
    return sorted(map(str, table)) if isinstance(table, Mapping) else table


def _values(table: Any, names: Iterable[str]) -> Observation:
    """A dictionary's values in the order of ``names``; anything else as it is."""
    return [table.get(name) for name in names] if isinstance(table, Mapping) else table
