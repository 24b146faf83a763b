"""Wrong answers to lab 1, each with one mistake, and what its diagnosis must say: edits of the solution's own lines.

The few that change what a place does not hold, such as which arguments are refused, are whole functions.
"""

from __future__ import annotations

from utils.checks.answers import Answers

ANSWERS = Answers()
wrong, wrong_function = ANSWERS.wrong, ANSWERS.wrong_function

# ---- 1.1 dot product ----
FLOPS, BYTES = "1.1: FLOPs of a dot product", "1.1: bytes of a dot product"
TWICE = "multiply-add is counted as one operation"
wrong(FLOPS, "fused multiply-adds", TWICE, '"classic wrong answers" 1', edits={"2 * n": "n"})
wrong(FLOPS, "one addition fewer", "first addition is left out", edits={"2 * n": "2 * n - 1"})
wrong(
    FLOPS,
    "counted by NumPy",
    "the int64",
    "which cannot overflow",
    instead="import numpy as np\n\nreturn np.int64(2) * n",
)
wrong(FLOPS, "twice in floats", "beyond 2**53, where a float loses ones", edits={"2 * n": "int(2.0 * n)"})
wrong(BYTES, "reads only", "result is not written", edits={" + 1": ""})
wrong(BYTES, "elements only", "elements are counted, not bytes", edits={" * element_size": ""})
wrong(BYTES, "always 16 bit", "every element is taken to have 2 bytes", edits={"element_size": "2"})
wrong(BYTES, "writes products", "a whole vector is written", edits={"+ 1": "+ n"})
wrong(BYTES, "average as float", "the float", "//", instead="return (4 * n + 2) * element_size / 2")


@wrong_function("1.1", "dot_product_flops", "(n=-4)", "for an invalid argument", "ValueError")
def negative_lengths_let_in(n):
    return 2 * n


# ---- 1.2 matmul ----
FLOPS, BYTES = "1.2: FLOPs of a matmul", "1.2: bytes of a matmul"
wrong(FLOPS, "three loops", TWICE, edits={"dot_product_flops(k)": "k"})
wrong(FLOPS, "textbook additions", "one addition short", edits={"dot_product_flops(k)": "(k + (k - 1))"})
wrong(FLOPS, "outputs only", "k is left out", edits={"dot_product_flops(k)": "2"})
wrong(FLOPS, "counted by NumPy", "the int64", "use int", instead="import numpy as np\n\nreturn np.int64(2) * m * k * n")
wrong(FLOPS, "32 bit", "every other case passes", "beyond 2**53", instead="return 2 * m * k * n % 2**32")
wrong(BYTES, "inputs only", "output is not written", edits={" + m * n": ""})
wrong(
    BYTES, "no reuse", "both operands of every multiplication come from HBM", edits={"m * k + k * n": "m * n * 2 * k"}
)
wrong(BYTES, "accumulates in memory", "read as well as written", edits={"m * n)": "2 * m * n)"})
wrong(BYTES, "always single precision", "every element is taken to have 4 bytes", edits={"element_size": "4"})


@wrong_function("1.2", "matmul_flops", "cannot be called as", "m, k, n")
def takes_a_shape(shape):
    return 2 * shape[0] * shape[1] * shape[2]


# ---- 1.3 ReLU and softmax ----
FLOPS, BYTES = "1.3: FLOPs of a softmax", "1.3: bytes of a softmax"
wrong("1.3: FLOPs of a ReLU", "no arithmetic", "comparison is counted as nothing", instead="return 0")
wrong("1.3: bytes of a ReLU", "in place", "not written", edits={"2 * n": "n"})
wrong(FLOPS, "five passes", "comparisons that find the maximum are counted", edits={"4 * rows": "5 * rows"})
wrong(FLOPS, "without the maximum", "left out", edits={"4 * rows": "3 * rows"})
wrong(FLOPS, "divides the row once", "one division a row", edits={"4 * rows * cols": "rows * (3 * cols + 1)"})
wrong(BYTES, "passes write", "each of the three passes also writes", edits={"3 * matrix + matrix": "6 * matrix"})
wrong(BYTES, "statistics are free", "row statistics are left out", edits={" + rows": ""})
ONLINE = "three passes read", "the maximum, the sum and the result"
wrong(BYTES, "online softmax", *ONLINE, edits={"3 * matrix + matrix": "2 * matrix + matrix"})
wrong(
    BYTES,
    "statistics appear by themselves",
    "half of the trips of the row statistics",
    edits={"maximum = matrix + rows": "maximum = matrix", "row_sum = matrix + rows": "row_sum = matrix"},
)
wrong(BYTES, "everything fused", "stayed on the chip", edits={'if method == "fused"': 'if method != "three_pass"'})

wrong(
    BYTES,
    "read twice",
    "fused, it stays on the chip",
    "4",
    edits={"matrix + matrix\nelif": "matrix + matrix + matrix\nelif"},
)
wrong(
    BYTES,
    "fused, read and not written",
    "read but not written, or written but not read",
    "4",
    edits={"matrix + matrix\nelif": "matrix\nelif"},
)
wrong(
    BYTES,
    "statistics in HBM",
    "they stay on the chip",
    edits={"3 * matrix + matrix": "4 * matrix + 4 * rows"},
)
wrong(
    BYTES,
    "three trips of the statistics",
    "one of the four trips",
    edits={"row_sum = matrix + rows": "row_sum = matrix"},
)
wrong(
    BYTES,
    "subtracts and exponentiates at once",
    "two kernels are taken as one",
    edits={"exponential = matrix + matrix": "exponential = 0"},
)
wrong(BYTES, "four kernels", "or the one for e is left out", edits={"subtraction + exponential": "subtraction"})
wrong(BYTES, "two kernels", "or two of the five kernels", edits={"maximum + subtraction + exponential + ": ""})
wrong(BYTES, "three kernels", "or three of the five kernels", edits={"maximum + subtraction + ": ""})
SUBTRACTED = "moved = maximum + subtraction"
wrong(BYTES, "a kernel twice", "which factor or term", edits={SUBTRACTED: f"{SUBTRACTED} + subtraction"})
wrong(BYTES, "the kernel for e twice", "a kernel is counted twice", edits={"+ exponential": "+ 2 * exponential"})
wrong(
    BYTES,
    "a read less a write",
    "or subtracted",
    edits={"exponential = matrix + matrix": "exponential = matrix - matrix"},
)
wrong(FLOPS, "comparisons of a row", "cols - 1 per row", edits={"4 * rows * cols": "rows * (5 * cols - 1)"})

# ---- 1.4 attention ----
FLOPS, BYTES = "1.4: FLOPs of attention", "1.4: bytes of attention"
PAIRS, FIRST_AND_LAST = "rows * (seq_k - rows + 1 + seq_k) // 2", "(seq_k - rows + 1 + seq_k)"
wrong(FLOPS, "causal costs the same", "mask is ignored", edits={"if causal:": "if False:"})
wrong(FLOPS, "exactly half", "half of the square", edits={PAIRS: "seq_q * seq_k // 2"})
TOP_LEFT = "rows * (rows + 1) // 2 + (seq_q - rows) * seq_k"
wrong(FLOPS, "top-left mask", "begins at the first query", edits={PAIRS: TOP_LEFT})
wrong(FLOPS, "triangle of queries", "whatever seq_k is", edits={PAIRS: "seq_q * (seq_q + 1) // 2"})
wrong(
    FLOPS,
    "counts in floats",
    "every case with a count beyond 2**53",
    edits={
        "batch * heads * pairs": "int(float(batch * heads * pairs)",
        "+ 2 * head_dim)": "+ 2 * head_dim))",
    },
)
wrong(FLOPS, "scores are not used", "one of the two products is left out", edits={" + 2 * head_dim)": ")"})
wrong(FLOPS, "products only", "softmax and the scale are left out", edits={" + 1 + 4": ""})
wrong(FLOPS, "scales twice", "or the scale twice", edits={" + 1 + 4": " + 2 + 4"})
wrong(FLOPS, "Q K^T only", "one of the two products are left out", edits={" + 1 + 4 + 2 * head_dim)": ")"})
wrong(
    BYTES,
    "nothing between",
    "is left out",
    "so with materialize=",
    edits={"inputs_and_output + between": "inputs_and_output"},
)
wrong(BYTES, "Q or O", "Q is read and O is written", edits={"(2 * seq_q + 2": "(seq_q + 2"})
wrong(FLOPS, "sees only the past", "diagonal is left out", edits={FIRST_AND_LAST: "(seq_k - rows + seq_k - 1)"})
wrong(FLOPS, "one head", "heads are not counted", edits={"batch * heads": "batch"})
COST = "(2 * head_dim + 1 + 4 + 2 * head_dim)"
in_numpy = {
    "if causal:": "import numpy as np\n\nif causal:",
    "batch * heads * pairs": "np.int64(batch * heads) * pairs",
}
wrong(FLOPS, "counted by NumPy", "the int64", edits=in_numpy)
wrong(FLOPS, "triangle of keys", "a triangle of seq_k keys", edits={PAIRS: "seq_k * (seq_k + 1) // 2"})
wrong(FLOPS, "formula of a square", "as many queries as keys only", edits={PAIRS: "seq_q * (seq_k + 1) // 2"})
wrong(FLOPS, "always causal", "although causal is False", edits={"if causal:": "if True:"})
wrong(FLOPS, "what is hidden", "the hidden pairs are counted", edits={PAIRS: f"seq_q * seq_k - {PAIRS}"})
wrong(FLOPS, "textbook dot products", "an addition of a dot product", edits={"(2 * head_dim +": "(2 * head_dim - 1 +"})
wrong(FLOPS, "no softmax", "the softmax is left out", edits={" + 4 + 2": " + 2"})
masked_first = {
    f"pairs * {COST}": "(pairs * 2 * head_dim + seq_q * seq_k * (5 + 2 * head_dim))",
}
wrong(FLOPS, "masks the first product", "only Q K^T is masked", edits=masked_first)
GAUSS = "seq_q * (seq_k - seq_q + 1 + seq_k) // 2"
wrong(FLOPS, "Gauss without care", "negative number of keys", edits={PAIRS: GAUSS})
wrong(BYTES, "scores travel once", "S and P", edits={"4 * seq_q * seq_k": "2 * seq_q * seq_k"})
wrong(
    BYTES,
    "heads share scores",
    "each head has its own",
    edits={
        "heads * (inputs_and_output + between)": "(heads * inputs_and_output + (1 if materialize else heads) * between)"
    },
)
wrong(
    BYTES,
    "forgets the statistics",
    "log-sum-exp of each query is left out",
    edits={"else:\n    between = 4 * seq_q": "else:\n    between = 0"},
)
wrong(
    BYTES,
    "maximum and sum",
    "two numbers are written for each query",
    edits={"between = 4 * seq_q\n": "between = 8 * seq_q\n"},
)
wrong(BYTES, "statistics of keys", "one log-sum-exp per key", edits={"between = 4 * seq_q\n": "between = 4 * seq_k\n"})
wrong(
    BYTES,
    "keys for all heads",
    "K and V are counted once for all heads",
    edits={
        "(2 * seq_q + 2 * seq_k)": "(2 * seq_q)",
        "(inputs_and_output + between)": "(inputs_and_output + between) + batch * 2 * seq_k * head_dim * element_size",
    },
)
wrong(BYTES, "one length for all", "K and V have seq_k", edits={"2 * seq_k)": "2 * seq_q)"})
wrong(BYTES, "statistics always", "only the one kernel writes it", edits={"size  #": "size + 4 * seq_q  #"})

# ---- 1.5 ridge point, attainable rate, smallest batch ----
RATE, BATCH = "1.5: the attainable rate", "1.5: the smallest compute-bound batch"
LOWER = "min(peak_flops, intensity * bandwidth)"
upside_down = {"peak_flops / bandwidth": "bandwidth / peak_flops"}
wrong("1.5: the ridge point", "upside down", "bandwidth is divided by peak", edits=upside_down)
wrong(RATE, "no ceiling", "memory is taken to limit always", edits={LOWER: "intensity * bandwidth"})
wrong(RATE, "optimist", "higher of the two roofs", edits={"min": "max"})
ADDED = "intensity / (1 / bandwidth + intensity / peak_flops)"
wrong(RATE, "one after the other", "arithmetic and traffic are added", edits={LOWER: ADDED})
wrong(RATE, "fraction of peak", "share of the peak", edits={LOWER: "min(1.0, intensity * bandwidth / peak_flops)"})
GIVES_UP = "if gained_per_row <= 0:\n    return None\n"
QUOTIENT = "threshold * d * f / gained_per_row"
UP = f"math.ceil({QUOTIENT})"
ZERO = "raised ZeroDivisionError", "exactly zero"
RULE_OF_THUMB = "return math.ceil(element_size / 2 * peak_flops / bandwidth)"
wrong(BATCH, "rule of thumb", "as if d and f were endless", instead=RULE_OF_THUMB)
wrong(BATCH, "rounds down", "rounded down", edits={UP: f"int({QUOTIENT})"})
wrong(BATCH, "one row too many", "also where B is whole", edits={UP: f"1 + math.floor({QUOTIENT})"})
wrong(BATCH, "does not give up", "negative B", edits={"<= 0": "== 0"})
wrong(BATCH, "gives up nowhere", "negative B", edits={GIVES_UP: ""})
IN_FLOATS = {"Fraction(peak_flops) / Fraction(bandwidth)": "peak_flops / bandwidth"}
wrong(BATCH, "in floats", "off by one where B is whole", '"classic wrong answers" 5', edits=IN_FLOATS)
wrong(
    BATCH,
    "a search that gives up",
    "got None",
    "very large batch fails",
    edits={UP: "next((b for b in range(1, 5000) if b * gained_per_row >= threshold * d * f), None)"},
)
wrong(BATCH, "comparison turned round", "None belongs where", edits={"<= 0": "> 0"})
wrong(BATCH, "forgets zero", *ZERO, "rates.py", edits={"<= 0": "< 0"})
wrong(
    BATCH,
    "forgets zero with NumPy",
    "raised OverflowError",
    "exactly zero",
    instead="""
import numpy as np

threshold = np.float64(element_size * peak_flops / bandwidth)
with np.errstate(divide="ignore"):
    batch = d * f * threshold / (2 * d * f - (d + f) * threshold)
return None if batch < 0 else math.ceil(batch)
""",
)
wrong(
    BATCH,
    "forgets zero and solves for the inverse",
    *ZERO,
    instead="""
inverse = 2 * bandwidth / (element_size * peak_flops) - 1 / d - 1 / f
return math.ceil(1 / inverse) if inverse >= 0 else None
""",
)
wrong(BATCH, "forgets zero and rounds down", *ZERO, edits={"<= 0": "< 0", UP: f"int({QUOTIENT})"})
wrong(
    BATCH,
    "gives up one step late",
    "every case with weights for which",
    "never onto it",
    edits={"<= 0": "< 0", "/ gained_per_row": "/ max(gained_per_row, 1e-6)"},
)
wrong(
    BATCH,
    "at least one row",
    "batch of 1 is returned where no batch is enough",
    edits={"<= 0": "== 0", UP: f"max(1, {UP})"},
)
wrong(BATCH, "never writes", "output's bytes are left out", edits={"threshold * (d + f)": "threshold * d"})


@wrong_function("1.5", "attainable_rate", "bandwidth=-2.0", "for an invalid argument")
def trusts_the_data_sheet(intensity, peak_flops, bandwidth):
    if intensity <= 0 or peak_flops <= 0:
        raise ValueError(f"{intensity} FLOP/B at {peak_flops} FLOP/s")
    return min(peak_flops, intensity * bandwidth)


# ---- 1.6 predicted and measured time ----
SECONDS, BANDWIDTH, PEAK = "1.6: seconds of an operator", "1.6: the measured bandwidth", "1.6: the measured peak"
UNSEEN = "1.6: seconds of an operator that was not seen"
LONGER = "max(flops / peak_flops, bytes_moved / bandwidth)"
wrong(SECONDS, "no overlap", "two times are added", edits={LONGER: "flops / peak_flops + bytes_moved / bandwidth"})
wrong(SECONDS, "best case", "shorter of the two times", edits={"max": "min"})
wrong(SECONDS, "in microseconds", "microseconds", edits={"max": "1e6 * max"})
wrong(
    SECONDS,
    "by intensity",
    "raised ZeroDivisionError",
    "prediction.py",
    "intensity",
    instead="intensity = flops / bytes_moved\nreturn flops / min(peak_flops, intensity * bandwidth)",
)
mean = {"max(": "sum(", "in points)": "in points) / len(points)"}
wrong(BANDWIDTH, "average bandwidth", "mean over the points", edits=mean)
wrong(
    BANDWIDTH,
    "extremes",
    "most bytes are divided by the least seconds",
    instead='return max(p["bytes"] for p in points) / min(p["seconds"] for p in points)',
)
NOTHING = 'if not rates:\n    raise ValueError(f"no point was measured in {dtype}")\n'
ALIKE, IN_DTYPE = '{"bf16", "fp16"} if dtype in ("bf16", "fp16") else {dtype}', ' if point["dtype"] in alike'
wrong(PEAK, "one peak for all", "dtype is ignored", edits={IN_DTYPE: ""})
wrong(
    PEAK,
    "exact dtype only",
    "raised ValueError: max()",
    "for 'fp16'",
    "only the other one's points tell about",
    edits={ALIKE: "{dtype}", NOTHING: ""},
)
wrong(
    PEAK,
    "own dtype first",
    "only where there is no point in dtype itself",
    edits={ALIKE: f'{{dtype}} if any(p["dtype"] == dtype for p in points) else {ALIKE}'},
)
wrong(PEAK, "leaves it to max", "raised ValueError: max", "contains 'fp16'", "'dtype': 'fp32'", edits={NOTHING: ""})
wrong(
    PEAK,
    "zero where nothing was measured",
    "returned 0 for an invalid argument",
    "contains 'fp16'",
    edits={NOTHING: "", "max(rates)": "max(rates, default=0)"},
)
ROOFS = "measured_peak(points, dtype), measured_bandwidth(points)"
wrong(UNSEEN, "everything is traffic", "memory is taken to limit always", edits={"seconds(flops, ": "seconds(0, "})
wrong(
    UNSEEN,
    "remembers the roofs",
    "every case with the points of a GPU that takes 8 times as long",
    edits={ROOFS: '51e12 if dtype == "fp32" else 812e12, 3.12e12'},
)
BOTH_TIMES = "flops / measured_peak(points, dtype) + bytes_moved / measured_bandwidth(points)"
ADDED = {f"predict_seconds(flops, bytes_moved, {ROOFS})": BOTH_TIMES}
wrong(UNSEEN, "waits for both", "the two times are added", edits=ADDED)
wrong(UNSEEN, "takes a third longer to be safe", "8 seconds each", edits={"return ": "return 4e-6 + 1.3 * "})
wrong(UNSEEN, "in milliseconds", "milliseconds", edits={"return ": "return 1000 * "})
wrong(UNSEEN, "everything takes twice as long", "half of the predictions", edits={"return ": "return 1.9 * "})


@wrong_function("1.6", "predict_seconds", "bandwidth=-2.0", "for an invalid argument", "contains -2.0")
def refuses_counts_only(flops, bytes_moved, peak_flops, bandwidth):
    if flops < 0 or bytes_moved < 1 or peak_flops <= 0:
        raise ValueError(f"cannot time {flops} FLOPs and {bytes_moved} bytes at {peak_flops} FLOP/s")
    return max(flops / peak_flops, bytes_moved / bandwidth)


@wrong_function("1.6", "predict_seconds", "(flops=-5", "for an invalid argument", "contains -5")
def refuses_bytes_only(flops, bytes_moved, peak_flops, bandwidth):
    if bytes_moved < 1:
        raise ValueError(f"cannot time {bytes_moved} bytes")
    return max(flops / peak_flops, bytes_moved / bandwidth)


# ---- 1.7 sectors ----
SECTORS, USEFUL = "1.7: sectors of an access pattern", "1.7: the useful fraction"
TOTAL = "return (len(addresses) * access_bytes + 31) // 32"
wrong(SECTORS, "total over 32", "bytes are added up and divided by 32", instead=TOTAL)
wrong(SECTORS, "first bytes", "only the first byte of each access", edits={"last + 1": "first + 1"})
each_lane = {"touched: set[int] = set()": "touched = []", "touched.update": "touched.extend"}
wrong(SECTORS, "every lane for itself", "share it", edits=each_lane)
whole_range = {"len(touched)": "max(touched) - min(touched) + 1"}
wrong(SECTORS, "whole range", "between the lowest and the highest address", edits=whole_range)
wrong(SECTORS, "lines, not sectors", "cache lines of 128 bytes", edits={"SECTOR_BYTES": "128"})
wrong(SECTORS, "one byte too far", "byte after the access", edits={"access_bytes - 1": "access_bytes"})
wrong(
    SECTORS,
    "looks in three places",
    "accesses that straddle sectors",
    edits={"range(first, last + 1)": "((address + place) // 32 for place in (0, access_bytes // 2, access_bytes - 1))"},
)
requests = {"len(wanted)": "len(addresses) * access_bytes"}
wrong(USEFUL, "counts requests", "two lanes want is counted twice", edits=requests)
wrong(USEFUL, "amplification", "inverse", edits={"return ": "return 1 / (", "SECTOR_BYTES)": "SECTOR_BYTES))"})

# ---- 1.8 tiles and waves ----
TILES, WAVES, LAST = "1.8: tiles of an output", "1.8: waves", "1.8: utilisation of the last wave"
TIME = "1.8: time in whole waves"
wrong(TILES, "whole tiles only", "tiles at the border are left out", instead="return (m // tile_m) * (n // tile_n)")
wrong(TILES, "by area", "area is divided", instead="return -(-m * n // (tile_m * tile_n))")
one_more = "return (1 + m // tile_m) * (1 + n // tile_n)"
wrong(TILES, "always one more", "one tile is always added", instead=one_more)
in_floats = "import math\n\nreturn math.ceil(m / tile_m) * math.ceil(n / tile_n)"
wrong(TILES, "float ceil", "2**53", instead=in_floats)
wrong(WAVES, "full waves", "partial wave is left out", instead="return tiles // sms")
wrong(WAVES, "waves in floats", "a float is rounded up", instead="import math\n\nreturn math.ceil(tiles / sms)")
wrong(LAST, "modulo", "full last wave gives 0", instead="return tiles % sms / sms")
wrong(LAST, "average wave", "mean over all waves", instead="return tiles / (sms * num_waves(tiles, sms))")
fluid = {"num_waves(num_tiles(m, n, tile_m, tile_n), sms)": "num_tiles(m, n, tile_m, tile_n) / sms"}
wrong(TIME, "fluid tiles", "waves are not rounded", edits=fluid)
wrong(TIME, "FLOPs over peak", "only the useful FLOPs are timed", instead="return 2 * m * n * k / peak_flops")
wrong(TIME, "every SM is a GPU", "whole GPU's rate", edits={"(peak_flops / sms)": "peak_flops"})
cut = {"tile_m * tile_n * k": "min(m, tile_m) * min(n, tile_n) * k"}
wrong(TIME, "cuts the tile to the matrix", "a matrix smaller than a tile", edits=cut)

# ---- 1.9 divergence ----
CYCLES, WASTED, STEPS = "1.9: cycles of a warp", "1.9: wasted lane-cycles", "1.9: what a warp executes"
wrong(
    CYCLES,
    "sides in parallel",
    "run at the same time",
    instead="""
def cycles(steps, lanes):
    total = 0
    for step in steps if lanes else ():
        if isinstance(step, If):
            yes = [lane for lane in lanes if step.condition(lane)]
            no = [lane for lane in lanes if not step.condition(lane)]
            total += max(cycles(step.then, yes), cycles(step.otherwise, no))
        else:
            total += step.cycles
    return total

return cycles(program, range(warp_size))
""",
)
both_sides = {"if not active:\n    return steps\n": ""}
wrong(STEPS, "never skips", "both sides of a branch are always walked", edits=both_sides)
wrong(
    STEPS,
    "forgets the mask",
    "asks all lanes",
    edits={
        "instruction.then, taken": "instruction.then, active if taken else []",
        "[lane for lane in active if lane not in taken]": "active if len(taken) < len(active) else []",
    },
)
apart = {
    "return sum(": """
def groups(steps, lanes):
    if not steps or not lanes:
        return []
    step, rest = steps[0], steps[1:]
    if isinstance(step, Op):
        return [(step.cycles, len(lanes)), *groups(rest, lanes)]
    yes = [lane for lane in lanes if step.condition(lane)]
    no = [lane for lane in lanes if not step.condition(lane)]
    return groups([*step.then, *rest], yes) + groups([*step.otherwise, *rest], no)

return sum(""",
    "executed(program,": "groups(list(program),",
}
wrong(CYCLES, "never meets again", "what follows a branch is run once for each side", edits=apart)
wrong(WASTED, "never meets again", "what follows a branch is run once for each side", edits=apart)
leader = {"[lane for lane in active if instruction.condition(lane)]": "active if instruction.condition(0) else []"}
wrong(STEPS, "follows the leader", "lane 0's branch", edits=leader)
wrong(CYCLES, "counts instructions", "operations are counted, not their cycles", edits={"sum(cycles": "sum(1"})
wrong(WASTED, "the useful ones", "useful lane-cycles are returned", edits={"(warp_size - lanes)": "lanes"})
wrong(
    WASTED,
    "idle within the branch",
    "idle already before an inner branch",
    instead="""
def wasted(steps, lanes, outer):
    total = 0
    for step in steps if lanes else ():
        if isinstance(step, Op):
            total += step.cycles * (outer - len(lanes))
        else:
            yes = [lane for lane in lanes if step.condition(lane)]
            total += wasted(step.then, yes, len(lanes))
            total += wasted(step.otherwise, [lane for lane in lanes if lane not in yes], len(lanes))
    return total

return wasted(program, list(range(warp_size)), warp_size)
""",
)
once = {"cycles * (warp_size": "(warp_size"}
wrong(WASTED, "idle lanes per instruction", "idle lanes are counted once an operation", edits=once)

# ---- 1.10 a kernel, profiled and mended ----
BYTES, WALK, KERNEL = "1.10: bytes of the kernels", "1.10: sectors of a walk", "1.10: the mended kernel"
PREDICTED, MENDED = "exercise 1.10 (predictions)", "exercise 1.10 (profile and mend a kernel)"


def residual_wrong(place, name, number, *says, **how):
    """A wrong answer whose message names a classic wrong answer; without a number it names none."""
    of = f'"classic wrong answers" {number}'
    wrong(place, name, MENDED if place == KERNEL else PREDICTED, *says, *([of] if number else []), **how)


TWO_LOOPS, PASSES = "2 if mended else 4", "(matrices_read + 1)"
residual_wrong(BYTES, "one loop as in PyTorch", 1, "the second loop's loads are left out", edits={TWO_LOOPS: "2"})
residual_wrong(BYTES, "nothing mended", 1, "with mended=True, x and residual are read once", edits={TWO_LOOPS: "4"})
residual_wrong(BYTES, "y is free", 2, "one of the passes is left out", edits={PASSES: "matrices_read"})
residual_wrong(BYTES, "sums are free", 2, "the sums are left out", edits={" + rows)": ")"})
residual_wrong(BYTES, "sums of columns", 2, "one sum per column", edits={"+ rows)": "+ cols)"})
residual_wrong(BYTES, "floats only", 2, "taken to have 4 bytes", edits={"element_size": "4"})
LANES = 'lane * steps + step if walk == "runs" else step * block + lane'
residual_wrong(
    WALK, "always coalesced", 3, "the bytes are divided by 32", instead="return -(-rows * cols * element_size // 32)"
)
residual_wrong(
    WALK,
    "rows coalesced",
    3,
    "each row's bytes are divided by 32",
    instead="return rows * -(-cols * element_size // 32)",
)
residual_wrong(WALK, "walks swapped", 3, "this walk is taken for the other one", edits={'== "runs"': '== "tiles"'})
residual_wrong(WALK, "a sector per lane", 4, "one sector per element", instead="return rows * cols")
residual_wrong(
    WALK,
    "each sector once",
    4,
    "each step asks for it again",
    instead="""
touched = set()
for row in range(rows):
    for col in range(cols):
        first = (row * stride + col) * element_size
        touched |= {first // 32, (first + element_size - 1) // 32}
return len(touched)
""",
)
residual_wrong(
    WALK,
    "a request per block",
    4,
    "each warp of 32 lanes asks for itself",
    edits={"range(0, block, 32)": "(0,)", "warp + 32": "block"},
)
residual_wrong(WALK, "rows without gaps", 5, "the stride is left out", edits={"row * stride + col": "row * cols + col"})
residual_wrong(WALK, "every row aligned", 5, "begin where a sector does", edits={"row * stride + col": "col"})
residual_wrong(
    WALK,
    "a stride in bytes",
    5,
    "the stride is taken in bytes",
    edits={"(row * stride + col) * element_size": "row * stride + col * element_size"},
)
residual_wrong(WALK, "nothing masked", 5, "lanes beyond the row's end", edits={" if col < cols": ""})
residual_wrong(WALK, "whole steps only", 5, "the last step is left out", edits={"-(-cols // block)": "cols // block"})
residual_wrong(WALK, "one program", 5, "one row is counted", edits={"range(rows)": "range(1)"})
residual_wrong(WALK, "first bytes of lanes", 0, "walk_sectors", edits={"sectors_touched(addresses, element_size)": "1"})
TILES, STORE, ADD = "lane + step * BLOCK", "tl.store(y_row + col, y, mask=mask)", "row_sum += tl.sum(y)"
IN_RUNS = "lane * tl.cdiv(cols, BLOCK) + step"
residual_wrong(KERNEL, "one pass in runs", 7, "sectors loaded", "a whole run apart", edits={TILES: IN_RUNS})
SECOND_LOOP = """
for step in range(tl.cdiv(cols, BLOCK)):
    col = lane + step * BLOCK
    mask = col < cols
    y = tl.load(y_row + col, mask=mask, other=0.0)
    row_sum += tl.sum(y)
tl.store(sum_ptr"""
AGAIN = SECOND_LOOP.replace(
    "y = tl.load(y_row + col, mask=mask, other=0.0)",
    "y = tl.load(x_row + col, mask=mask, other=0.0) + tl.load(residual_row + col, mask=mask, other=0.0)",
)
LAST = {f"    {ADD}\n": "", "\ntl.store(sum_ptr": AGAIN}
residual_wrong(KERNEL, "two passes in tiles", 6, "x_ptr: expected", "bytes loaded", "second pass", edits=LAST)
residual_wrong(
    KERNEL,
    "given as it is",
    6,
    "x_ptr: expected",
    "second pass",
    edits={TILES: IN_RUNS, f"    {ADD}\n": "", "\ntl.store(sum_ptr": AGAIN},
)
READS_BACK = {f"    {ADD}\n": "", "\ntl.store(sum_ptr": SECOND_LOOP}
residual_wrong(KERNEL, "reads y back", 6, "y_ptr: expected 0 bytes loaded", "second pass", edits=READS_BACK)
residual_wrong(KERNEL, "sum of the last step", 8, "only the last step's elements", edits={"row_sum += ": "row_sum = "})
residual_wrong(
    KERNEL,
    "y with x's stride",
    8,
    "y has no gaps between its rows",
    edits={"y_ptr + row * cols": "y_ptr + row * stride_x"},
)
residual_wrong(KERNEL, "sum of x", 8, "this is the sum of x: add up y", edits={"tl.sum(y)": "tl.sum(x)"})
UNMASKED = {", mask=mask, other=0.0": ""}
residual_wrong(KERNEL, "loads without a mask", 9, "out-of-bounds access", edits=UNMASKED)
residual_wrong(KERNEL, "no other", 9, "a masked load without `other`", edits={", other=0.0": ""})
residual_wrong(
    KERNEL,
    "store without a mask",
    0,
    "out-of-bounds accesses",
    "wrote y_ptr",
    edits={STORE: "tl.store(y_row + col, y)"},
)
residual_wrong(
    KERNEL, "rows without their stride", 0, "only non-contiguous inputs fail", edits={"* stride_x": "* cols"}
)
residual_wrong(
    KERNEL, "whole steps only", 8, "the last, partial step is left out", edits={"tl.cdiv(cols, BLOCK)": "cols // BLOCK"}
)


residual_wrong(KERNEL, "a step per element", 0, "every lane is masked off", edits={"tl.cdiv(cols, BLOCK)": "cols"})


@wrong_function("1.10", "residual_add", "no Triton kernel is launched", "reproduce: check_residual_add(")
def leaves_it_to_pytorch(x, residual):
    y = x + residual
    return y, y.sum(1)
