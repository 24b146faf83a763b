"""Wrong answers to lab 1, each with one mistake, and what its diagnosis must say: edits of the solution's own lines.

The few that change what a place does not hold, such as which arguments are refused, are whole functions.
"""

from __future__ import annotations

from solutions import lab1_roofline as solution
from utils.checks.answers import Answers
from utils.operators import require_sizes

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
wrong(FLOPS, "sees only the past", "diagonal is left out", edits={FIRST_AND_LAST: "(seq_k - rows + seq_k - 1)"})
wrong(FLOPS, "one head", "heads are not counted", edits={"batch * heads": "batch"})
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

# ---- 1.10 the operator table ----
LAYER, SHARES = "1.10: FLOPs of a layer by class", "1.10: shares"
CONTRACTION, NORMALISATION, ELEMENT_WISE = ("under 'contraction'", "under 'normalisation'", "under 'element-wise'")
wrong(LAYER, "backward like forward", CONTRACTION, "counted as one product", edits={"*= 3": "*= 2"})
wrong(LAYER, "forgets attention", CONTRACTION, "Q K^T and P V, are left out", edits={" + attention": ""})
wrong(LAYER, "one matrix for QKV", CONTRACTION, "one projection", edits={"4 * matmul": "2 * matmul"})
wrong(LAYER, "narrow feed-forward", CONTRACTION, "hidden wide", edits={"4 * hidden": "hidden"})
one_matrix = {"batch * heads * seq_len * seq_len": "batch * seq_len * seq_len"}
wrong(LAYER, "one score matrix", NORMALISATION, "score matrix for each head", edits=one_matrix)
none = {" + 9 * activations": ""}
wrong(LAYER, "biases have no gradient", NORMALISATION, "gradients of the biases are left out", edits=none)
NARROW = "linear 1's bias is taken to be hidden wide"
wrong(LAYER, "six equal gradients", NORMALISATION, NARROW, edits={"+ 9 *": "+ 6 *"})
wrong(
    LAYER,
    "narrow gradients elsewhere",
    NORMALISATION,
    "not with the element-wise operators",
    edits={"+ 9 *": "+ 4 *", "(6 + 2)": "(6 + 2 + 5)"},
)
wrong(
    LAYER,
    "every bias alike",
    ELEMENT_WISE,
    "linear 1 is taken to be hidden wide",
    edits={"(9 + 6 + 2)": "(6 + 3 + 2)", "(6 + 2)": "(3 + 2)"},
)
renamed = {"CLASSES": '("contraction", "norm", "element-wise")'}
wrong(LAYER, "renames a class", "the keys", "'norm'", edits=renamed)
wrong(LAYER, "norms cost the same backward", "layer norms' backward pass", edits={"2 * 14 *": "2 * 7 *"})
wrong(SHARES, "percentages", "percentages", edits={"amount / total": "100 * amount / total"})
wrong(SHARES, "relative to the largest", "divided by the largest", edits={"sum": "max"})
OWN = "classes of its own"
three = {
    "sum(amounts.values())": "sum(amounts[name] for name in CLASSES)",
    "for name, amount in amounts.items()": "for name in CLASSES",
    "amount / total": "amounts[name] / total",
}
KEY = "raised KeyError: 'contraction'"
wrong(SHARES, "three classes by name", KEY, OWN, "are written into shares", edits=three)
wrong(
    SHARES,
    "three classes that may be missing",
    "expected 'convolution', 'pooling'",
    OWN,
    instead="return {name: amounts.get(name, 0) / sum(amounts.values()) for name in CLASSES}",
)
wrong(
    SHARES,
    "the first three entries",
    "(amounts={'embedding'",
    "expected 'embedding', 'attention'",
    OWN,
    edits={"amounts.items()": "list(amounts.items())[:3]"},
)


@wrong_function("1.10", "layer_flops", "heads=-3", "for an invalid argument", "contains -3")
def heads_may_be_negative(batch, seq_len, hidden, heads, backward):
    require_sizes(batch=batch, seq_len=seq_len, hidden=hidden)
    return solution.layer_flops(batch, seq_len, hidden, abs(heads), backward)
