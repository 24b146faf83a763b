# %% [markdown] id="title"
# # 04 Triton: programs over tiles
#
# Notebook 03 had five ideas that make a kernel fast. Four of them are about which bytes move, in which order, and what stays on the chip.
# Triton is a language in which those are the things that you write down, and nearly the only ones. This notebook takes you from a
# kernel of one line to a tiled matrix product and an operator with a backward pass of its own.
#
# **After this notebook you can**
#
# - turn a kernel written for one thread into one written for a tile, and say what the compiler now does for you;
# - write masks and strides that are right for every shape, and find the kernel whose masks are not;
# - derive a backward pass, write it as kernels, and add up a gradient over programs without a race;
# - predict exactly how many bytes a kernel asks for, and check it on a laptop;
# - choose the order of tiles from the bytes that HBM must deliver;
# - read old code with block pointers and rewrite it with tensor descriptors;
# - debug a kernel with `print`, with a breakpoint and with a profiler;
# - tune, and know what tuning can and cannot give.
#
# **Know first:** notebooks 01 to 03 (program, warp, sector, HBM, roofline, tile).
# **Time:** 120 minutes, and 60 for the exercises.
#
# | you have | what happens here |
# |---|---|
# | no GPU | kernels run in Triton's interpreter, every count is exact; measured figures show the recorded H100 |
# | a GPU older than sm_80 (a T4 is sm_75) | the same: Triton no longer compiles for it |
# | a GPU of sm_80 or newer | kernels are compiled and run there; this GPU's own measurement appears beside the recorded one |

# %% id="setup" tags=["setup"]
pass

# %% id="imports"
import sys

import torch
import torch.nn.functional as F

from utils import plots, records, reference, runtime  # before Triton: runtime decides where kernels run
from utils.claims import claim
from utils.hardware import gpu
from utils.interpreter import twins
from utils.kernel_profile import profile_kernel
from utils.kernel_profile.lanes import trace_lanes
from utils.plots.programs import program_owners, programs_animation, tile_orders
from utils.units import quantity

import triton
import triton.language as tl

H100, DEVICE = gpu("H100"), runtime.DEVICE
torch.manual_seed(4)


def randn(*shape, dtype=torch.float32):
    """Random numbers, drawn on the CPU so that every machine gets the same ones."""
    return torch.randn(*shape).to(dtype).to(DEVICE)


# %% [markdown] id="s1"
# ## 1. From one thread to one block
#
# Multiply every element of a vector by a number. In CUDA C++ you write what one *thread* does:
#
# ```c++
# __global__ void scale(const float *x, float *out, float a, int n) {
#     int i = blockIdx.x * blockDim.x + threadIdx.x;   // my element
#     if (i < n) out[i] = a * x[i];                     // if it exists
# }
# scale<<<(n + 255) / 256, 256>>>(x, out, 2.0f, n);     // blocks, threads of a block
# ```
#
# Each thread handles one number. What the threads of a block have in common (a tile of the vector, one stretch of
# memory) is nowhere in the text. You keep it in your head, and you arrange it with index arithmetic.
#
# In Triton you write what one *block* does. The index becomes a vector of indices, the `if` becomes a vector of
# yes and no, and the thread disappears:

# %% id="scale-kernel"
@triton.jit
def scale_kernel(x_ptr, out_ptr, a, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)  # blockIdx.x
    offsets = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,): the index i of every thread at once
    mask = offsets < n  # (BLOCK,): the if of every thread
    x = tl.load(x_ptr + offsets, mask=mask)  # (BLOCK,): one load for the tile
    tl.store(out_ptr + offsets, a * x, mask=mask)


# %% [markdown] id="s1-predict"
# The running block is called a **program**. `scale_kernel[grid](...)` launches a grid of them.
#
# **Predict.** The vector has 1,000 elements and a program takes 256. How many programs are needed? How many of their lanes
# do nothing? Which program do those lanes belong to?

# %% id="scale-launch"
n, BLOCK = 1000, 256
x = randn(n)
out = torch.empty_like(x)
grid = (triton.cdiv(n, BLOCK),)  # a tuple of up to three numbers; cdiv divides and rounds up
scale_kernel[grid](x, out, 2.0, n, BLOCK=BLOCK)
assert torch.equal(out, 2 * x)

with trace_lanes() as trace:  # the same launch, keeping what every lane of every program pointed to
    scale_kernel[grid](x, out, 2.0, n, BLOCK=BLOCK)
loads = trace.of("x_ptr", "read")
idle = {one.program[0]: one.masked for one in loads if one.masked}
claim("triton.grid.programs", len(loads), 4, source="1000 / 256, rounded up", statement="Programs")
claim("triton.grid.idle_lanes", sum(idle.values()), 4 * 256 - 1000, statement="Lanes that are masked off")
print("they belong to program", *idle)

# %% [markdown] id="s1-same"
# Do the two views really name the same elements? Play the CUDA kernel, thread by thread, and compare its indices with what the
# lanes of the Triton kernel pointed to.

# %% id="scale-same"
cuda_view = {}
for block in range(grid[0]):
    for thread in range(BLOCK):
        i = block * BLOCK + thread  # the line of the CUDA kernel
        cuda_view[block, thread] = (i, i < n)

triton_view = {
    (one.program[0], lane): (int(one.elements[lane]), bool(one.mask[lane]))
    for one in loads for lane in range(BLOCK)
}
claim("triton.views.same", sum(cuda_view[key] == triton_view[key] for key in cuda_view), 4 * 256,
      statement="Lanes whose index and mask agree with the CUDA thread's", unit="lanes")

# %% [markdown] id="s1-parts"
# The parts, one by one:
#
# - **The grid** is a tuple of one, two or three sizes. Programs run in any order, some at once and some later. They must not depend on each
#   other.
# - **`tl.program_id(axis)`** is a scalar: where in the grid this program is. It is the only thing that tells programs apart.
# - **`tl.arange(0, BLOCK)`** is a block of consecutive integers. Its length must be a power of two that is known when the kernel is
#   compiled.
# - **A tensor argument** arrives as a pointer to its first element. The pointer knows the element type and nothing else: no shape, no
#   strides, no length. Whatever the kernel needs to know beyond that, you pass.
# - **`x_ptr + offsets`** is a block of pointers, in steps of elements. `tl.load` fetches what they point to. Lanes whose mask is false
#   fetch nothing, and get `other` if you give it.
# - **`tl.constexpr`** marks an argument that is a constant of the compiled code. Each new value compiles a new kernel. Shapes of blocks must be
#   constants, because they decide registers and instructions. Sizes of tensors should not be.
# - **Ordinary integers** are values of the running program, with two exceptions that Triton makes by itself: it compiles a special version when an integer is 1, and one when it is divisible by
#   16. The first tells the compiler that a stride is 1, so that neighbours are neighbours in memory; the second that rows start on aligned addresses, so that loads can be wide.
#
# In the interpreter these are objects that you can look at. The next cell puts a Python `print` into a kernel; section 10 explains
# the block around the launch.

# %% id="look-inside"
@triton.jit
def look_kernel(x_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=-1.0)
    print(f"program {pid}: offsets {offsets}  mask {mask}  x {x}")


@triton.jit
def odd_block_kernel(x_ptr):
    tl.store(x_ptr + tl.arange(0, 100), 1.0)


with twins():  # run kernels in the interpreter, on a GPU too
    look_kernel[(3,)](torch.arange(10.0, device=DEVICE), 10, BLOCK=4)
    try:
        odd_block_kernel[(1,)](torch.zeros(100, device=DEVICE))
    except Exception as error:
        print("tl.arange(0, 100):", str(error).split(": ")[-1])

# %% [markdown] id="s1-who"
# What did you *not* write? Which thread takes which element, how wide the load instructions are, what goes through shared memory and when the threads of a
# block wait for each other. The compiler knows the whole tile, so it can decide these:
#
# | decision | CUDA C++ | Triton |
# |:---|:---|:---|
# | the launch grid, the tile, the order of tiles | you | you |
# | addresses in memory, and which lanes stay off | you | you |
# | warps of a program, stages of a pipeline | you | you: `num_warps`, `num_stages`, or the autotuner |
# | elements of a thread, width of its loads | you | compiler |
# | what shared memory holds, and its layout | you | compiler |
# | barriers inside a block | you | compiler |
# | instructions of the tensor cores | you | compiler, from `tl.dot` |
# | barriers between blocks | there are none | there are none |
#
# The upper rows are where the bytes are decided. That is why a kernel of ten lines can run at the speed of memory, and also
# why a wrong one can be slow by any factor: nobody corrects a bad choice of tiles.

# %% [markdown] id="s1-mask"
# ### What a mask prevents
#
# Leave the mask out. On paper the last program now reads and writes past the end of the vector.
#
# **Predict.** The unmasked kernel runs on 1,000 elements. Is the result right? Does anything else happen?
#
# To see it, put `out` at the start of a larger buffer, with a neighbour behind it. That is how an allocator places tensors.

# %% id="unmasked"
@triton.jit
def unmasked_kernel(x_ptr, out_ptr, a, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, a * tl.load(x_ptr + offsets))


source, buffer = randn(1024), torch.zeros(2048, device=DEVICE)
x, out, neighbour = source[:n], buffer[:n], buffer[n:]
unmasked_kernel[grid](x, out, 2.0, BLOCK=BLOCK)
print("result right:", torch.equal(out, 2 * x))
claim("triton.unmasked.damage", int((neighbour != 0).sum()), 4 * 256 - 1000, unit="elements",
      statement="Overwritten in a tensor that the kernel was never given")

# %% [markdown] id="s1-mask-2"
# The result is right, so a test of the result passes. A tensor that has nothing to do with it is damaged. On a GPU this shows up as a wrong loss
# an hour later, or as an illegal memory access if the neighbour happens to be unmapped.
#
# The course's profiler runs the same launch and checks each lane against the tensor that its pointer came from:

# %% id="unmasked-found"
with profile_kernel() as profile:
    unmasked_kernel[grid](x, out, 2.0, BLOCK=BLOCK)
for finding in profile.out_of_bounds:
    print(finding)
claim("triton.bounds.lanes", sum(finding.count for finding in profile.out_of_bounds), 2 * 24, unit="lanes",
      statement="Out of bounds: reads and writes")

# %% [markdown] id="s2"
# ## 2. The grid over a tensor
#
# Matrices get two-dimensional tiles. A block of row numbers stands upright, a block of column numbers lies flat, and broadcasting makes the rectangle
# of offsets:
#
# $$\text{offset}[i, j] = \text{row}[i] \cdot s_0 + \text{column}[j] \cdot s_1,$$
#
# with $s_0$ and $s_1$ the strides: how many elements lie between neighbours along each axis. In code, `row[:, None]` has shape `(BLOCK_M, 1)` and
# `column[None, :]` has shape `(1, BLOCK_N)`.
#
# **Predict.** A matrix of 10 x 22 in tiles of 4 x 8. How many programs? What share of their lanes is masked off?

# %% id="double-kernel"
@triton.jit
def double_kernel(x_ptr, out_ptr, rows, columns, stride_xm, stride_xn, stride_om, stride_on,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row[:, None] < rows) & (column[None, :] < columns)  # (BLOCK_M, BLOCK_N)
    x = tl.load(x_ptr + row[:, None] * stride_xm + column[None, :] * stride_xn, mask=mask)
    tl.store(out_ptr + row[:, None] * stride_om + column[None, :] * stride_on, 2 * x, mask=mask)


def double(x, block=(4, 8)):
    """2 * x for a matrix x (rows, columns) of any strides; the result is contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(x.shape[0], block[0]), triton.cdiv(x.shape[1], block[1]))
    double_kernel[grid](x, out, *x.shape, *x.stride(), *out.stride(), BLOCK_M=block[0], BLOCK_N=block[1])
    return out


x = randn(10, 22)
assert torch.equal(double(x), 2 * x)
with trace_lanes() as trace:
    double(x)
loads = trace.of("x_ptr", "read")
claim("triton.grid2d.programs", len(loads), 3 * 3, statement="Programs over 10 x 22")
claim("triton.grid2d.masked", sum(one.masked for one in loads) / sum(one.mask.size for one in loads),
      1 - 10 * 22 / (12 * 24), statement="Share of lanes masked off")

# %% id="grid-animation" tags=["nbval-ignore-output"]
programs_animation(
    loads, tuple(x.shape), x.stride(),
    title="Nine programs cover a ragged matrix; the hatched lanes touch nothing",
    subtitle="10 × 22 elements in tiles of 4 × 8: vermilion is read now, pale was read before",
    alt="A matrix of 10 by 22 squares. Nine programs take turns, each over a tile of 4 by 8, row by row. "
        "Tiles at the right and lower edge stick out; those lanes are hatched and touch nothing.",
)

# %% [markdown] id="s2-note"
# The picture is drawn from the addresses that the kernel computed; change the kernel and it changes. The order is the interpreter's: the last axis of the grid
# fastest. A GPU promises no order.
#
# Note what a wrong mask would look like here: a lane that sticks out to the *right* points to an address that exists, in the next row. Nothing would
# crash. It would be counted twice.

# %% [markdown] id="s3"
# ## 3. Strides
#
# A PyTorch tensor is a pointer, a shape and strides. Slicing, transposing and expanding change these three and move no byte. So a kernel that takes strides works on
# all of them, without a copy. **Predict** the strides of each view of a contiguous matrix `x` of 64 x 256 before you read on.

# %% id="views"
x = randn(64, 256)
views = {
    "x": x,
    "x.t()": x.t(),
    "x[:, ::2]": x[:, ::2],
    "x[:, ::8]": x[:, ::8],
    "x[::4]": x[::4],
    "x[:, 2:130]": x[:, 2:130],
    "x[:1].expand(64, 256)": x[:1].expand(64, 256),
}
rows = []
for name, view in views.items():
    assert torch.equal(double(view, (16, 32)), 2 * view)
    with profile_kernel(check_races=False) as profile:
        double(view, (16, 32))
    read = profile.by_argument["x_ptr"]
    rows.append((name, str(tuple(view.shape)), str(view.stride()), read.bytes_loaded, 32 * read.sectors_loaded,
                 read.useful_bytes_loaded / (32 * read.sectors_loaded), 32 * read.dram_sectors_loaded))
shares = {row[0]: row[5] for row in rows}
columns = ["view", "shape", "strides", "bytes asked for", "bytes in sectors", "useful share", "distinct bytes"]
plots.table(rows, columns)

# %% [markdown] id="s3-note"
# Read the rows. The transposed matrix is read as well as the original: the compiler lays the lanes along the axis whose stride is 1, whichever that is. A step
# of 2 wastes half of each 32-byte sector, a step of 8 seven eighths (fp32). Skipping whole rows wastes nothing. A slice that starts in the middle of a sector touches one sector more per
# row of the tile. And `expand` has stride 0: many addresses, few distinct bytes.

# %% id="views-claims"
claim("triton.strides.transposed", shares["x.t()"], 1.0, statement="Useful share of the sectors, transposed")
claim("triton.strides.step8", shares["x[:, ::8]"], 4 / 32, source="one fp32 of each 32-byte sector",
      statement="Useful share, every eighth column")
claim("triton.strides.misaligned", shares["x[:, 2:130]"], 4 / 5, source="32 columns span 5 sectors instead of 4",
      statement="Useful share, a slice that starts inside a sector")

# %% [markdown] id="s3-overflow"
# **A trap.** Integers in a kernel are 32 bits wide unless a value says otherwise. `program_id` is one of them, and so is a stride below $2^{31}$. Their product can be too large.
#
# **Predict.** Rows of 1.5 billion elements. At which row does `pid * stride` go wrong?

# %% id="overflow"
@triton.jit
def row_start_kernel(narrow_ptr, wide_ptr, stride):
    pid = tl.program_id(0)
    tl.store(narrow_ptr + pid, pid * stride)
    tl.store(wide_ptr + pid, pid.to(tl.int64) * stride)


narrow, wide = (torch.zeros(4, dtype=torch.int64, device=DEVICE) for _ in range(2))
row_start_kernel[(4,)](narrow, wide, 1_500_000_000)
rows = list(zip(range(4), narrow.tolist(), wide.tolist(), strict=True))
display(plots.table(rows, ["row", "pid * stride", "pid.to(tl.int64) * stride"]))
claim("triton.overflow.row", next(r for r, a, b in rows if a != b), -(-(2**31) // 1_500_000_000),
      source="the first row that starts at or beyond 2^31", statement="First row whose address is wrong")
assert 16 * 4096 * 50_304 > 2**31  # the logits below

# %% [markdown] id="s3-after"
# A negative offset: the kernel reads far in front of the tensor. Nothing warns you. A batch of logits, 16 x 4096 tokens over a vocabulary of 50,304, already has more than $2^{31}$ elements. The cure is to widen the
# one factor that is multiplied by a large stride.

# %% [markdown] id="s4"
# ## 4. GeLU
#
# The Gaussian error linear unit weighs its input by the probability that a standard normal number is smaller. The form that GPT-2 made common replaces that probability by a
# hyperbolic tangent:
#
# $$\text{GeLU}(x) = \tfrac12\, x\,\bigl(1 + \tanh z\bigr), \qquad z = \sqrt{\tfrac{2}{\pi}}\,\bigl(x + 0.044715\,x^3\bigr).$$
#
# Triton's core language has `exp` and no `tanh`. Write $\tanh z = \frac{1 - e^{-2z}}{1 + e^{-2z}}$, add 1 and halve:
#
# $$\tfrac12(1 + \tanh z) = \frac{1}{1 + e^{-2z}} = \sigma(2z), \qquad\text{so}\qquad \text{GeLU}(x) = x\,\sigma(2z).$$
#
# One exponential, one division, and no subtraction of nearly equal numbers. What happens at the ends? For large positive $z$ the exponential underflows to 0 and $\sigma$ is 1. For
# large negative $z$ it overflows to infinity, and $1/\infty = 0$ is right too. Check the identity first, then the ends:

# %% id="gelu-identity"
x = torch.linspace(-30, 30, 10_001, dtype=torch.float64)
z = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
assert torch.allclose(x * torch.sigmoid(2 * z), F.gelu(x, approximate="tanh"), rtol=1e-13, atol=1e-15)
ends = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
z = (2 / torch.pi) ** 0.5 * (ends + 0.044715 * ends**3)
print("at the ends, in fp32:", *(ends / (1 + torch.exp(-2 * z))).tolist())


# %% [markdown] id="s4-build"
# Now the kernel. Compared with `scale_kernel` only the middle is new: widen to fp32, compute, narrow again. The arithmetic is free here (notebook 02), rounding after each step would not be.

# %% id="gelu-kernel"
@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # may pass 2^31
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)  # (BLOCK,), computed in fp32 whatever the dtype
    z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    y = x / (1.0 + tl.exp(-2.0 * z))
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


def gelu(x, block=1024):
    """GeLU, tanh form, of a contiguous tensor of any shape."""
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}")
    out = torch.empty_like(x)
    if x.numel():  # a grid of no programs is refused by the driver
        gelu_kernel[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
    return out


# %% [markdown] id="s4-check"
# Is it right? "Close to PyTorch" is a weak test: two 16-bit results may both be wrong. Hold both against float64, and ask that our error is at most twice
# that of PyTorch's own operator.

# %% id="gelu-check"
def as_good(ours, theirs, exact):
    """Whether our largest error against float64 is at most twice theirs; a few roundings are always allowed."""
    mine, other = ((y.double() - exact).abs().max().item() for y in (ours, theirs))
    rounding = torch.finfo(ours.dtype).eps * exact.abs().max().item()
    return mine <= 2 * max(other, 2 * rounding)


rows = []
for shape in ((1,), (1000,), (7, 33, 5)):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = 2 * randn(*shape, dtype=dtype)
        good = as_good(gelu(x), F.gelu(x, approximate="tanh"), reference.gelu(x, "tanh"))
        rows.append((str(shape), str(dtype).removeprefix("torch."), good))
plots.table(rows, ["shape", "dtype", "error at most twice PyTorch's"])

# %% [markdown] id="s4-traffic"
# **Predict** the traffic of `gelu` on a million bf16 elements, in bytes. What is the least that any kernel could do?

# %% id="gelu-traffic"
n = 1_000_003
with profile_kernel(check_races=False) as profile:
    gelu(randn(n, dtype=torch.bfloat16))
claim("triton.gelu.traffic", profile.bytes_moved, 2 * n + 2 * n, unit="B",
      source="each element once in, once out", statement=f"GeLU of {n:,} bf16 elements")
