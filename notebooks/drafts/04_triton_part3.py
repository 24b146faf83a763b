# %% [markdown] id="s8"
# ## 8. Tiled matrix product
#
# $C = AB$ with $A$ of shape $(M, K)$ and $B$ of shape $(K, N)$. A program owns a tile of $T_m \times T_n$ elements of $C$, and walks along $K$ in steps of `BLOCK_K`. In each step it loads a tile of $A$ and a tile of $B$ and multiplies them with `tl.dot`:
#
# $$C_\text{tile} = \sum_{k} A[\text{rows}, k{:}k{+}T_k]\; B[k{:}k{+}T_k, \text{columns}].$$
#
# `tl.dot` is the one operation of Triton that a thread's view could not express: it belongs to the whole block, and the compiler turns it into tensor-core instructions. Three things to know:
#
# - Its operands have at least 16 rows and columns (the tensor core's own tile).
# - It accumulates in fp32 for 16-bit operands. Keep it so: pass the accumulator as the third argument, and narrow once, at the end.
# - For fp32 operands a GPU uses TF32 by default, with 10 bits of mantissa. `input_precision="ieee"` asks for true fp32 products. The interpreter always gives those.
#
# Which tile does a program own? Leave that to a function of its own, `grouped_tile`; we come to it below. For now read `GROUP = 1` as "row by row".

# %% id="matmul-kernel"
@triton.jit
def grouped_tile(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Tile row and tile column of a program: GROUP tile rows are finished before the next GROUP begins."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = (pid // (GROUP * tiles_n)) * GROUP  # first tile row of this group
    height = min(tiles_m - first_m, GROUP)  # the last group may be lower
    inside = pid % (GROUP * tiles_n)
    return first_m + inside % height, inside // height


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    tile_m, tile_n = grouped_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + row[:, None].to(tl.int64) * stride_am + inner[None, :] * stride_ak
    b_ptrs = b_ptr + inner[:, None].to(tl.int64) * stride_bk + column[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(row[:, None] < M) & (inner[None, :] < K - k), other=0.0)  # (BLOCK_M, BLOCK_K)
        b = tl.load(b_ptrs, mask=(inner[:, None] < K - k) & (column[None, :] < N), other=0.0)  # (BLOCK_K, BLOCK_N)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_ptrs += BLOCK_K * stride_ak  # the next tiles along K
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + row[:, None].to(tl.int64) * stride_cm + column[None, :]
    tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=(row[:, None] < M) & (column[None, :] < N))


def matmul(a, b, tile=(32, 32, 32), group=4):
    """a @ b for a (M, K) and b (K, N) of any strides."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1]),)
    matmul_kernel[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), c.stride(0), *tile, group)
    return c


# %% [markdown] id="s8-check"
# The masks along $K$ deserve a second look. In the last step the tile of $A$ sticks out to the right, the tile of $B$ below. If only one of them loaded zeros there, the product would still be right, unless the other loaded an infinity or a NaN from outside. Mask both.
#
# **Predict** the bytes that the kernel asks for, for $M = 100$, $N = 70$, $K = 90$ in fp32 with tiles of 32. (From notebook 03: $A$ is read once for each tile column, $B$ once for each tile row.)

# %% id="matmul-check"
M, N, K = 100, 70, 90
a, b = randn(M, K), randn(N, K).t()  # b is a transposed view
print("error at most twice PyTorch's:", as_good(matmul(a, b), a @ b, reference.matmul(a, b)))
with profile_kernel() as profile:
    matmul(a, b)
assert not profile.findings
columns_of_tiles, rows_of_tiles = triton.cdiv(N, 32), triton.cdiv(M, 32)
claim("triton.matmul.traffic", profile.bytes_moved,
      4 * (M * K * columns_of_tiles + K * N * rows_of_tiles + M * N), unit="B", statement="Tiled product, asked for")
claim("triton.matmul.flops", profile.flops, 2 * (rows_of_tiles * 32) * (columns_of_tiles * 32) * 96, unit="FLOP",
      source="whole tiles: the masked part is multiplied too", statement="Tiled product, arithmetic")

# %% [markdown] id="s8-order"
# ### The order of tiles
#
# What the programs ask for does not depend on who computes which tile. What *HBM delivers* does. Programs that run at the same time walk along $K$ side by side. When two of them need the same tile of $A$, the first brings it into L2 and the second finds it there.
#
# So look at one **wave**, the $W$ programs that run at once. If their tiles lie in $r$ tile rows and $c$ tile columns, HBM delivers $r$ bands of $A$ and $c$ bands of $B$:
#
# $$\text{bytes of a wave} = (r\,T_m + c\,T_n)\,K e, \qquad r\,c \ge W.$$
#
# **Predict.** An H100 runs 132 programs at once; take $8192^3$ in tiles of 128 x 256. Row by row, which $r$ and $c$ does the first wave have? Which shape of wave would be the best?
#
# *Derive.* With $r c = W$, the sum $r T_m + \frac{W}{r} T_n$ is smallest where its two terms are equal:
#
# $$r\,T_m = c\,T_n \quad\Longrightarrow\quad r = \sqrt{W\,T_n / T_m}.$$
#
# The wave should cover a *square of elements*. (It is the same argument that made tiles square, one level up.) A one-dimensional grid comes out row by row. `grouped_tile` folds it: it takes `GROUP` tile rows, and walks through them column by column.

# %% id="order-functions"
def order_of(tiles_m, tiles_n, group):
    """(tile row, tile column) of each program: the arithmetic of grouped_tile."""
    order = []
    for pid in range(tiles_m * tiles_n):
        first = pid // (group * tiles_n) * group
        height, inside = min(tiles_m - first, group), pid % (group * tiles_n)
        order.append((first + inside % height, inside // height))
    return order


def bands(order, wave):
    """Tile rows and tile columns that each wave touches."""
    waves = [order[first : first + wave] for first in range(0, len(order), wave)]
    return [(len({m for m, _ in one}), len({n for _, n in one})) for one in waves]


def hbm_bytes(n, tile_m, tile_n, group, wave, element_size=2):
    """What HBM delivers for an n x n x n product if L2 serves each wave and forgets between waves."""
    order = order_of(-(-n // tile_m), -(-n // tile_n), group)
    return sum(r * tile_m + c * tile_n for r, c in bands(order, wave)) * n * element_size


n, tile_m, tile_n, wave = 8192, 128, 256, H100.sms
first = {group: bands(order_of(n // tile_m, n // tile_n, group), wave)[0] for group in (1, 16)}
claim("triton.order.row_major", first[1][0] + first[1][1], 5 + 32, unit="bands",
      source="132 tiles in rows of 32: 5 tile rows, all 32 columns", statement="First wave, row by row")
claim("triton.order.grouped", first[16][0] + first[16][1], 16 + 9, unit="bands",
      source="132 tiles in columns of 16: 16 tile rows, 9 columns", statement="First wave, in groups of 16")
claim("triton.order.best", (wave * tile_n / tile_m) ** 0.5, 16, tolerance=0.02, unit="tile rows",
      source="sqrt(W Tn / Tm)", statement="Best height of a group")

# %% [markdown] id="s8-draw"
# Is that the order the kernel really takes? Ask it: let every program store the tile that `grouped_tile` gives it, and draw.

# %% id="order-drawn"
@triton.jit
def order_kernel(out_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    pid = tl.program_id(0)
    tile_m, tile_n = grouped_tile(pid, M, N, BLOCK_M, BLOCK_N, GROUP)
    tl.store(out_ptr + 2 * pid, tile_m)
    tl.store(out_ptr + 2 * pid + 1, tile_n)


orders = {}
for name, group in (("row by row (GROUP = 1)", 1), ("in groups of 16 (GROUP = 16)", 16)):
    places = torch.zeros(n // tile_m * (n // tile_n), 2, dtype=torch.int32, device=DEVICE)
    order_kernel[(len(places),)](places, n, n, tile_m, tile_n, group)
    orders[name] = [tuple(place) for place in places.tolist()]
    assert orders[name] == order_of(n // tile_m, n // tile_n, group)


def note(name):
    r, c = bands(orders[name], wave)[0]
    moved = quantity((r * tile_m + c * tile_n) * n * 2.0, "B", 3)
    return f"first wave: {r} bands of A and {c} of B,\n{moved} from HBM"


plots.show(tile_orders(
    orders, wave, tile=(tile_m, tile_n), note=note,
    title="A wave that covers a square needs half the bytes of one that covers rows",
    subtitle="8192 × 8192 in tiles of 128 × 256; vermilion: the 132 programs of the first wave, in order along "
             "the line; then every other wave is blue",
))

# %% [markdown] id="s8-count"
# Now count, instead of believing the formula. The lanes of a small product say which elements each program loads; a wave's traffic is the number of *distinct* elements that its programs load together.

# %% id="order-counted"
def distinct_bytes(trace, wave):
    """Distinct bytes of a and b that each wave of programs loads, summed over waves."""
    programs = sorted({one.program for one in trace.lanes})
    total = 0
    for first in range(0, len(programs), wave):
        running = set(programs[first : first + wave])
        for name in ("a_ptr", "b_ptr"):
            total += len({e for one in trace.of(name) if one.program in running for e in one.elements[one.mask]})
    return 4 * total


n, tile, wave = 128, 16, 8
a, b, rows = randn(n, n), randn(n, n), []
for group in (1, 2, 4, 8):
    with trace_lanes() as trace:
        matmul(a, b, (tile, tile, 64), group)
    counted = distinct_bytes(trace, wave)
    rows.append((group, trace.profile.bytes_loaded, hbm_bytes(n, tile, tile, group, wave, 4), counted))
display(plots.table(rows, ["GROUP", "asked for (B)", "predicted for HBM (B)", "counted (B)"]))
claim("triton.order.profiler", sum(row[2] == row[3] for row in rows), 4,
      statement="Orders whose count is as predicted")
claim("triton.order.saved", rows[0][3] / rows[2][3], (8 + 1) / (4 + 2), source="8 + 1 bands against 4 + 2",
      statement="64 tiles, 8 at a time: row by row over groups of 4")

# %% [markdown] id="s8-hbm" needs="tile_order"
# And on the real machine? Nsight Compute counts the sectors that HBM delivers. **Predict** from the formula; then look where the model is wrong, and why.

# %% id="order-hbm" needs="tile_order"
order_record = records.load("tile_order")
tile_m, tile_n = order_record.results["tile"][:2]
large = [p for p in order_record.results["points"] if p["n"] == 8192]
rows = []
for p in large:
    model = hbm_bytes(p["n"], tile_m, tile_n, p["group"], H100.sms)
    into, read = (32.0 * p[name] for name in ("l1_sectors_received", "dram_sectors_read"))
    rows.append((p["group"], into, float(model), read, p["seconds"], p["flops_per_second"]))
columns = ["GROUP", "into the SMs", "from HBM, model", "from HBM, measured", "time", "rate"]
units = dict(zip(columns[1:], ["B", "B", "B", "s", "FLOP/s"], strict=True))
display(plots.table(rows, columns, units=units, digits=3,
                    caption=f"8192³ in bf16, tiles of {tile_m} × {tile_n}: {order_record.label}"))
measured = {row[0]: row[3] for row in rows}
claim("triton.order.hbm", measured[1] / min(measured.values()), (1.2, 8), kind="measure",
      source=order_record.label, statement="HBM traffic, row by row over the best group")

# %% id="order-hbm-plot" needs="tile_order"
heights = sorted({p["group"] for p in large})
series = [
    plots.Series("model", [hbm_bytes(8192, tile_m, tile_n, g, H100.sms) for g in heights],
                 kind="model", colour=plots.LIMIT),
    plots.Series("measured", [32 * p["dram_sectors_read"] for p in large], colour=plots.HBM),
]
least = 2 * 8192**2 * 2
plots.show(plots.sweep(
    heights, series, title="The height of a group decides what HBM must deliver", subtitle=order_record.label,
    xlabel="GROUP, tile rows", ylabel="bytes from HBM", y_unit="B", yscale="linear", height=2.9,
    limits={"A and B once": least},
), "Bytes from HBM for a product of 8192 cubed over the height of a group of tile rows, model and measured.")

# %% id="order-live" tags=["nbval-ignore-output", "gpu-output"] needs="tile_order"
if runtime.HAS_GPU:
    from benchmarks import tile_order

    timings = timing.compare(tile_order.products(8192, tile_order.GROUPS), warmup=2, rounds=10)
    rows = [(group, t.median, 2 * 8192**3 / t.median) for group, t in timings.items()]
    display(plots.table(rows, ["GROUP", "time", "rate"], units={"time": "s", "rate": "FLOP/s"}, digits=3,
                        caption=f"8192³ in bf16 on {runtime.gpu_name()}, now"))

# %% [markdown] id="s9"
# ## 9. Tensor descriptors, and the block pointers of old code
#
# So far each kernel computed a pointer for every element and a mask for every pointer. Both say the same thing in many numbers: *this rectangle of that matrix*. A **tensor descriptor** says it once:
#
# ```python
# desc = tl.make_tensor_descriptor(x_ptr, shape=[rows, columns], strides=[stride, 1], block_shape=[BLOCK_R, BLOCK_D])
# tile = desc.load([first_row, first_column])      # what lies outside of the shape arrives as 0
# desc.store([first_row, first_column], tile)      # what lies outside is dropped
# ```
#
# From Hopper on a descriptor becomes a job for the **TMA**, a copy engine of the SM: one thread hands over a descriptor and two coordinates, and the rectangle arrives in shared memory. No registers hold addresses, no lanes compute masks. In return the hardware wants regular memory: the last axis has stride 1, and every row starts at a multiple of 16 bytes. (For an older GPU the compiler turns the descriptor back into pointers and masks, so the same kernel runs there.)
#
# Here is the weighted sum with descriptors. Compare it with section 5 line by line:

# %% id="descriptor-kernel"
@triton.jit
def descriptor_sum_kernel(x_ptr, w_ptr, out_ptr, rows, columns, stride_xr,
                          BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    first = tl.program_id(0) * BLOCK_R
    x_desc = tl.make_tensor_descriptor(x_ptr, [rows, columns], [stride_xr, 1], [BLOCK_R, BLOCK_D])
    w_desc = tl.make_tensor_descriptor(w_ptr, [columns], [1], [BLOCK_D])
    total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for start in range(0, columns, BLOCK_D):
        x = x_desc.load([first, start]).to(tl.float32)  # (BLOCK_R, BLOCK_D), zeros outside
        w = w_desc.load([start]).to(tl.float32)  # (BLOCK_D,)
        total += tl.sum(x * w[None, :], axis=1)
    row = first + tl.arange(0, BLOCK_R)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=row < rows)


def fits_a_descriptor(x):
    """Whether a tensor's rows are what a descriptor needs: unit stride, and starts at multiples of 16 bytes."""
    pitches = [stride * x.element_size() for stride in x.stride()[:-1]]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(pitch % 16 == 0 for pitch in pitches)


def descriptor_sum(x, weight, block=(16, 64)):
    """The weighted sum through descriptors, or through pointers where x does not fit a descriptor."""
    if not (fits_a_descriptor(x) and fits_a_descriptor(weight)):
        return weighted_sum_forward(x, weight, block)
    if runtime.HAS_GPU:  # a descriptor made on the GPU needs a little memory for itself
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=DEVICE))
    out = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(x.shape[0], block[0]),)
    descriptor_sum_kernel[grid](x, weight, out, *x.shape, x.stride(0), *block)
    return out


# %% [markdown] id="s9-predict"
# **Predict.** On a matrix of 200 x 1,000 fp32, which of the two kernels asks for more bytes? And which of these fit a descriptor: a matrix of 200 x 1,000 in bf16? Of 200 x 1,001? Its transpose? Its columns from 4 on?

# %% id="descriptor-check"
x, weight = randn(200, 1000), randn(1000)
moved = {}
for function in (weighted_sum_forward, descriptor_sum):
    assert as_good(function(x, weight), (weight * x).sum(-1), reference.weighted_sum(x, weight))
    with profile_kernel() as profile:
        function(x, weight)
    assert not profile.findings
    moved[function.__name__] = profile.bytes_moved
claim("triton.descriptor.traffic", moved["descriptor_sum"], moved["weighted_sum_forward"], unit="B",
      source="the pointer kernel", statement="Weighted sum of 200 x 1,000 fp32 through descriptors")

x16 = torch.empty(200, 1000, dtype=torch.bfloat16)
fits = {"200 x 1,000 bf16": x16, "200 x 1,001 bf16": torch.empty(200, 1001, dtype=torch.bfloat16),
        "its transpose": x16.t(), "columns from 4 on": x16[:, 4:], "columns from 8 on": x16[:, 8:]}
plots.table([(name, str(t.stride()), fits_a_descriptor(t)) for name, t in fits.items()],
            ["tensor", "strides", "fits a descriptor"])

# %% [markdown] id="s9-vocabulary"
# ### Block pointers
#
# Older Triton code says the same with **block pointers**: `tl.make_block_ptr`, `tl.advance`, and loads with `boundary_check`. They were deprecated in Triton 3.7 and are gone in 3.9. You will still meet them in papers, courses and repositories, so learn to read them:
#
# | block pointer | what it means | tensor descriptor | pointer arithmetic |
# |:---|:---|:---|:---|
# | `base` | pointer to the first element of the tensor | the same, aligned to 16 bytes | `x_ptr` |
# | `shape` | extent of the *whole* tensor, for the bounds | the same | `rows`, `columns` in the masks |
# | `strides` | elements between neighbours, by axis | the same; the last is 1, the others multiples of 16 bytes | `stride_r`, `stride_d` |
# | `offsets` | where the block starts now | not kept: given to each `load` and `store` | `pid * BLOCK` |
# | `block_shape` | the tile | the same | lengths of the `tl.arange` |
# | `order` | axes from the fastest in memory to the slowest, `(1, 0)` for rows | none: the last axis is the fastest | none: the compiler reads it off the strides |
# | `advance(ptr, (0, BLOCK_D))` | a copy with other offsets | `load` at the next offsets | `x_ptrs += BLOCK_D * stride_d` |
# | `boundary_check=(0, 1)` | axes to mask; *none if left out* | always all axes | `mask=...` |
# | `padding_option="zero"` | what masked lanes get; *undefined if left out* | zeros (or NaN, on request) | `other=0.0` |
#
# Two entries are in italics because they are where old code breaks: the check is off unless asked for, and what lies outside is undefined unless named. A block pointer is a *position that moves*; a descriptor is a *tensor that stays*, and you say each time where to look.
#
# To make the vocabulary exact, here is a block pointer in a few lines of PyTorch, and a loop of old code translated step by step:

# %% id="block-pointer-model"
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BlockPointer:
    """What the removed tl.make_block_ptr stood for; base is a flat tensor."""

    base: torch.Tensor
    shape: tuple
    strides: tuple
    offsets: tuple
    block_shape: tuple
    order: tuple  # a hint about memory: it never changes a result

    def load(self, boundary_check=(), padding=float("nan")):
        index = [offset + torch.arange(size) for offset, size in zip(self.offsets, self.block_shape, strict=True)]
        address = sum(torch.meshgrid(*[i * s for i, s in zip(index, self.strides, strict=True)], indexing="ij"))
        inside = [i < size if axis in boundary_check else i >= 0
                  for axis, (i, size) in enumerate(zip(index, self.shape, strict=True))]
        mask = torch.stack(torch.meshgrid(*inside, indexing="ij")).all(0)
        values = self.base[torch.where(mask, address, 0).clamp(max=self.base.numel() - 1)]
        return torch.where(mask, values, padding)

    def advance(self, steps):
        return replace(self, offsets=tuple(o + s for o, s in zip(self.offsets, steps, strict=True)))


# %% [markdown] id="s9-old"
# An old kernel for the weighted sum made one block pointer for $x$ and one for the weight, at offsets `(pid * BLOCK_R, 0)` and `(0,)`, and advanced both in the loop. With the model it reads like this. The last column shows what the same offsets are for a descriptor.

# %% id="block-pointer-walk"
x, weight = torch.randn(5, 10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
pid, BLOCK_R, BLOCK_D = 1, 4, 4  # the second program: rows 4 to 7, of which only row 4 exists
x_block = BlockPointer(x.flatten(), (5, 10), (10, 1), (pid * BLOCK_R, 0), (BLOCK_R, BLOCK_D), (1, 0))
w_block = BlockPointer(weight, (10,), (1,), (0,), (BLOCK_D,), (0,))
total, steps = torch.zeros(BLOCK_R, dtype=torch.float64), []
for start in range(0, 10, BLOCK_D):
    tile = x_block.load(boundary_check=(0, 1), padding=0.0)  # old: tl.load(x_block, boundary_check=(0, 1), ...)
    total += (tile * w_block.load(boundary_check=(0,), padding=0.0)).sum(1)
    steps.append((str(x_block.offsets), str(w_block.offsets), f"x_desc.load([{pid * BLOCK_R}, {start}])"))
    x_block, w_block = x_block.advance((0, BLOCK_D)), w_block.advance((BLOCK_D,))
assert torch.allclose(total[:1], (weight * x).sum(-1)[4:]) and not total[1:].any()
display(plots.table(steps, ["offsets of the x block", "offsets of the weight block", "with a descriptor"]))
unchecked = BlockPointer(x.flatten(), (5, 10), (10, 1), (0, 8), (BLOCK_R, BLOCK_D), (1, 0)).load()
claim("triton.block_pointer.unchecked", int((unchecked[:, 2:] == x[1:5, :2]).sum()), 8, unit="elements",
      source="columns 10 and 11 of a row are 0 and 1 of the next", statement="Unchecked: read from the next row")

# %% [markdown] id="s10"
# ## 10. The interpreter, and what it hides
#
# Without a GPU every kernel of this notebook ran in Triton's **interpreter**: with `TRITON_INTERPRET=1` the decorator leaves your function as Python, and each `tl` operation is carried out by NumPy, one program after the other. `utils.runtime` sets this up before Triton is imported. With a GPU, `with twins():` switches to it for a block of code. You have used both.
#
# **Printing.** In the interpreter `print` is Python's: full arrays, f-strings, any condition. Compiled kernels have `tl.device_print`, which prints one line for each thread, in any order. Debug in the interpreter first, on a tensor of ten elements.
#
# **Breakpoints.** The function is Python, so `breakpoint()` stops inside it, and you look at blocks, masks and pointers by name. A notebook that runs by itself cannot wait for you, so this cell replaces the debugger with a function that prints what you would look at:

# %% id="breakpoint"
@triton.jit
def suspicious_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    mean = tl.sum(x, axis=0) / BLOCK
    if pid == 2:
        breakpoint()
    tl.store(out_ptr + pid, mean)


def look(*names):
    """Stands in for the debugger: prints variables of the kernel where it stopped."""
    frame = sys._getframe(1)
    print(f"stopped in {frame.f_code.co_name}:")
    for name in ("pid", "offsets", "x", "mean", "BLOCK"):
        print(f"    {name} = {frame.f_locals[name]}")


x, out = torch.ones(10, device=DEVICE), torch.zeros(3, device=DEVICE)
hook, sys.breakpointhook = sys.breakpointhook, look
try:
    with twins():
        suspicious_kernel[(3,)](x, out, 10, BLOCK=4)
finally:
    sys.breakpointhook = hook

# %% [markdown] id="s10-found"
# The bug is on the screen: all of `x` is 1 or masked, and the mean is one half. The kernel divides by the size of the block, not by the number of lanes that took part.
#
# **What it hides.** The interpreter is kinder than a GPU. Programs take turns, so a race never shows. Memory is the process's own, so a read out of bounds returns something. `torch.empty` often returns zeros. Three kernels with one fault each; all of them *pass a test of their result* in the interpreter, or may:

# %% id="three-faults"
@triton.jit
def running_sum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    before = tl.load(out_ptr + pid - 1, mask=pid > 0, other=0.0)  # what the program on the left has stored
    tl.store(out_ptr + pid, before + tl.sum(tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK)), axis=0))


@triton.jit
def row_max_kernel(x_ptr, out_ptr, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * stride + tl.arange(0, BLOCK))  # BLOCK may be more than columns
    tl.store(out_ptr + row, tl.max(x, axis=0))


@triton.jit
def accumulate_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    before = tl.load(out_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, before + tl.load(x_ptr + offsets, mask=mask), mask=mask)


def fault_1():
    x, out = torch.ones(4, 8, device=DEVICE), torch.zeros(4, device=DEVICE)
    running_sum_kernel[(4,)](x, out, BLOCK=8)


def fault_2():
    x, out = randn(6, 16)[:, :12], torch.zeros(6, device=DEVICE)  # rows of 12 in memory of 16
    row_max_kernel[(6,)](x, out, 12, x.stride(0), BLOCK=16)


def fault_3():
    x, out = randn(100), torch.empty(100, device=DEVICE)
    accumulate_kernel[(4,)](x, out, 100, BLOCK=32)


# %% [markdown] id="s10-predict"
# **Find the fault in each** before you let the profiler do it.

# %% id="three-faults-found"
for number_of_fault, fault in enumerate((fault_1, fault_2, fault_3), start=1):
    with profile_kernel() as profile:
        fault()
    print(f"{number_of_fault}. {profile.findings[0]}")
    found = {"race": len(profile.races), "bounds": sum(f.count for f in profile.out_of_bounds),
             "uninitialized": sum(f.count for f in profile.uninitialized_reads)}
    if number_of_fault == 1:
        claim("triton.fault.race", found["race"], 3, statement="Races between neighbouring programs")
    elif number_of_fault == 2:
        claim("triton.fault.bounds", found["bounds"], 6 * 4, unit="lanes",
              statement="Out of bounds, 4 in each of 6 rows")
    else:
        claim("triton.fault.uninitialized", found["uninitialized"], 100, unit="lanes",
              statement="Reads of memory that nothing had written")

# %% [markdown] id="s10-explain"
# 1. Programs are not ordered: the one on the left may run later. A running sum over programs needs another algorithm, or a second launch.
# 2. The read stays inside the *allocation*, so no tool that watches allocations would complain. But the elements belong to columns that were sliced away, and one of them may be the largest.
# 3. `torch.empty` gives memory with whatever was in it. Zeros today, an old tensor tomorrow.
#
# | | interpreter | GPU |
# |:---|:---|:---|
# | order of programs | one after another | any, many at once |
# | race | never visible | now and then a wrong number |
# | out of bounds | garbage or a crash | garbage, another tensor damaged, or an illegal access |
# | `tl.dot` of fp32 | exact products | TF32 unless `input_precision="ieee"` |
# | `num_warps`, `num_stages` | ignored | decide the speed |
# | too much shared memory, too many registers | cannot happen | refused, or spilled |
# | type errors in code that does not run | not seen | the kernel does not compile |
# | time | says nothing about a GPU | the point of it all |
#
# The habit that follows: **result, then profiler, then GPU.** The first two cost seconds and need no GPU.

# %% [markdown] id="s11"
# ## 11. Autotuning
#
# Tile sizes, warps and stages are left open by the algorithm. The best choice depends on the GPU, the dtype and the shape, through registers, shared memory, waves and latency all at once. Instead of modelling that, Triton measures: `@triton.autotune` runs each configuration of a list once for each new *key* and remembers the fastest.

# %% id="autotune"
configs = [
    triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((256, 1), (1024, 4), (4096, 8))
]


@triton.autotune(configs=configs, key=["n"])  # a new n is measured anew
@triton.jit
def tuned_scale_kernel(x_ptr, out_ptr, a, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, a * tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


def tuned_scale(x, a):
    out = torch.empty_like(x)
    n = x.numel()
    grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)  # depends on the configuration that is chosen
    tuned_scale_kernel[grid](x, out, a, n)
    return out


for n in (1000, 100_000):
    x = randn(n)
    assert torch.equal(tuned_scale(x, 2.0), 2 * x)
print("right for every configuration that may have been chosen")

# %% id="autotune-chosen" tags=["nbval-ignore-output", "gpu-output"]
if runtime.HAS_GPU:
    for key, config in tuned_scale_kernel.cache.items():
        print(key, "->", config)

# %% [markdown] id="s11-rules"
# Note the grid: a function of the chosen configuration, since a larger block needs fewer programs. And note three traps.
#
# - The kernel *runs* many times while it is tuned. If it adds to its output or overwrites its input, the first call is wrong, unless you name those arguments in `reset_to_zero` or `restore_value`.
# - Every new key pays again: tens of milliseconds for a small kernel, a minute for many configurations of a large one. A key that contains a sequence length is measured for each length that a user types.
# - The choice is measured, so it varies from run to run, and with it the bits of the result. A training run that must be repeatable fixes its configurations in a table, with the measurement that chose them. This course's kernels do.

# %% [markdown] id="s11-predict" needs="tuning"
# What does tuning give? Here is a sweep of the tiled product on an H100: every combination of tile, pipeline depth and warps that seemed sensible, on three shapes. **Predict**: how far apart are the best and the median configuration? Is the best one for a large square also the best for a small one?

# %% id="tuning-matmul" needs="tuning"
products = tuning.results["matmul"]
fig, axes = plots.figure(
    "Most configurations are far from the best, and the best one depends on the shape",
    subtitle=f"Tiled product in bf16, each dot a configuration, over the best of its shape. {tuning.label}",
    height=2.6, grid="x",
)
for row, product in enumerate(products):
    best = max(p["flops_per_second"] for p in product["points"])
    share = [p["flops_per_second"] / best for p in product["points"]]
    spilled = [p["spills"] > 0 for p in product["points"]]
    for flag, colour, marker in ((False, plots.ARITHMETIC, "o"), (True, plots.WRONG, "x")):
        xs = [s for s, spills in zip(share, spilled, strict=True) if spills is flag]
        axes.plot(xs, [row] * len(xs), marker, color=colour, markersize=6, alpha=0.7)
axes.set_yticks(range(len(products)), [f"{p['name']}: {p['m']} × {p['n']} × {p['k']}" for p in products])
axes.set(xlim=(0, 1.03), ylim=(len(products) - 0.5, -0.5),
         xlabel="rate over the best of the same shape; a cross: registers spilled")
plots.show(fig, "One row of dots for each of three shapes. Most configurations reach a part of the best rate; "
                "those that spill registers are marked with a cross.")

# %% id="tuning-matmul-claims" needs="tuning"
def by_tile(product):
    return {tuple(p["tile"]): p for p in product["points"]}


winners = {product["name"]: min(product["points"], key=lambda p: p["seconds"]) for product in products}
rows = []
for product in products:
    rates = sorted(p["flops_per_second"] for p in product["points"])
    borrowed = by_tile(product)[tuple(winners["large"]["tile"])]["flops_per_second"]
    best, median, worst = rates[-1], rates[len(rates) // 2], rates[0]
    rows.append((product["name"], str(winners[product["name"]]["tile"]), best, median / best, worst / best,
                 borrowed / best))
columns = ["shape", "best: BLOCK_M, N, K, GROUP, warps, stages", "rate", "median over best", "worst over best",
           "the large shape's best here"]
display(plots.table(rows, columns, units={"rate": "FLOP/s"}, digits=3))
claim("triton.tuning.spread", 1 / rows[0][3], (1.1, 10), kind="measure", source=tuning.label,
      statement="Large product: best over median configuration")
claim("triton.tuning.transfer", min(row[5] for row in rows), (0.02, 0.95), kind="measure", source=tuning.label,
      statement="The large shape's best configuration on another shape, over that shape's best")

# %% id="tuning-live" tags=["nbval-ignore-output", "gpu-output"] needs="tuning"
if runtime.HAS_GPU:
    from benchmarks import tuning as tuning_benchmark

    print(f"{runtime.gpu_name()}, now: three configurations of each product, two row lengths of softmax, GeLU")
    print(tuning_benchmark.table(tuning_benchmark.measure(quick=True)))

# %% [markdown] id="s11-why" needs="tuning"
# The losers have reasons that you can name before you measure:
#
# - **Small tiles** have a low intensity: they ask L2 for more bytes than it can send (notebook 02, exercise 6).
# - **Large tiles with few warps** need more registers than a thread has. They spill (the crosses).
# - **Large tiles on a small matrix** leave SMs without work: the small product has fewer tiles than the GPU has SMs, and the few rows fill only half of a tile of 128.
# - **One stage** would leave the loads without anything to hide behind. Two to four keep them ahead of the arithmetic.
#
# So autotuning is the *last* step, not the first. It chooses among configurations; it does not change how often a byte is moved, it does not fix a race, and no list of configurations makes a naive product fast. GeLU showed the other side in section 4: where memory is the limit, nearly every choice gives the same.

# %% [markdown] id="s12" needs="fused_operators"
# ## 12. How far these kernels go
#
# The kernels of this notebook are short so that you can read them. Lab 2 asks for the same ones with every shape, stride and dtype, and with tiles from a table. This is where its solutions end up on an H100, beside PyTorch's own operators and beside `torch.compile`, which writes Triton kernels itself. **Predict** which of the operators can reach the speed of a copy.

# %% id="lab-rates" needs="fused_operators"
fused = records.load("fused_operators")
points = fused.results["points"]
ways = {"torch": plots.WASTE, "torch.compile": "#8DB9D8", "lab 2": plots.HBM}
fig, ax = plots.figure(
    "Kernels that move each byte once run at the speed of a copy, whatever they compute",
    subtitle=f"Least traffic per second over that of a device copy in the same rounds, bf16. {fused.label}",
    height=0.42 * len(points) + 0.5, grid="x",
)
for row, point in enumerate(points):
    copied = point["timed"]["copy"]["bytes_per_second"]
    for k, (way, colour) in enumerate(ways.items()):
        if way in point["timed"]:
            share = point["timed"][way]["bytes_per_second"] / copied
            ax.barh(row + 0.26 * (k - 1), share, height=0.24, color=colour)
            if row == 0:
                ink = "white" if way == "lab 2" else "black"
                ax.text(0.01, row + 0.26 * (k - 1), way, va="center", size=7, color=ink)
            if way == "lab 2":
                ax.text(max(1, share) + 0.02, row + 0.26, f"{share:.2f}", va="center", size=8)
ax.axvline(1, color=plots.LIMIT, linewidth=1)
names = [p["name"] + " backward" * (p["direction"] == "backward") for p in points]
ax.set_yticks(range(len(points)), names)
ax.set(ylim=(len(points) - 0.5, -0.6), xlim=(0, 1.15), xlabel="over a device copy")
plots.show(fig, "Bars for each operator: the rate of PyTorch's own operator, of torch.compile and of lab 2's "
                "kernel, over the rate of a device copy.")
of_copy = {(p["name"], p["direction"]): p["of_copy"]["ratio"] for p in points}
short = [ratio for (name, _), ratio in of_copy.items() if not name.endswith(("65536", "262144"))]
claim("triton.lab2.of_copy", min(short), (0.95, 1.2), kind="measure", source=fused.label,
      statement="Least traffic per second over a device copy, the slowest of those that hold a row or need none")
claim("triton.lab2.online", of_copy["online softmax, rows of 262144", "forward"], 2 / 3, tolerance=0.1, kind="measure",
      source="two reads and a write, at the speed of a copy", statement="Online softmax of the longest rows, the same")

# %% [markdown] id="s12-read" needs="fused_operators"
# Read it with the traffic formulas. Element-wise operators, the weighted sum and rows that fit a block move each byte once, and run like a copy. (The weighted sum is even a little faster: it only reads, while a copy has to turn the memory's bus around between reading and writing.) The *online* softmax reads twice: three passes where the copy has two, so two thirds of its speed is all that the formula allows, and on the longest rows it gets that. (On rows of 65,536 it gets a little more: part of the second read comes from L2.) Lab 2's `softmax` beats that bound on the same rows. A group of programs shares a row: each takes a part, publishes the maximum and the sum of its part, waits for those of the others, and scales its part while L2 still has it. HBM delivers the row once. Waiting for another program is what section 1 forbade; it needs a *cooperative* launch, which either has all programs on the GPU at once or fails.

# %% id="lab-gemm" needs="gemm"
gemm = records.load("gemm")
rows = []
for p in gemm.results["points"]:
    if p["layout"] == "plain":
        rates = {way: t["flops_per_second"] for way, t in p["timed"].items()}
        rows.append({"N": p["n"], **rates, "descriptors over cuBLAS": p["of_cublas"]["ratio"]})
ways = [name for name in rows[0] if name not in ("N", "descriptors over cuBLAS")]
display(plots.table(rows, units=dict.fromkeys(ways, "FLOP/s"), digits=3,
                    caption=f"Square products in bf16: {gemm.label}"))
claim("triton.lab2.of_cublas", min(row["descriptors over cuBLAS"] for row in rows if row["N"] >= 4096), (0.95, 1.2),
      kind="measure", source=gemm.label, statement="Lab 2's product over cuBLAS, 4096 and 8192, the slower of the two")
grouping = {row["N"]: row["lab 2, pointers, grouped"] / row["lab 2, pointers, row by row"] for row in rows}
claim("triton.lab2.grouping_small", grouping[2048], 1, tolerance=0.03, kind="measure",
      source="A and B fit in L2 together", statement="N = 2048 with pointers: grouped over row by row, rate")
claim("triton.lab2.grouping_large", grouping[8192], (1.03, 1.3), kind="measure", source=gemm.label,
      statement="N = 8192 with pointers: grouped over row by row, rate")
spent = 2 * 8192**3 / rows[-1]["lab 2, pointers, row by row"]
needed = hbm_bytes(8192, 128, 256, 1, H100.sms) / records.load("ceilings").results["best"]["copy_bytes_per_second"]
print(f"8192, row by row: HBM is busy for {quantity(needed, 's', 2)} of {quantity(spent, 's', 2)} at most")

# %% [markdown] id="s12-gemm" needs="gemm"
# With descriptors the product stands beside cuBLAS. With pointers it stays a little behind: address arithmetic and masks take registers and instructions.
#
# Now compare the two columns with pointers. At $N = 2048$ the order makes no difference: both operands fit in L2. At $N = 8192$ grouping gains. By how much *should* it? The printed line says that HBM has time to spare even row by row, so with perfect overlap the gain would be nothing (notebook 02: a saving counts on the longer clock). The overlap is not perfect: a miss in L2 takes longer than a hit, more often than the pipeline's stages can hide. And every byte from HBM costs power, which a GPU at its power limit takes from the clock of its tensor cores.

# %% [markdown] id="summary"
# ## Summary
#
# - A Triton kernel is what one program does to one tile. `program_id` says which tile; blocks of offsets and masks say which elements. The compiler takes care of threads, shared memory and barriers inside the program, and of nothing between programs.
# - Masks protect memory that is not yours, and `other` must be neutral for what follows: 0 for a sum, $-\infty$ for a maximum.
# - Take strides, and widen offsets that may pass $2^{31}$.
# - Choose the cut so that programs share no sums. Where they must, add in two stages: it is reproducible.
# - Traffic is a formula. Write it down first, then have the profiler count.
# - L2 sees waves, not programs. A wave that covers a square asks HBM for least.
# - Descriptors describe the tensor once and let hardware copy rectangles. Block pointers are their past.
# - Result, profiler, GPU, tuning: in this order.
#
# ## Exercises
#
# Work each on paper first. Dots: difficulty.
#
# **1 (•) Programs.** A tensor of 3 x 1000 x 77 elements, flattened, with `BLOCK = 1024`. How many programs? How many lanes of the last one are idle?
#
# <details><summary>Answer</summary>
#
# 231,000 elements: 226 programs, and 424 idle lanes in the last one.
#
# </details>
#
# **2 (•) Neutral elements.** Which `other` do loads need in kernels that compute a row's minimum, its product, the logical *and* of a row of flags, its logsumexp?
#
# <details><summary>Answer</summary>
#
# $+\infty$; 1; true; $-\infty$ (it contributes $e^{-\infty} = 0$).
#
# </details>
#
# **3 (•) Which stride is wrong?** A kernel that should double a (64, 256) matrix was launched with `x.shape` in place of `x.stride()`. Which elements does it read? Does the profiler object?
#
# <details><summary>Answer</summary>
#
# Element $64 i + 256 j$ instead of $256 i + j$. For the largest $i$ and $j$ that is $64 \cdot 63 + 256 \cdot 255 = 69{,}312$, far beyond the 16,384 elements: the profiler reports the reads that leave the tensor. A test on a vector, or on a matrix of one row, might not notice.
#
# </details>
#
# **4 (••) A column sum.** `x.sum(0)` for $x$ of shape $(R, D)$. Which cut has no shared sums? When is it slow all the same, and what then?
#
# <details><summary>Answer</summary>
#
# A program owns a block of columns and walks down all rows. With few columns there are few programs: 4,096 columns in blocks of 128 are 32 programs for 132 SMs. Then cut the rows too, and add the partial sums in a second stage, as the weight's gradient does.
#
# </details>
#
# **5 (••) Rows of 2,049.** One program a row, in registers: which share of the lanes idles? Name two ways to do better.
#
# <details><summary>Answer</summary>
#
# The block has 4,096 lanes, 50 % idle. Walk the row in blocks of 256 or 512 with the online recurrence (two reads), or hold the row as two blocks, 2,048 and a small one, in registers (one read).
#
# </details>
#
# **6 (••) Bias gradient.** $y = x + b$ with $b$ of shape $(D,)$. Derive the gradients. Which kernels of this notebook can you reuse?
#
# <details><summary>Answer</summary>
#
# $\partial L/\partial x = g$ (no kernel at all), $\partial L/\partial b_j = \sum_i g_{ij}$: the second stage alone, `column_sum_kernel` on $g$, if there are enough columns to fill the GPU; otherwise both stages.
#
# </details>
#
# **7 (••) The other wave.** An A100 has 108 SMs. Tiles of 128 x 128, one on each SM. Which height of group does the formula give? By what factor does the first wave of an $8192^3$ product shrink against row by row?
#
# <details><summary>Answer</summary>
#
# $\sqrt{108} \approx 10.4$. Row by row: 2 tile rows and 64 columns, 66 bands. In groups of 10: 10 rows and 11 columns, 21 bands. A factor of 3.1.
#
# </details>
#
# **8 (••) When order does not matter.** For which sizes does the order of tiles make no difference for HBM?
#
# <details><summary>Answer</summary>
#
# When $A$ and $B$ fit in L2 together, everything is fetched once: on an H100 with 50 MB, square bf16 products up to about $N = 3{,}500$. And when there is only one wave, which covers the whole output anyway.
#
# </details>
#
# **9 (•••) Atomics without losing reproducibility.** Suggest a way to add partial sums in one launch, without a second kernel, and with the same bits each time.
#
# <details><summary>Answer</summary>
#
# Each program writes its partial sums, then increments an atomic *counter*. The one that finds itself last adds all partial sums in a fixed order. The integer counter is exact in any order. (The profiler reports such turn-taking as a race, since it does not know that the counter orders it.) Or add integers: convert to fixed point, where addition is associative.
#
# </details>
#
# **10 (•••) A fused loss.** Cross entropy of logits $(R, V)$ with a target per row: $\ell_i = \log \sum_j e^{x_{ij}} - x_{i t_i}$. How many bytes must forward and backward move at least, if both are computed in one pass? What does the kernel of section 7 lack?
#
# <details><summary>Answer</summary>
#
# The gradient is $(p_{ij} - [j = t_i])/R$: as large as the logits. One read and one write of $RVe$ bytes, if a row fits in registers: the softmax kernel, with one element changed and the loss stored. With a vocabulary of 50,304 a row does not fit; the online version reads twice: $3RVe$.
#
# </details>
#
# The cell below checks the numbers in the answers.

# %% id="answers"
elements = 3 * 1000 * 77  # exercise 1
assert (triton.cdiv(elements, 1024), -elements % 1024) == (226, 424)
assert 64 * 63 + 256 * 255 == 69_312 > 64 * 256  # 3
assert triton.cdiv(4096, 128) == 32  # 4
assert round(100 * (1 - 2049 / triton.next_power_of_2(2049))) == 50  # 5
a100 = gpu("A100")  # 7
assert (a100.sms, round(a100.sms**0.5, 1)) == (108, 10.4)
row_major, grouped = (sum(bands(order_of(64, 64, group), a100.sms)[0]) for group in (1, 10))
assert (row_major, grouped, round(row_major / grouped, 1)) == (66, 21, 3.1)
assert H100.l2_bytes // 10**6 in (50, 52) and 2 * 2 * 3500**2 <= 50e6 < 2 * 2 * 3600**2  # 8
print("every number in the answers holds")

# %% [markdown] id="sources"
# ## Sources
#
# - P. Tillet, H. T. Kung, D. Cox. *Triton: an intermediate language and compiler for tiled neural network computations.* MAPL 2019. The language.
# - Triton documentation and tutorials 02, 03 and 09 (fused softmax, matrix product with grouped order, persistent matrix product with descriptors); release notes of 3.7 and 3.9 for block pointers.
# - D. Hendrycks, K. Gimpel. *Gaussian error linear units.* 2016. The activation and its tanh form.
# - M. Milakov, N. Gimelshein. *Online normalizer calculation for softmax.* 2018. The recurrence of section 7.
# - NVIDIA. *CUDA C++ programming guide*, on the tensor memory accelerator and its descriptors.
# - Courses: Stanford CS 336 and NYU's *Building LLM Reasoners*, whose assignments chose GeLU and the weighted sum.
#
# Next: lab 2, where these kernels take every shape, stride and dtype, and are held to their traffic and to the speed of a copy.
