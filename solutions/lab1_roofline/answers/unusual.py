"""Right answers to lab 1 that few would write: loops where others have a formula, tables, recursion, helpers."""

from __future__ import annotations

from utils.checks.answers import Answers

ANSWERS = Answers()
also_right = ANSWERS.also_right

# ---- 1.1: dot product
FLOPS, BYTES = "1.1: FLOPs of a dot product", "1.1: bytes of a dot product"
also_right("shifted", {FLOPS: "return n << 1", BYTES: "return ((n << 1) + 1) * element_size"})
also_right("counted one by one", {
    FLOPS: "return sum(1 for _ in ('multiply', 'add') for _ in range(min(n, 10))) * n // min(n, 10)",
    BYTES: "total = 0\nfor elements in (n, n, 1):\n    total += elements * element_size\nreturn total",
})  # fmt: skip
also_right("with lambdas", {
    FLOPS: "double = lambda count: count + count\nreturn double(n)",
    BYTES: "sized = lambda *counts: sum(map(element_size.__mul__, counts))\nreturn sized(n, n, 1)",
})  # fmt: skip
also_right("with a table", {
    FLOPS: "return sum({'*': n, '+': n}.values())",
    BYTES: "moved = {'x': n, 'y': n, 'result': 1}\nreturn sum(moved.values()) * element_size",
})  # fmt: skip

# ---- 1.2: matmul
FLOPS, BYTES = "1.2: FLOPs of a matmul", "1.2: bytes of a matmul"
also_right("in two parts", {
    FLOPS: "multiplications = m * n * k\nadditions = multiplications\nreturn multiplications + additions",
    BYTES: "return element_size * m * k + element_size * k * n + element_size * m * n",
})  # fmt: skip
also_right("by row", {
    FLOPS: "row = sum(dot_product_flops(k) for _ in range(1)) * n\nreturn row * m",
    BYTES: "return (m * (k + n) + k * n) * element_size",
})  # fmt: skip
also_right("reduced", {
    FLOPS: "from functools import reduce\n\nreturn reduce(lambda a, b: a * b, (m, k, n), 2)",
    BYTES: "from math import prod\n\nreturn element_size * sum(map(prod, [(m, k), (k, n), (m, n)]))",
})  # fmt: skip
also_right("from the shapes of named matrices", {
    FLOPS: "import math\n\nreturn 2 * math.prod([m, k, n])",
    BYTES: """
        from itertools import combinations

        return element_size * sum(a * b for a, b in combinations((m, k, n), 2))
    """,
})  # fmt: skip

# ---- 1.3: ReLU and softmax
RELU, RELU_BYTES = "1.3: FLOPs of a ReLU", "1.3: bytes of a ReLU"
SOFTMAX, SOFTMAX_BYTES = "1.3: FLOPs of a softmax", "1.3: bytes of a softmax"
also_right("a match statement", {
    RELU: "return 1 * n",
    RELU_BYTES: "return n * element_size + n * element_size",
    SOFTMAX: "return rows * cols * 4",
    SOFTMAX_BYTES: """
        match method:
            case "fused":
                passes, extra = 2, 0
            case "three_pass":
                passes, extra = 4, 0
            case _:
                passes, extra = 8, 4
        return (passes * rows * cols + extra * rows) * element_size
    """,
})  # fmt: skip
also_right("a list of kernels", {
    RELU: "return sum([n])",
    RELU_BYTES: "return element_size * sum((n, n))",
    SOFTMAX: "return sum(rows * cols for _ in range(4))",
    SOFTMAX_BYTES: """
        matrix, column = rows * cols, rows
        kernels = {
            "fused": [([matrix], [matrix])],
            "three_pass": [([matrix] * 3, [matrix])],
            "eager": [
                ([matrix], [column]),
                ([matrix, column], [matrix]),
                ([matrix], [matrix]),
                ([matrix], [column]),
                ([matrix, column], [matrix]),
            ],
        }
        return element_size * sum(sum(read) + sum(written) for read, written in kernels[method])
    """,
})  # fmt: skip
also_right("row by row", {
    RELU: "comparisons = n\nreturn comparisons",
    RELU_BYTES: "return (n << 1) * element_size",
    SOFTMAX: "per_row = 0\nfor _ in ('max', 'exp', 'sum', 'divide'):\n    per_row += cols\nreturn rows * per_row",
    SOFTMAX_BYTES: """
        def one_row():
            if method == "eager":
                return (cols + 1) + (cols + 1 + cols) + 2 * cols + (cols + 1) + (cols + 1 + cols)
            return cols * (4 if method != "fused" else 2)

        return rows * one_row() * element_size
    """,
})  # fmt: skip
also_right("one expression", {
    RELU: "return n",
    RELU_BYTES: "return element_size * n * 2",
    SOFTMAX: "return 2 * rows * cols + 2 * rows * cols",
    SOFTMAX_BYTES: "return rows * element_size * (2 * cols if method == 'fused' else 4 * cols if method[0] == 't' "
                   "else 4 * (2 * cols + 1))",
})  # fmt: skip

# ---- 1.4: attention
FLOPS, BYTES = "1.4: FLOPs of attention", "1.4: bytes of attention"
PARTS = """
        import math

        size = lambda *shape: batch * heads * math.prod(shape) * element_size
        q, k, v, o = size(seq_q, head_dim), size(seq_k, head_dim), size(seq_k, head_dim), size(seq_q, head_dim)
        s = size(seq_q, seq_k)
        return q + k + v + o + (4 * s if materialize else batch * heads * seq_q * 4)
"""
also_right("query by query", {
    FLOPS: """
        pairs = 0
        for query in range(seq_q):
            seen = query - seq_q + seq_k + 1 if causal else seq_k
            pairs += max(0, seen)
        return batch * heads * pairs * (4 * head_dim + 5)
    """,
    BYTES: PARTS,
})  # fmt: skip
also_right("key by key", {
    FLOPS: """
        if not causal:
            pairs = seq_q * seq_k
        else:  # key j is seen by the queries from j - seq_k + seq_q on
            pairs = sum(seq_q - max(0, key - seq_k + seq_q) for key in range(seq_k))
        score, weighted, softmax = 2 * head_dim + 1, 2 * head_dim, softmax_flops(1, 1)
        return pairs * (score + softmax + weighted) * heads * batch
    """,
    BYTES: """
        per_head = 2 * (seq_q + seq_k) * head_dim * element_size
        per_head += 4 * (seq_q * seq_k * element_size if materialize else seq_q)
        return per_head * (batch * heads)
    """,
})  # fmt: skip
also_right("triangle and rectangle", {
    FLOPS: """
        triangle = lambda n: n * (n + 1) // 2
        pairs = seq_q * seq_k
        if causal:
            pairs = triangle(seq_k) - triangle(max(0, seq_k - seq_q))
        return pairs * batch * heads * (5 + 4 * head_dim)
    """,
    BYTES: """
        def kernel(*rows_and_columns):
            return sum(rows * columns for rows, columns in rows_and_columns) * element_size

        Q = O = (seq_q, head_dim)
        K = V = (seq_k, head_dim)
        S = P = (seq_q, seq_k)
        if materialize:
            return batch * heads * sum([kernel(Q, K, S), kernel(S, P), kernel(P, V, O)])
        return batch * heads * (kernel(Q, K, V, O) + 4 * seq_q)
    """,
})  # fmt: skip
also_right("operation by operation", {
    FLOPS: """
        operations = dict(scores=2 * head_dim, scale=1, softmax=softmax_flops(1, 1), values=2 * head_dim)
        visible = [min(seq_k, max(0, i + 1 + seq_k - seq_q)) if causal else seq_k for i in range(seq_q)]
        return batch * heads * sum(visible) * sum(operations.values())
    """,
    BYTES: """
        read_and_written = [seq_q * head_dim, seq_k * head_dim, seq_k * head_dim, seq_q * head_dim]
        if materialize:
            read_and_written.extend([seq_q * seq_k] * 4)
        total = sum(read_and_written) * element_size
        if not materialize:
            total += seq_q * 4
        return heads * total * batch
    """,
})  # fmt: skip

# ---- 1.5: ridge point and attainable rate
RIDGE, RATE, BATCH = "1.5: the ridge point", "1.5: the attainable rate", "1.5: the smallest compute-bound batch"
also_right("whole numbers alone", {
    RIDGE: "return float(Fraction(peak_flops) / Fraction(bandwidth))",
    RATE: "return sorted((peak_flops, bandwidth * intensity))[0]",
    BATCH: """
        p, q = Fraction(peak_flops).as_integer_ratio()
        r, s = Fraction(bandwidth).as_integer_ratio()
        # ridge = (p / q) / (r / s) = p s / (q r); all sides times q r
        top = element_size * p * s * d * f
        bottom = 2 * d * f * q * r - element_size * p * s * (d + f)
        return None if bottom <= 0 else -(-top // bottom)
    """,
})  # fmt: skip
also_right("floor and remainder", {
    RIDGE: "flops_per_byte = peak_flops / bandwidth\nreturn flops_per_byte",
    RATE: "memory_bound = bandwidth * intensity\nreturn peak_flops if memory_bound >= peak_flops else memory_bound",
    BATCH: """
        ridge = Fraction(peak_flops) / Fraction(bandwidth)
        slope = 2 * d * f - ridge * element_size * (d + f)
        if slope <= 0:
            return None
        whole, rest = divmod(ridge * element_size * d * f, slope)
        return int(whole) + (1 if rest else 0)
    """,
})  # fmt: skip
also_right("intensity as a function", {
    RIDGE: "return peak_flops * (1.0 / bandwidth)",
    RATE: "return peak_flops * min(1.0, intensity / (peak_flops / bandwidth))",
    BATCH: """
        needed = Fraction(peak_flops) / Fraction(bandwidth)

        def intensity(rows):
            return Fraction(2 * rows * d * f, element_size * (rows * d + d * f + rows * f))

        if Fraction(2 * d * f, element_size * (d + f)) <= needed:  # what it comes close to, and never reaches
            return None
        low, high = 0, 1
        while intensity(high) < needed:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) >> 1
            if intensity(middle) < needed:
                low = middle
            else:
                high = middle
        return high
    """,
})  # fmt: skip
also_right("math.ceil of a fraction", {
    RIDGE: "return (bandwidth / peak_flops) ** -1",
    RATE: "if ridge_point(peak_flops, bandwidth) <= intensity:\n    return peak_flops\nreturn intensity * bandwidth",
    BATCH: """
        ridge = Fraction(peak_flops) / Fraction(bandwidth)
        per_byte = Fraction(2, element_size) / ridge  # B d f per_byte >= B (d + f) + d f
        denominator = per_byte * d * f - d - f
        if denominator > 0:
            return int(math.ceil(Fraction(d * f) / denominator))
        return None
    """,
})  # fmt: skip

# ---- 1.6: predicted and measured time
SECONDS, BANDWIDTH = "1.6: seconds of an operator", "1.6: the measured bandwidth"
PEAK, UNSEEN = "1.6: the measured peak", "1.6: seconds of an operator that was not seen"
also_right("sorted", {
    SECONDS: "return sorted([flops / peak_flops, bytes_moved / bandwidth])[-1]",
    BANDWIDTH: "return sorted(p['bytes'] / p['seconds'] for p in points)[-1]",
    PEAK: """
        groups = {"fp32": ["fp32"], "bf16": ["bf16", "fp16"], "fp16": ["bf16", "fp16"]}
        matching = list(filter(lambda p: p["dtype"] in groups[dtype], points))
        try:
            return max(p["flops"] / p["seconds"] for p in matching)
        except ValueError as error:
            raise ValueError(f"no measurement of {dtype}") from error
    """,
})  # fmt: skip
also_right("the best point", {
    SECONDS: "compute = flops / peak_flops\nreturn max(compute, bytes_moved / bandwidth)",
    BANDWIDTH: """
        best = max(points, key=lambda point: point["bytes"] / point["seconds"])
        return best["bytes"] / best["seconds"]
    """,
    PEAK: """
        key = lambda name: "half" if name != "fp32" else name
        best = None
        for p in points:
            if key(p["dtype"]) != key(dtype):
                continue
            rate = p["flops"] / p["seconds"]
            best = rate if best is None or rate > best else best
        if best is None:
            raise ValueError(f"nothing was measured in {dtype}")
        return best
    """,
    UNSEEN: """
        work = operator_cost(kind, params, dtype)
        rates = measured_peak(points, dtype), measured_bandwidth(points)
        return predict_seconds(*work, *rates)
    """,
})  # fmt: skip
also_right("from seconds per byte", {
    SECONDS: "return max([flops * (1 / peak_flops), bytes_moved * (1 / bandwidth)])",
    BANDWIDTH: "return 1 / min(p['seconds'] / p['bytes'] for p in points)",
    PEAK: """
        same = lambda other: other == dtype or ELEMENT_SIZE[other] == ELEMENT_SIZE[dtype]
        rates = tuple(p["flops"] / p["seconds"] for p in points if same(p["dtype"]))
        if rates == ():
            raise ValueError(f"no point of {dtype}")
        return max(rates)
    """,
    UNSEEN: """
        flops, moved = operator_cost(kind, dict(params), dtype)
        compute = flops / measured_peak(points, dtype)
        traffic = moved / measured_bandwidth(points)
        return compute if compute >= traffic else traffic
    """,
})  # fmt: skip
also_right("folded", {
    BANDWIDTH: """
        from functools import reduce

        return reduce(max, (point["bytes"] / point["seconds"] for point in points))
    """,
    PEAK: """
        equal = {"bf16": "fp16"}
        wanted = equal.get(dtype, dtype)
        rates = sorted((p["flops"] / p["seconds"] for p in points if equal.get(p["dtype"], p["dtype"]) == wanted),
                       reverse=True)
        if not rates:
            raise ValueError(f"no point for {dtype}")
        return rates[0]
    """,
    UNSEEN: """
        flops, bytes_moved = operator_cost(kind=kind, params=params, dtype=dtype)
        rates = {"peak_flops": measured_peak(points, dtype), "bandwidth": measured_bandwidth(points)}
        return predict_seconds(flops, bytes_moved, **rates)
    """,
})  # fmt: skip

# ---- 1.7: sectors of an access pattern
SECTORS, USEFUL = "1.7: sectors of an access pattern", "1.7: the useful fraction"
also_right("with NumPy", {
    SECTORS: """
        import numpy as np

        wanted = np.add.outer(np.asarray(list(addresses)), np.arange(access_bytes))
        return len(np.unique(wanted // SECTOR_BYTES))
    """,
    USEFUL: """
        import numpy as np

        wanted = np.unique(np.add.outer(np.asarray(list(addresses)), np.arange(access_bytes)))
        return float(wanted.size / (np.unique(wanted // 32).size * 32))
    """,
})  # fmt: skip
also_right("merged intervals", {
    SECTORS: """
        count, end = 0, -1  # end: the last sector that is counted
        for start in sorted(addresses):
            first, last = start // 32, (start + access_bytes - 1) // 32
            count += max(0, last - max(first, end + 1) + 1)
            end = max(end, last)
        return count
    """,
    USEFUL: """
        covered, end = 0, 0
        for start in sorted(addresses):
            stop = start + access_bytes
            covered += max(0, stop - max(start, end))
            end = max(end, stop)
        return covered / 32 / sectors_touched(addresses, access_bytes)
    """,
})  # fmt: skip
also_right("a table of flags", {
    SECTORS: """
        touched = {}
        for address in addresses:
            for byte in range(address, address + access_bytes):
                touched[byte // SECTOR_BYTES] = True
        return sum(touched.values())
    """,
    USEFUL: """
        from collections import Counter

        bytes_of_sector = Counter(
            byte // SECTOR_BYTES for byte in {a + i for a in addresses for i in range(access_bytes)}
        )
        return sum(bytes_of_sector.values()) / (SECTOR_BYTES * len(bytes_of_sector))
    """,
})  # fmt: skip
also_right("a union of sets", {
    SECTORS: """
        from itertools import chain

        sectors = (range(a // 32, (a + access_bytes + 31) // 32) for a in addresses)
        return len(frozenset(chain.from_iterable(sectors)))
    """,
    USEFUL: """
        wanted = set().union(*(range(a, a + access_bytes) for a in addresses))
        loaded = sectors_touched(addresses, access_bytes) * SECTOR_BYTES
        return len(wanted) / loaded
    """,
})  # fmt: skip

# ---- 1.8: tiles and waves
TILES, WAVES = "1.8: tiles of an output", "1.8: waves"
LAST, TIME = "1.8: utilisation of the last wave", "1.8: time in whole waves"
also_right("ranges", {
    TILES: "return len(range(0, m, tile_m)) * len(range(0, n, tile_n))",
    WAVES: "return len(range(0, tiles, sms))",
    LAST: "return len(range(0, tiles, 1)[(num_waves(tiles, sms) - 1) * sms :]) / sms",
})  # fmt: skip
also_right("rounded up by a helper", {
    TILES: """
        def rounded_up(size, tile):
            quotient, rest = divmod(size, tile)
            return quotient + 1 if rest else quotient

        return rounded_up(m, tile_m) * rounded_up(n, tile_n)
    """,
    WAVES: "return 1 + (tiles - 1) // sms",
    LAST: "return ((tiles - 1) % sms + 1) / sms",
    TIME: """
        flops = num_waves(num_tiles(m, n, tile_m, tile_n), sms) * sms * (2 * k * tile_m * tile_n)
        return flops / peak_flops
    """,
})  # fmt: skip
also_right("wave after wave", {
    TILES: "rows, columns = (m - 1) // tile_m, (n - 1) // tile_n\nreturn 1 + rows + columns + rows * columns",
    WAVES: """
        from fractions import Fraction
        from math import ceil

        return ceil(Fraction(tiles, sms))
    """,
    LAST: "rest = tiles - tiles // sms * sms\nreturn 1.0 if rest == 0 else rest / sms",
    TIME: """
        one_sm = peak_flops / sms
        total = num_tiles(m=m, n=n, tile_m=tile_m, tile_n=tile_n)
        waves = num_waves(total, sms)
        return waves * (tile_m * tile_n * k * 2) / one_sm
    """,
})  # fmt: skip
also_right("bits and signs", {
    TILES: "return (~(m - 1) // tile_m * -1) * (~(n - 1) // tile_n * -1)",
    WAVES: "full, rest = tiles // sms, tiles % sms\nreturn full if rest == 0 else full + 1",
    LAST: "return 1 - (-tiles % sms) / sms",
    TIME: "return 2.0 * tile_m * tile_n * k * sms * num_waves(num_tiles(m, n, tile_m, tile_n), sms) / peak_flops",
})  # fmt: skip

# ---- 1.9: divergence
CYCLES, WASTED, EXECUTED = "1.9: cycles of a warp", "1.9: wasted lane-cycles", "1.9: what a warp executes"
also_right("a generator that calls itself", {
    EXECUTED: """
        def walk(instructions, lanes):
            for each in instructions if lanes else ():
                if isinstance(each, If):
                    answers = {lane: each.condition(lane) for lane in lanes}
                    yield from walk(each.then, [lane for lane in lanes if answers[lane]])
                    yield from walk(each.otherwise, [lane for lane in lanes if not answers[lane]])
                else:
                    yield each.cycles, len(lanes)

        return list(walk(program, active))
    """,
})  # fmt: skip
also_right("a match statement", {
    CYCLES: """
        total = 0
        for cycles, _ in executed(program, list(range(warp_size))):
            total += cycles
        return total
    """,
    EXECUTED: """
        steps = []
        for instruction in program:
            if not active:
                break
            match instruction:
                case If(condition=asks, then=then, otherwise=otherwise):
                    yes, no = [], []
                    for lane in active:
                        (yes if asks(lane) else no).append(lane)
                    steps.extend(executed(then, yes) + executed(otherwise, no))
                case Op(cycles=cycles):
                    steps.append((cycles, len(active)))
        return steps
    """,
})  # fmt: skip
also_right("masks of bits", {
    CYCLES: "return sum(step[0] for step in executed(program, range(warp_size)))",
    EXECUTED: """
        def run(instructions, mask):
            out = []
            if mask == 0:
                return out
            for each in instructions:
                if isinstance(each, Op):
                    out.append((each.cycles, mask.bit_count()))
                    continue
                yes = 0
                for lane in range(mask.bit_length()):
                    if mask >> lane & 1 and each.condition(lane):
                        yes |= 1 << lane
                out += run(each.then, yes) + run(each.otherwise, mask & ~yes)
            return out

        return run(program, sum(1 << lane for lane in active))
    """,
})  # fmt: skip
also_right("lane by lane", {
    WASTED: """
        idle = 0
        for cycles, lanes in executed(program, [*range(warp_size)]):
            idle += cycles * warp_size - cycles * lanes
        return idle
    """,
    EXECUTED: """
        if len(active) == 0 or len(program) == 0:
            return []
        first, *rest = program
        if isinstance(first, If):
            taken = list(filter(first.condition, active))
            left = sorted(set(active) - set(taken))
            now = executed(first.then, taken) + executed(first.otherwise, left)
        else:
            now = [(first.cycles, len(active))]
        return now + executed(rest, active)
    """,
})  # fmt: skip

# ---- 1.10: profile and mend a kernel
MOVED, WALK, KERNEL = "1.10: bytes of the kernels", "1.10: sectors of a walk", "1.10: the mended kernel"
also_right("whole rows where they fit, pointers that move along", {
    MOVED: "return (rows * cols * (3 if mended else 5) + rows) * element_size",
    KERNEL: """
        row = tl.program_id(0)
        lanes = tl.arange(0, BLOCK)
        x_ptrs = x_ptr + row * stride_x + lanes
        r_ptrs = residual_ptr + row * stride_residual + lanes
        y_ptrs = y_ptr + row * cols + lanes
        left = cols
        acc = tl.zeros([BLOCK], tl.float32)
        while left > 0:
            y = tl.load(x_ptrs, mask=lanes < left, other=0.0) + tl.load(r_ptrs, mask=lanes < left, other=0.0)
            tl.store(y_ptrs, y, mask=lanes < left)
            acc += y
            x_ptrs += BLOCK
            r_ptrs += BLOCK
            y_ptrs += BLOCK
            left -= BLOCK
        tl.store(sum_ptr + row, tl.sum(acc))
    """,
})  # fmt: skip
also_right("a loop over starts", {
    MOVED: """
        per_row = cols + cols + cols + 1
        if not mended:
            per_row += cols + cols
        return per_row * rows * element_size
    """,
    WALK: """
        import numpy as np

        steps, total = -(-cols // block), 0
        lane = np.arange(block)
        for row in range(rows):
            for step in range(steps):
                column = lane * steps + step if walk == "runs" else step * block + lane
                byte = (row * stride + column) * element_size
                for warp in range(0, block, 32):
                    inside = column[warp : warp + 32] < cols
                    starts = byte[warp : warp + 32][inside]
                    if starts.size:
                        total += sectors_touched(starts.tolist(), element_size)
        return total
    """,
    KERNEL: """
        pid = tl.program_id(axis=0)
        total = 0.0
        for start in range(0, cols, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            m = offs < cols
            a = tl.load(x_ptr + pid * stride_x + offs, m, other=0)
            b = tl.load(residual_ptr + pid * stride_residual + offs, m, other=0)
            tl.store(y_ptr + pid * cols + offs, a + b, m)
            total += tl.sum(tl.where(m, a + b, 0.0), axis=0)
        tl.store(sum_ptr + pid, total)
    """,
})  # fmt: skip
also_right("two tiles at a time", {
    MOVED: "elements = rows + rows * cols * {True: 3, False: 5}[mended]\nreturn elements * element_size",
    WALK: """
        steps = len(range(0, cols, block))
        ways = {"runs": lambda lane, step: lane * steps + step, "tiles": lambda lane, step: step * block + lane}
        column_of = ways[walk]
        total = 0
        for row in range(rows):
            for step in range(steps):
                for warp in range(block // 32):
                    columns = [column_of(32 * warp + i, step) for i in range(32)]
                    first = [(row * stride + column) * element_size for column in columns if column < cols]
                    total += sectors_touched(first, element_size) if len(first) > 0 else 0
        return total
    """,
    KERNEL: """
        row = tl.program_id(0)
        halves = tl.arange(0, 2)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        partial = tl.zeros((2, BLOCK), dtype=tl.float32)
        for start in range(0, cols, 2 * BLOCK):
            col = start + halves
            x = tl.load(x_ptr + row * stride_x + col, mask=col < cols, other=0.0)
            y = x + tl.load(residual_ptr + row * stride_residual + col, mask=col < cols, other=0.0)
            tl.store(y_ptr + row * cols + col, y, mask=col < cols)
            partial += y
        tl.store(sum_ptr + row, tl.sum(tl.sum(partial, axis=1), axis=0))
    """,
})  # fmt: skip
also_right("the last tile apart", {
    MOVED: """
        loops = [(2, 1)] if mended else [(2, 1), (2, 0)]  # matrices read and written
        matrices = sum(read + written for read, written in loops)
        return element_size * (rows * cols * matrices + rows)
    """,
    KERNEL: """
        row, lane = tl.program_id(0), tl.arange(0, BLOCK)
        x_row, r_row, y_row = x_ptr + row * stride_x, residual_ptr + row * stride_residual, y_ptr + row * cols
        whole = cols // BLOCK
        total = 0.0
        for step in range(whole):
            col = step * BLOCK + lane
            y = tl.load(x_row + col) + tl.load(r_row + col)
            tl.store(y_row + col, y)
            total += tl.sum(y)
        if whole * BLOCK < cols:
            col = whole * BLOCK + lane
            y = tl.load(x_row + col, mask=col < cols, other=0.0) + tl.load(r_row + col, mask=col < cols, other=0.0)
            tl.store(y_row + col, y, mask=col < cols)
            total += tl.sum(y)
        tl.store(sum_ptr + row, total)
    """,
})  # fmt: skip
