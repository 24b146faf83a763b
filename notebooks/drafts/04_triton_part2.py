# %% [markdown] id="s4-measure" needs="tuning"
# The kernel asks for the least traffic, so on a GPU it should run at the speed of a copy. Two numbers were left open: how many elements a program takes, and
# how many warps work on them. **Predict** how much they matter, before you look at what an H100 did under each choice.

# %% id="gelu-tuning" needs="tuning"
tuning = records.load("tuning")
copy_rate = records.load("ceilings").results["best"]["copy_bytes_per_second"]
points = tuning.results["gelu"]
by_warps = {w: [p for p in points if p["warps"] == w] for w in sorted({p["warps"] for p in points})}
fig = plots.sweep(
    [p["block"] for p in by_warps[4]],
    [plots.Series(f"{w} warp{'s' * (w > 1)}", [p["bytes_per_second"] for p in ps], colour=colour,
                  low=[p["bytes_per_second"] * p["seconds"] / p["high"] for p in ps],
                  high=[p["bytes_per_second"] * p["seconds"] / p["low"] for p in ps], x=[p["block"] for p in ps])
     for (w, ps), colour in zip(by_warps.items(), (plots.HBM, plots.ARITHMETIC, plots.ON_CHIP), strict=True)],
    title="GeLU runs at the speed of a copy, for most choices of block and warps",
    subtitle=tuning.label, xlabel="elements that one program takes", ylabel="bytes per second",
    y_unit="B/s", yscale="linear", limits={"device copy": copy_rate}, height=2.8,
)
plots.show(fig, "Bytes per second of GeLU over the elements of a program, for one, four and eight warps, "
                "beside the rate of a device copy.")
best = max(p["bytes_per_second"] for p in points)
claim("triton.gelu.rate", best / copy_rate, (0.85, 1.08), kind="measure", source=tuning.label,
      statement="GeLU, best configuration, over a device copy")

# %% id="gelu-live" tags=["nbval-ignore-output", "gpu-output"]
if runtime.HAS_GPU:
    from utils import timing

    x = torch.randn(1 << 26, device=DEVICE, dtype=torch.bfloat16)
    calls = {
        "this kernel": lambda: gelu(x),
        "F.gelu": lambda: F.gelu(x, approximate="tanh"),
        "formula, unfused": lambda: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x))),
    }
    timings = timing.compare(calls, rounds=15)
    rows = [(name, t.median, 4 * x.numel() / t.median) for name, t in timings.items()]
    display(plots.table(rows, [f"{runtime.gpu_name()}, now", "time", "least traffic per second"],
                        units={"time": "s", "least traffic per second": "B/s"}))

# %% [markdown] id="s5"
# ## 5. Weighted sum, forward
#
# Next an operator that *combines* elements. Given $x$ of shape $(R, D)$ and $w$ of shape $(D,)$,
#
# $$y_i = \sum_{j=1}^{D} w_j\, x_{ij}, \qquad y \text{ of shape } (R,).$$
#
# In PyTorch this is `(weight * x).sum(-1)`, and eager PyTorch writes the whole product to memory before it adds it up.
#
# **How to cut it?** Each program could own some rows or some columns. If it owned columns, several programs would contribute to the same $y_i$. So a
# program owns a tile of rows, and walks along them in steps of `BLOCK_D` columns with its sums in registers.
#
# Build it up on one tile, in PyTorch first. The order of operations is the kernel's:

# %% id="weighted-sum-torch"
def weighted_sum_tiled(x, weight, block_r, block_d):
    """The kernel's loops, in PyTorch."""
    rows, columns = x.shape
    out = torch.empty(rows, dtype=x.dtype)
    for first in range(0, rows, block_r):  # one program each
        total = torch.zeros(min(block_r, rows - first), dtype=x.dtype)
        for start in range(0, columns, block_d):  # the walk along the rows
            tile = x[first : first + block_r, start : start + block_d]
            total += (tile * weight[start : start + block_d][None, :]).sum(1)
        out[first : first + block_r] = total
    return out


x, weight = torch.randn(37, 101, dtype=torch.float64), torch.randn(101, dtype=torch.float64)
assert torch.allclose(weighted_sum_tiled(x, weight, 16, 32), (weight * x).sum(-1))


# %% [markdown] id="s5-kernel"
# Now the same loops for one program. Two details matter. Lanes that are masked off must not change the sum, so they load 0. And the sum is kept in fp32 even when $x$ has 16 bits
# (`ACC`; float64 is for checking gradients later).

# %% id="weighted-sum-kernel"
@triton.jit
def weighted_sum_kernel(x_ptr, w_ptr, out_ptr, rows, columns, stride_xr, stride_xd, stride_wd,
                        ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    total = tl.zeros((BLOCK_R,), dtype=ACC)
    for start in range(0, columns, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        mask = (row[:, None] < rows) & (column[None, :] < columns)
        x_ptrs = x_ptr + row[:, None] * stride_xr + column[None, :] * stride_xd
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(ACC)  # (BLOCK_R, BLOCK_D), used once
        w = tl.load(w_ptr + column * stride_wd, mask=column < columns, other=0.0).to(ACC)  # (BLOCK_D,)
        total += tl.sum(x * w[None, :], axis=1)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=row < rows)


def accumulator(dtype):
    """The dtype that sums are kept in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def weighted_sum_forward(x, weight, block=(16, 64)):
    """(weight * x).sum(-1) for x (rows, columns) and weight (columns,) of any strides."""
    rows, columns = x.shape
    out = torch.empty(rows, dtype=x.dtype, device=x.device)
    weighted_sum_kernel[(triton.cdiv(rows, block[0]),)](
        x, weight, out, rows, columns, *x.stride(), weight.stride(0), accumulator(x.dtype), *block
    )
    return out


for x in (randn(37, 101), randn(101, 37).t(), randn(37, 202, dtype=torch.bfloat16)[:, ::2]):
    weight = randn(101, dtype=x.dtype)
    good = as_good(weighted_sum_forward(x, weight), (weight * x).sum(-1), reference.weighted_sum(x, weight))
    print(f"strides {x.stride()}, {x.dtype}: error at most twice PyTorch's:", good)

# %% [markdown] id="s5-walk"
# The walk of three programs over a matrix of 10 x 22, drawn from the addresses of their loads. The grid has one axis; the second axis of the picture is time.

# %% id="walk-animation" tags=["nbval-ignore-output"]
x, weight = randn(10, 22), randn(22)
with trace_lanes() as trace:
    weighted_sum_forward(x, weight, (4, 8))
programs_animation(
    trace.of("x_ptr", "read"), tuple(x.shape),
    title="Each program owns rows and walks along them",
    subtitle="x of 10 × 22, BLOCK_R = 4, BLOCK_D = 8: three programs of three steps",
    alt="A matrix of 10 by 22 squares. Program 0 reads a tile of 4 rows and 8 columns, then the next 8 "
        "columns, then the last 6; programs 1 and 2 do the same below. Lanes beyond the edges are hatched.",
)

# %% [markdown] id="s5-traffic"
# **Predict** the bytes that the kernel asks for. Every tile of $x$ is loaded once. But each program loads the whole weight again. With $e$ bytes an element and tiles of $T_r$ rows,
#
# $$\text{loaded} = \underbrace{R D e}_{x} + \underbrace{\lceil R / T_r \rceil\, D e}_{w}, \qquad \text{stored} = R e.$$
#
# Does the second term reach HBM? All programs read the same few bytes, so L2 holds them. The profiler counts both: what lanes ask for, and how many *distinct* sectors that is.

# %% id="weighted-sum-traffic"
R, D, e, block_r = 200, 1000, 4, 16
with profile_kernel() as profile:
    weighted_sum_forward(randn(R, D), randn(D), (block_r, 64))
tiles = triton.cdiv(R, block_r)
claim("triton.weighted_sum.traffic", profile.bytes_moved, (R * D + tiles * D + R) * e, unit="B",
      source="the formula above", statement=f"Weighted sum of {R} x {D} fp32, asked for")
claim("triton.weighted_sum.distinct", 32 * (profile.dram_sectors_loaded + profile.dram_sectors_stored),
      (R * D + D + R) * e, unit="B", source="each element once", statement="The same, distinct sectors")
assert not profile.findings

# %% [markdown] id="s6"
# ## 6. Weighted sum, backward
#
# Let $L$ be the loss and $g_i = \partial L / \partial y_i$ what arrives from behind, of shape $(R,)$. **Predict**: what shapes do the two gradients have, and which of the two needs a sum?
#
# By the chain rule, with $y_k = \sum_l w_l x_{kl}$:
#
# $$\frac{\partial L}{\partial x_{ij}} = \sum_k g_k \frac{\partial y_k}{\partial x_{ij}} = g_i\, w_j, \qquad
# \frac{\partial L}{\partial w_j} = \sum_k g_k \frac{\partial y_k}{\partial w_j} = \sum_{i=1}^{R} g_i\, x_{ij}.$$
#
# The first is an outer product: every element on its own. The second adds up a *column*. Check both against finite differences of the definition:

# %% id="gradient-formulas"
x, weight, g = (torch.randn(*s, dtype=torch.float64) for s in ((5, 7), (7,), (5,)))


def loss(x, weight):
    return (g * (weight * x).sum(-1)).sum()


def slope(tensor, index, h=1e-6):
    """Central difference of the loss along one element of x or of the weight."""
    values = []
    for sign in (1, -1):
        moved = tensor.clone()
        moved[index] += sign * h
        values.append(loss(moved, weight) if tensor is x else loss(x, moved))
    return (values[0] - values[1]) / (2 * h)


grad_x, grad_w = g[:, None] * weight[None, :], (g[:, None] * x).sum(0)  # the two formulas
for i in range(5):
    assert torch.isclose(slope(x, (i, 3)), grad_x[i, 3], atol=1e-8)
for j in range(7):
    assert torch.isclose(slope(weight, j), grad_w[j], atol=1e-8)
print("both formulas agree with finite differences")

# %% [markdown] id="s6-conflict"
# Here is the difficulty. The forward pass cut $x$ into tiles of *rows*, so that no two programs shared a sum. The weight's gradient is a sum *over* rows. Every program holds a
# part of every $\partial L/\partial w_j$. How do programs add to the same number, when there is no barrier between them?
#
# ### First try: read, add, write

# %% id="racy-kernel"
@triton.jit
def racy_kernel(g_ptr, x_ptr, grad_w_ptr, rows, columns, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0.0)  # (BLOCK_R, BLOCK_D)
    g = tl.load(g_ptr + row, mask=row < rows, other=0.0)  # (BLOCK_R,)
    before = tl.load(grad_w_ptr + column, mask=column < columns)  # (BLOCK_D,)
    tl.store(grad_w_ptr + column, before + tl.sum(g[:, None] * x, axis=0), mask=column < columns)


x, g, grad_w = randn(64, 20), randn(64), torch.zeros(20, device=DEVICE)
with profile_kernel() as profile:
    racy_kernel[(4,)](g, x, grad_w, 64, 20, BLOCK_R=16, BLOCK_D=32)
print("result right:", torch.allclose(grad_w, (g[:, None] * x).sum(0), atol=1e-5))
for race in profile.races:
    print(race)
claim("triton.race.pairs", len({(race.other_program, race.program) for race in profile.races}), 3,
      source="programs 1, 2 and 3 each meet an element that program 0 had", statement="Racing programs found")

# %% [markdown] id="s6-race"
# Right on a laptop, wrong on a GPU: the interpreter runs one program after the other, so each reads what the one before wrote. On a GPU two programs read the same old value, both add, both write, and one sum is
# lost. It may even pass there while the grid is small. **A test of the result cannot find a race. A check of who touched what can**, and it needs no second thread to do so.
#
# ### Second try: atomics
#
# `tl.atomic_add` reads, adds and writes in one indivisible step in the L2 cache. No sum is lost. But the programs still arrive in any order, and floating-point addition depends on
# the order:

# %% id="order-matters"
terms = torch.tensor([1e8, 1.0, -1e8], dtype=torch.float32)
orders = {(0, 1, 2): None, (0, 2, 1): None}
for order in orders:
    total = torch.zeros((), dtype=torch.float32)
    for i in order:
        total = total + terms[i]
    orders[order] = total.item()
    print("+".join(f"({terms[i]:g})" for i in order), "=", orders[order])
claim("triton.sum.order", orders[0, 2, 1] - orders[0, 1, 2], 1.0,
      statement="Two orders of one fp32 sum differ by")

# %% [markdown] id="s6-atomics" needs="weight_gradient"
# **Predict.** The same gradient is computed 50 times on an H100 from the same inputs. How many bitwise different results do atomics give? And how much slower are they when thousands of
# programs meet at the same elements?

# %% id="atomics-record" needs="weight_gradient"
atomics = records.load("weight_gradient")
points = atomics.results["points"]
rows = [(f"{p['rows']:,} x {p['columns']}", p["method"], p["programs_per_element"], p["seconds"],
         p["bytes_per_second"], f"{p['distinct_results']} of {p['repeats']}") for p in points]
display(plots.table(rows, ["x", "method", "programs that meet", "time", "rate", "different results"],
                    units={"time": "s", "rate": "B/s"}, digits=3, caption=atomics.label))
fixed = {p["distinct_results"] for p in points if p["method"] == "two stages"}
loose = max(p["distinct_results"] for p in points if p["method"] == "atomics")
claim("triton.weight_grad.reproducible", max(fixed), 1, kind="measure", source=atomics.label,
      statement="Different results of 50 calls in two stages")
claim("triton.weight_grad.atomics_differ", loose, (2, 50), kind="measure", source=atomics.label,
      statement="Different results of 50 calls with atomics, at most")

# %% id="atomics-live" tags=["nbval-ignore-output", "gpu-output"] needs="weight_gradient"
if runtime.HAS_GPU:
    from benchmarks import weight_gradient

    print(f"{runtime.gpu_name()}, now")
    print(weight_gradient.table(weight_gradient.measure(quick=True)))

# %% [markdown] id="s6-two"
# A training run that cannot be repeated bit by bit is hard to debug. So the third way gives up atomics.
#
# ### Two stages
#
# Stage 1: each program writes its own partial sum to a row of its own in a buffer, `partial[program, column]`. Nobody else touches it. Stage 2: a second kernel adds the rows of the buffer, each program a block of
# columns, in a fixed order. The boundary between two kernel launches is the barrier that the grid does not have.
#
# Stage 1 has $x$ and $g$ in registers already, so it writes the gradient of $x$ on the way:

# %% id="backward-kernels"
@triton.jit
def backward_kernel(g_ptr, x_ptr, w_ptr, grad_x_ptr, partial_ptr,
                    rows, columns, stride_xr, stride_xd, stride_wd,
                    ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    row = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    g = tl.load(g_ptr + row, mask=row < rows, other=0.0).to(ACC)  # (BLOCK_R,), stays for the whole walk
    for start in range(0, columns, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        mask = (row[:, None] < rows) & (column[None, :] < columns)
        x_ptrs = x_ptr + row[:, None] * stride_xr + column[None, :] * stride_xd
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(ACC)  # (BLOCK_R, BLOCK_D)
        w = tl.load(w_ptr + column * stride_wd, mask=column < columns, other=0.0).to(ACC)  # (BLOCK_D,)
        grad_x = (g[:, None] * w[None, :]).to(grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_ptr + row[:, None] * columns + column[None, :], grad_x, mask=mask)
        partial = tl.sum(g[:, None] * x, axis=0)  # (BLOCK_D,)
        tl.store(partial_ptr + tile * columns + column, partial, mask=column < columns)


@triton.jit
def column_sum_kernel(partial_ptr, out_ptr, tiles, columns,
                      ACC: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=ACC)
    for start in range(0, tiles, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T).to(tl.int64)
        mask = (tile[:, None] < tiles) & (column[None, :] < columns)
        part = tl.load(partial_ptr + tile[:, None] * columns + column[None, :], mask=mask, other=0.0)
        total += tl.sum(part, axis=0)  # (BLOCK_T, BLOCK_D) -> (BLOCK_D,)
    tl.store(out_ptr + column, total.to(out_ptr.dtype.element_ty), mask=column < columns)


# %% [markdown] id="s6-function"
# `torch.autograd.Function` ties the kernels together. `forward` computes and keeps what the backward pass will need; `backward` gets $g$ and returns one gradient for each input.

# %% id="autograd-function"
class WeightedSum(torch.autograd.Function):
    """(weight * x).sum(-1) for x (..., columns) and weight (columns,), differentiable in both."""

    BLOCK_R, BLOCK_D = 16, 64

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        flat = x.reshape(-1, x.shape[-1])  # a view wherever the strides allow one
        out = weighted_sum_forward(flat, weight, (WeightedSum.BLOCK_R, WeightedSum.BLOCK_D))
        return out.view(x.shape[:-1])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        flat, acc = x.reshape(-1, x.shape[-1]), accumulator(x.dtype)
        rows, columns = flat.shape
        tiles = triton.cdiv(rows, WeightedSum.BLOCK_R)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        partial = torch.empty((tiles, columns), dtype=wide, device=x.device)  # one row for each program
        grad_x, grad_w = torch.empty(flat.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)
        backward_kernel[(tiles,)](
            grad.reshape(-1).contiguous(), flat, weight, grad_x, partial, rows, columns, *flat.stride(),
            weight.stride(0), acc, WeightedSum.BLOCK_R, WeightedSum.BLOCK_D,
        )
        blocks = triton.cdiv(columns, WeightedSum.BLOCK_D)
        column_sum_kernel[(blocks,)](partial, grad_w, tiles, columns, acc, 32, WeightedSum.BLOCK_D)
        return grad_x.view(x.shape), grad_w


# %% [markdown] id="s6-check"
# **Check it in float64.** `gradcheck` compares the gradients with finite differences, element by element. That works only where a difference of $10^{-6}$ survives the rounding, so in float64. Then the everyday dtypes, on ragged and strided inputs, against PyTorch's own backward pass:

# %% id="gradients-checked"
x64 = randn(2, 9, 13, dtype=torch.float64).requires_grad_()
w64 = randn(13, dtype=torch.float64).requires_grad_()
print("gradcheck in float64:", torch.autograd.gradcheck(WeightedSum.apply, (x64, w64)))

rows = []
inputs = {"ragged": randn(3, 50, 101), "transposed": randn(101, 77).t(), "bf16": randn(200, 130).bfloat16()}
for name, x in inputs.items():
    weight, found = randn(x.shape[-1], dtype=x.dtype), {}
    g = randn(*x.shape[:-1], dtype=x.dtype)
    for who, function in (("ours", WeightedSum.apply), ("theirs", lambda x, w: (w * x).sum(-1))):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
        function(*leaves).backward(g)
        found[who] = [leaf.grad for leaf in leaves]
    x64, w64, g64 = (t.detach().double() for t in (x, weight, g))
    exact = [g64[..., None] * w64, (g64[..., None] * x64).flatten(0, -2).sum(0)]
    for what, ours, theirs, truth in zip(("x", "weight"), found["ours"], found["theirs"], exact, strict=True):
        rows.append((name, f"gradient of {what}", as_good(ours, theirs, truth)))
plots.table(rows, ["input", "", "error at most twice PyTorch's"])

# %% [markdown] id="s6-owners"
# Where do programs meet? Trace the first try and the two stages on a small input, and shade each element by the program that writes it (in stage 2, by the one that reads it):

# %% id="owners-drawn"
rows, columns = 64, 20
x, g, weight = randn(rows, columns), randn(rows), randn(columns)
grad_x, partial, grad_w = (torch.zeros(s, columns, device=DEVICE) for s in (rows, 4, 1))
with trace_lanes() as racy:
    racy_kernel[(4,)](g, x, grad_w, rows, columns, BLOCK_R=16, BLOCK_D=32)
with trace_lanes() as staged:
    backward_kernel[(4,)](g, x, weight, grad_x, partial, rows, columns, *x.stride(), 1, tl.float32, 16, 8)
    column_sum_kernel[(3,)](partial, grad_w, 4, columns, tl.float32, 4, 8)
panels = {
    "first try: all programs write the gradient of the weight": racy.of("grad_w_ptr", "write"),
    "stage 1: each program writes a row of its own in the buffer": staged.of("partial_ptr", "write"),
    "stage 2: each program reads columns of its own from the buffer": staged.of("partial_ptr", "read"),
    "stage 2: and writes those elements of the gradient": staged.of("out_ptr", "write"),
}
plots.show(program_owners(
    {name: (lanes, (4 if "buffer" in name else 1, columns)) for name, lanes in panels.items()},
    title="In two stages no two programs of a launch touch the same element",
    subtitle="64 rows in 4 tiles, 20 columns; hatched: written by several programs of one launch",
))

# %% [markdown] id="s6-bytes"
# What do two stages cost? Each program writes $D$ partial sums of 4 bytes, and stage 2 reads them again:
#
# $$\text{extra} = 2 \cdot 4 \cdot D \lceil R / T_r \rceil \ \text{bytes}, \qquad
# \frac{\text{extra}}{\text{least traffic}} \approx \frac{8 D R / T_r}{2 R D e} = \frac{4}{e\,T_r}.$$
#
# **Predict.** For bf16 and tiles of 16 rows, how many per cent? How many rows must a program take to bring it below one per cent? Would that be free of cost?

# %% id="backward-traffic"
R, D, e, T = 256, 512, 2, WeightedSum.BLOCK_R
x, weight = (randn(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((R, D), (D,)))
y = WeightedSum.apply(x, weight)
y.backward(torch.ones_like(y), retain_graph=True)
with profile_kernel() as profile:
    y.backward(torch.ones_like(y))
assert not profile.findings  # no race, nothing out of bounds, no partial sum read before it was written
tiles = R // T
stage1 = R * e + R * D * e + tiles * D * e + R * D * e + tiles * D * 4  # g, x, w in; grad_x, partial out
stage2 = tiles * D * 4 + D * e  # partial in, grad_w out
claim("triton.weight_grad.traffic", profile.bytes_moved, stage1 + stage2, unit="B",
      statement=f"Backward pass of {R} x {D} bf16, asked for")
partial = profile.by_argument["partial_ptr"].bytes_moved
claim("triton.weight_grad.partials", partial / (2 * R * D * e), 4 / (e * T), source="4 / (e T)",
      statement="Partial sums, as a share of reading x and writing its gradient")
print(f"below one per cent from {next(t for t in range(1, 1000) if 4 / (e * t) < 0.01)} rows on")

# %% [markdown] id="s6-after"
# More rows to a program mean fewer partial sums, and also fewer programs: with too few of them SMs stay empty. A loop inside the program over several tiles of rows gets both, as long as the grid
# still fills the GPU. Lab 2 asks you to find that balance.

# %% id="weighted-sum-live" tags=["nbval-ignore-output", "gpu-output"]
if runtime.HAS_GPU:
    x = torch.randn(1 << 15, 4096, device=DEVICE, dtype=torch.bfloat16)
    weight, g = (torch.randn(n, device=DEVICE, dtype=torch.bfloat16) for n in (4096, 1 << 15))
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    ours, theirs = WeightedSum.apply(*leaves), (leaves[1] * leaves[0]).sum(-1)
    calls = {
        "forward, this notebook's": lambda: weighted_sum_forward(x, weight),
        "forward, eager PyTorch": lambda: (weight * x).sum(-1),
        "backward, this notebook's": lambda: torch.autograd.grad(ours, leaves, g, retain_graph=True),
        "backward, eager PyTorch": lambda: torch.autograd.grad(theirs, leaves, g, retain_graph=True),
    }
    timings = timing.compare(calls, rounds=15)
    moved = {name: (2 if "forward" in name else 4) * x.numel() for name in calls}
    rows = [(name, t.median, moved[name] / t.median) for name, t in timings.items()]
    display(plots.table(rows, [f"{runtime.gpu_name()}, now", "time", "least traffic per second"],
                        units={"time": "s", "least traffic per second": "B/s"}))

# %% [markdown] id="s7"
# ## 7. Row softmax
#
# $$p_j = \frac{e^{x_j - m}}{\sum_{k} e^{x_k - m}}, \qquad m = \max_k x_k$$
#
# for each row $x$ of $C$ elements. Subtracting the maximum changes nothing on paper, and keeps every exponent at or below 0, so nothing overflows. Eager PyTorch code for this formula reads or writes the matrix many times. If
# *one program holds a whole row*, the row is read once and written once: the maximum, the sum and the division all happen in registers.
#
# Lanes beyond the end of the row need care. They must not win the maximum and must not add to the sum. **Predict**: which `other` does the load need?

# %% id="softmax-kernel"
@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, stride_x, stride_out, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(x_ptr + row * stride_x + column, mask=mask, other=OTHER).to(tl.float32)  # (BLOCK,), the whole row
    numerator = tl.exp(x - tl.max(x, axis=0))
    p = numerator / tl.sum(numerator, axis=0)
    tl.store(out_ptr + row * stride_out + column, p.to(out_ptr.dtype.element_ty), mask=mask)


def softmax(x, other=float("-inf")):
    """Softmax of the rows of x (rows, columns); rows have unit stride."""
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    softmax_kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), out.stride(0), OTHER=other, BLOCK=block)
    return out


x = randn(8, 1000) - 3
print("error at most twice PyTorch's:", as_good(softmax(x), torch.softmax(x, -1), reference.softmax(x)))
for other in (float("-inf"), 0.0):
    total = softmax(x - 20, other).sum(-1).double().mean().item()
    print(f"other = {other}: the rows of softmax(x - 20) sum to {total:.3f}")

# %% [markdown] id="s7-other"
# With `other=0.0` the idle lanes win the maximum as soon as the row is negative, and then add one each to the sum. On inputs around zero the error is small enough to pass a loose test. $-\infty$ is the neutral element of a maximum, and $e^{-\infty} = 0$ is the
# neutral element of the sum.
#
# **Predict** the traffic for 64 rows of 1,000 fp32, and the share of lanes that idle.

# %% id="softmax-traffic"
R, C = 64, 1000
with profile_kernel(check_races=False) as profile:
    softmax(randn(R, C))
claim("triton.softmax.traffic", profile.bytes_moved, 2 * R * C * 4, unit="B", source="once in, once out",
      statement=f"Softmax of {R} rows of {C} fp32")
claim("triton.softmax.idle", 1 - C / triton.next_power_of_2(C), 24 / 1024,
      statement="Idle lanes at 1,000 columns")
claim("triton.softmax.worst_idle", 1 - 1025 / triton.next_power_of_2(1025), (0.49, 0.5),
      statement="Idle lanes at 1,025 columns")

# %% [markdown] id="s7-long"
# A whole row in registers: how long may it be? An SM has 65,536 registers of 4 bytes. A row of 32,768 elements, widened to fp32, takes half of them for the data alone, before any temporary value. And one thread has at most 255. What happens beyond? The compiler puts what does not fit into *local memory*, which lives in L1, L2 and
# HBM: it **spills**. The cell compiles the kernel for an H100, wherever you run it, and reads what the compiler spent.

# %% id="softmax-registers" tags=["nbval-ignore-output"]
from utils.compile_only import Request, resource_usages

signature = {"x_ptr": "*bf16", "out_ptr": "*bf16", "columns": "i32", "stride_x": "i32", "stride_out": "i32"}
assert (H100.registers_per_sm, H100.max_registers_per_thread) == (65_536, 255)
cases = [(1024, 4), (8192, 4), (8192, 8), (32768, 4), (32768, 8), (32768, 16), (65536, 16)]
used = resource_usages([
    Request(softmax_kernel, signature, {"OTHER": float("-inf"), "BLOCK": block}, 90, num_warps=warps,
            divisible_by_16=tuple(signature))
    for block, warps in cases
])
rows = [(block, warps, block // (32 * warps), u.registers, u.stack_bytes)
        for (block, warps), u in zip(cases, used, strict=True)]
columns = ["elements of a row", "warps", "elements of a thread", "registers of a thread", "bytes spilled"]
plots.table(rows, columns)

# %% [markdown] id="s7-warps"
# One element of a thread takes a register at least. So the number of warps is not a detail here: it spreads the row over more threads. But all threads of a block share the SM's registers, so for the longest row sixteen warps are not enough and more would not help: its 65,536 elements are as many as the SM has registers. More warps also wait longer for each other in the two reductions.

# %% id="softmax-tuning" needs="tuning"
points = tuning.results["softmax"]
rows = [(p["columns"], p["warps"], p["registers"], p["spills"], p["seconds"], p["bytes_per_second"] / copy_rate)
        for p in points]
display(plots.table(rows, ["columns", "warps", "registers", "spilled", "time", "over a device copy"],
                    units={"time": "s"}, digits=3, caption=f"Row softmax in bf16, {tuning.label}"))
longest = [p["seconds"] for p in points if p["columns"] == max(p["columns"] for p in points)]
claim("triton.softmax.warps", max(longest) / min(longest), (1.05, 50), kind="measure", source=tuning.label,
      statement="Longest rows: worst over best number of warps, time")

# %% [markdown] id="s7-online"
# ### Rows that do not fit: the online idea
#
# Now let the row be longer than any block. Reading it three times works: once for the maximum, once for the sum, once for the result. Can the first two be one?
#
# The sum needs the maximum before it starts. Unless we repair it later. Keep the maximum $m$ of what was seen so far and the sum $d = \sum_j e^{x_j - m}$ *relative to it*. When a block brings a larger maximum $m'$, every term of $d$ is too large by the same factor:
#
# $$d' = \sum_{\text{seen}} e^{x_j - m'} + \sum_{\text{new}} e^{x_j - m'} = d\,e^{m - m'} + \sum_{\text{new}} e^{x_j - m'} .$$
#
# One multiplication corrects the whole past. Follow it on a row in blocks of two; the last line must be the maximum and the sum of the whole row.

# %% id="online-by-hand"
row = torch.tensor([1.0, 3.0, 2.0, 5.0, 5.0, 0.0], dtype=torch.float64)
m, d, steps = torch.tensor(float("-inf"), dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64), []
for block in row.split(2):
    new_m = torch.maximum(m, block.max())
    factor = torch.exp(m - new_m)
    d = d * factor + torch.exp(block - new_m).sum()
    m = new_m
    steps.append((str(block.tolist()), m.item(), factor.item(), d.item()))
display(plots.table(steps, ["block", "maximum so far", "factor on the past", "sum so far"]))
claim("triton.online.sum", d.item(), torch.exp(row - row.max()).sum().item(), tolerance=1e-12,
      source="the whole row at once", statement="Sum after the last block")


# %% id="online-softmax-kernel"
@triton.jit
def online_softmax_kernel(x_ptr, out_ptr, columns, stride_x, stride_out, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    maximum = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):  # first read: maximum and sum in one go
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(x - new_maximum), axis=0)
        maximum = new_maximum
    for start in range(0, columns, BLOCK):  # second read: the result
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        x = tl.load(x_ptr + row * stride_x + column, mask=mask, other=-float("inf")).to(tl.float32)  # (BLOCK,)
        p = tl.exp(x - maximum) / total
        tl.store(out_ptr + row * stride_out + column, p.to(out_ptr.dtype.element_ty), mask=mask)


# %% id="online-softmax-check"
def online_softmax(x, block=1024):
    """Softmax of the rows of x (rows, columns), of any length; rows have unit stride."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    online_softmax_kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), out.stride(0), BLOCK=block)
    return out


x = randn(16, 5000)
print("error at most twice PyTorch's:", as_good(online_softmax(x), torch.softmax(x, -1), reference.softmax(x)))
with profile_kernel() as profile:
    online_softmax(x)
assert not profile.findings
claim("triton.softmax.long_traffic", profile.bytes_moved / (2 * x.numel() * 4), 3 / 2,
      source="two reads and a write over one read and a write", statement="Online softmax over one pass, bytes")

# %% [markdown] id="s7-after"
# Half as much traffic again, for rows of any length. Notebook 05 takes this idea much further: what if the second loop, too, could be repaired afterwards? For softmax alone it cannot. For softmax followed by a matrix product it can, and that is FlashAttention.
