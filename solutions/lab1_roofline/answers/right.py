"""Unusual right answers to lab 1: other formulas, other loops, other orders than the solution's.

A test fills the lab's places with them, so that the checks are held to answers that are not the solution.
"""

from __future__ import annotations

from utils.checks.answers import Answers

#: What stands in each place, by the label that the place has in the solution.
ANSWERS = Answers(
    {
        "1.1: FLOPs of a dot product": """
        multiplications = additions = n
        return multiplications + additions
        """,
        "1.1: bytes of a dot product": """
        elements = sum((n, n, 1))
        return elements * element_size
        """,
        "1.2: FLOPs of a matmul": """
        return 2 * m * k * n
        """,
        "1.2: bytes of a matmul": """
        return sum(rows * cols * element_size for rows, cols in ((m, k), (k, n), (m, n)))
        """,
        "1.3: FLOPs of a ReLU": """
        comparisons, additions, multiplications = n, 0, 0
        return comparisons + additions + multiplications
        """,
        "1.3: bytes of a ReLU": """
        read = written = n * element_size
        return read + written
        """,
        "1.3: FLOPs of a softmax": """
        operations = ("subtract", "exponentiate", "add", "divide")
        return len(operations) * rows * cols
        """,
        "1.3: bytes of a softmax": """
        row = {"fused": 2 * cols, "three_pass": 4 * cols, "eager": 8 * cols + 4}
        return row[method] * rows * element_size
        """,
        "1.4: FLOPs of attention": """
        hidden = 0
        if causal:
            first, last = max(0, seq_k - seq_q), seq_k - 1  # keys that the first and the last query see, less one
            seen = (last - first + 1) * (first + last + 2) // 2
            hidden = seq_q * seq_k - seen
        return batch * heads * (seq_q * seq_k - hidden) * (4 * head_dim + 5)
        """,
        "1.4: bytes of attention": """
        q = o = batch * heads * seq_q * head_dim * element_size
        k = v = batch * heads * seq_k * head_dim * element_size
        if not materialize:
            return q + k + v + o + batch * heads * seq_q * 4
        s = p = batch * heads * seq_q * seq_k * element_size
        return (q + k + s) + (s + p) + (p + v + o)
        """,
        "1.5: the ridge point": """
        return 1 / (bandwidth / peak_flops)
        """,
        "1.5: the attainable rate": """
        if intensity < ridge_point(peak_flops, bandwidth):
            return bandwidth * intensity
        return peak_flops
        """,
        "1.5: the smallest compute-bound batch": """
        peak, rate = Fraction(peak_flops), Fraction(bandwidth)

        def enough(batch):
            return 2 * batch * d * f * rate >= peak * element_size * (batch * d + d * f + batch * f)

        if 2 * d * f * rate <= peak * element_size * (d + f):
            return None
        high = 1
        while not enough(high):
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high
        """,
        "1.6: seconds of an operator": """
        arithmetic, traffic = flops / peak_flops, bytes_moved / bandwidth
        return arithmetic if arithmetic > traffic else traffic
        """,
        "1.6: the measured bandwidth": """
        best = 0.0
        for point in points:
            best = max(best, point["bytes"] / point["seconds"])
        return best
        """,
        "1.6: the measured peak": """
        short = dtype.endswith("16")
        told = [p for p in points if p["dtype"] == dtype or (short and p["dtype"].endswith("16"))]
        if len(told) == 0:
            raise ValueError(f"none of the {len(points)} points can tell about {dtype}")
        return sorted(p["flops"] / p["seconds"] for p in told)[-1]
        """,
        "1.6: seconds of an operator that was not seen": """
        flops, bytes_moved = operator_cost(kind, params, dtype)
        return max(flops / measured_peak(points, dtype), bytes_moved / measured_bandwidth(points))
        """,
        "1.7: sectors of an access pattern": """
        return len({byte >> 5 for start in addresses for byte in range(start, start + access_bytes)})
        """,
        "1.7: the useful fraction": """
        wanted = set()
        for start in addresses:
            wanted |= {start + i for i in range(access_bytes)}
        return len(wanted) / sum(32 for _ in {byte // 32 for byte in wanted})
        """,
        "1.8: tiles of an output": """
        return ((m + tile_m - 1) // tile_m) * ((n + tile_n - 1) // tile_n)
        """,
        "1.8: waves": """
        full, rest = divmod(tiles, sms)
        return full + (rest > 0)
        """,
        "1.8: utilisation of the last wave": """
        return (tiles % sms or sms) / sms
        """,
        "1.8: time in whole waves": """
        tiles_of_busiest = num_waves(num_tiles(m, n, tile_m, tile_n), sms)
        return tiles_of_busiest * tile_m * tile_n * 2 * k * sms / peak_flops
        """,
        "1.9: cycles of a warp": """
        return sum(cycles for cycles, _ in executed(program, set(range(warp_size))))
        """,
        "1.9: wasted lane-cycles": """
        useful = sum(cycles * lanes for cycles, lanes in executed(program, set(range(warp_size))))
        return warp_size * warp_cycles(program, warp_size) - useful
        """,
        "1.9: what a warp executes": """
        done, waiting = [], [(instruction, frozenset(active)) for instruction in reversed(program)]
        while waiting:
            instruction, lanes = waiting.pop()
            if not lanes:
                continue
            if isinstance(instruction, If):
                yes = frozenset(filter(instruction.condition, lanes))
                waiting += [(each, lanes - yes) for each in reversed(instruction.otherwise)]
                waiting += [(each, yes) for each in reversed(instruction.then)]
            else:
                done.append((instruction.cycles, len(lanes)))
        return done
        """,
        "1.10: bytes of the kernels": """
        matrix, sums = rows * cols * element_size, rows * element_size
        first_loop, second_loop = 3 * matrix, 2 * matrix
        return first_loop + sums if mended else first_loop + second_loop + sums
        """,
        "1.10: sectors of a walk": """
        steps = (cols + block - 1) // block
        requests = {}  # (row, step, warp) -> its sectors
        for row in range(rows):
            for col in range(cols):
                lane, step = divmod(col, steps) if walk == "runs" else (col % block, col // block)
                first = (row * stride + col) * element_size
                sectors = requests.setdefault((row, step, lane // 32), set())
                sectors.update(byte // 32 for byte in range(first, first + element_size))
        return sum(map(len, requests.values()))
        """,
        "1.10: the mended kernel": """
        row = tl.program_id(0)
        lane = tl.arange(0, BLOCK)
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        start = cols // BLOCK * BLOCK  # from the last, partial block of the row back to the first
        while start >= 0:
            mask = lane < cols - start
            x = tl.load(x_ptr + row * stride_x + start + lane, mask=mask, other=0.0)
            residual = tl.load(residual_ptr + row * stride_residual + start + lane, mask=mask, other=0.0)
            tl.store(y_ptr + row * cols + start + lane, residual + x, mask=mask)
            sums += residual + x
            start -= BLOCK
        tl.store(sum_ptr + row, tl.sum(sums, axis=0))
        """,
    }
)
