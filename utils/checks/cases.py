"""The cases that a kernel is tried on: shapes, memory layouts, dtypes and values, drawn from a seed.

Kernels fail at the edges: sizes that the tile does not divide, one element, none, inputs that are not contiguous,
offsets beyond 2^31. :class:`Cases` says what an exercise's edges are and draws them; a :class:`Case` builds the input
tensors, so that the same seed gives the same numbers on every machine.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from utils import runtime
from utils.checks.core import draw_seed, generator

#: What an axis may be: a tile size (sizes are drawn around its multiples), a range, or the only sizes allowed.
Axis = int | range | Sequence[int]

#: Memory layouts of a drawn input. All but the first have gaps or another order, and NaN in every gap.
LAYOUTS = ("contiguous", "transposed", "padded", "strided", "offset", "expanded", "far")

_FAR_STRIDE = 2**30  # elements: two of these no longer fit in a signed 32-bit integer


@dataclass(frozen=True)
class Case:
    """One set of inputs: named sizes, dtype, layout and options, and a ``kind`` that says which edge its shape tries.

    ``options`` are passed to student and reference as keyword arguments (``causal=True``). ``magnitude`` multiplies the
    values, which are drawn from a normal distribution.
    """

    kind: str
    sizes: Mapping[str, int]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    magnitude: float = 1.0

    def __str__(self) -> str:
        parts = [f"{name}={size}" for name, size in self.sizes.items()]
        parts.append(str(self.dtype).removeprefix("torch."))
        parts += [] if self.layout == "contiguous" else [self.layout]
        parts += [f"{name}={value}" for name, value in self.options.items()]
        parts += [] if self.magnitude == 1 else [f"values x {self.magnitude:g}"]
        return " ".join(parts)

    @property
    def label(self) -> str:
        """What this case tries, in a few words: ``ragged``, ``ragged transposed``, ``whole tiles float16``."""
        parts = [self.kind] + ([] if self.layout == "contiguous" else [self.layout])
        parts += [] if self.dtype == torch.float32 else [str(self.dtype).removeprefix("torch.")]
        return " ".join(parts + ([] if self.magnitude == 1 else ["large values"]))

    @property
    def element_size(self) -> int:
        """Bytes of one element of ``dtype``."""
        return self.dtype.itemsize

    def numel(self, *axes: str) -> int:
        """Number of elements of a tensor with the named axes (an integer stands for itself)."""
        return math.prod(self.shape(*axes))

    def shape(self, *axes: str | int) -> tuple[int, ...]:
        """Sizes of the named axes; an integer stands for itself.

        Raises:
            ValueError: a name is not an axis of this case.
        """
        for axis in axes:
            if not isinstance(axis, int) and axis not in self.sizes:
                raise ValueError(f"{axis!r} is not an axis of this case: it has {', '.join(self.sizes)}")
        return tuple(axis if isinstance(axis, int) else self.sizes[axis] for axis in axes)

    def tensor(
        self,
        name: str,
        *axes: str | int,
        dtype: torch.dtype | None = None,
        layout: str | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Draw an input from a normal distribution, on the device where kernels run.

        Args:
            name: Its name; with the seed it decides the values, so that two tensors of one case differ.
            axes: Its axes, outermost first.
            dtype: By default the case's. An integer dtype gives values from -8 to 8.
            layout: By default the case's; see :data:`LAYOUTS`.
            scale: Multiplies the values.

        Raises:
            ValueError: an axis or the layout is unknown.
        """
        shape, dtype = self.shape(*axes), dtype or self.dtype
        source = torch.Generator().manual_seed(random.Random(f"{self.seed}/{self}/{name}").getrandbits(63))
        if dtype.is_floating_point:
            values = (torch.randn(shape, generator=source, device="cpu") * (self.magnitude * scale)).to(dtype)
        else:
            values = torch.randint(-8, 9, shape, generator=source, device="cpu").to(dtype)
        return with_layout(values.to(runtime.DEVICE), layout or self.layout)


def with_layout(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return ``values`` in another memory layout: same shape, dtype and numbers (``expanded`` repeats its first row).

    ``transposed`` stores the last two axes in swapped order; ``padded`` is a slice of a larger tensor (rows further
    apart than they are long); ``strided`` takes every second element of the last axis; ``offset`` starts inside its
    storage; ``expanded`` has stride 0 on the first axis; ``far`` puts rows 2^30 elements apart, so that offsets pass
    2^31.

    Raises:
        ValueError: ``layout`` is not one of :data:`LAYOUTS`.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if layout == "contiguous" or values.dim() == 0 or values.numel() == 0:
        return values
    shape = values.shape
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded":
        return values[:1].contiguous().expand(shape)
    if layout == "far":
        strides = [_FAR_STRIDE, *values[0].contiguous().stride()] if values.dim() > 1 else [_FAR_STRIDE]
        home = torch.empty((shape[0] - 1) * _FAR_STRIDE + values[0].numel(), dtype=values.dtype, device=values.device)
        return home.as_strided(shape, strides).copy_(values)
    gap = math.nan if values.dtype.is_floating_point else 77
    if layout == "padded":
        home = values.new_full((shape[0] + 1, *shape[1:-1], shape[-1] + 5) if len(shape) > 1 else (shape[0] + 8,), gap)
        view = home[1:, ..., 3 : 3 + shape[-1]] if len(shape) > 1 else home[3 : 3 + shape[0]]
    elif layout == "offset":
        home = values.new_full((values.numel() + 8,), gap)
        view = home[3 : 3 + values.numel()].view(shape)
    else:  # strided, and transposed in one dimension
        home = values.new_full((*shape[:-1], 2 * shape[-1]), gap)
        view = home[..., ::2]
    return view.copy_(values)


def far_fits(dtype: torch.dtype, rows: int = 3) -> bool:
    """True when a tensor in the ``far`` layout can be allocated here.

    On a CPU it needs address space only; on a GPU real memory, and address space for its copy on the host.
    """
    needed = (rows - 1) * _FAR_STRIDE * dtype.itemsize * 1.25
    if runtime.HAS_GPU and torch.cuda.mem_get_info(runtime.DEVICE)[0] <= 2 * needed:
        return False
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > needed


def draw_shapes(
    seed: int, axes: Mapping[str, Axis], *, count: int = 2, max_tiles: int = 3, zero: bool = False
) -> list[tuple[str, dict[str, int]]]:
    """Draw named sizes at the edges where kernels fail, simplest first.

    Args:
        seed: The same seed gives the same sizes.
        axes: For each axis its tile size, a ``range`` of sizes, or the only sizes allowed.
        count: How many ragged shapes are drawn.
        max_tiles: Most whole tiles along an axis.
        zero: Also draw a shape without elements.

    Returns:
        Pairs of kind and sizes: ``one tile``, ``whole tiles``, ``ragged`` (several times; no tile divides its axis),
        ``short`` (less than a tile), ``one element`` and, if asked for, ``no element``.

    Raises:
        ValueError: an axis has no size to choose from, or ``count`` or ``max_tiles`` is not positive.
    """
    if count < 1 or max_tiles < 1:
        raise ValueError(f"count and max_tiles must be at least 1, got {count} and {max_tiles}")
    for name, axis in axes.items():
        if (axis < 1) if isinstance(axis, int) else len(axis) == 0:
            raise ValueError(f"axis {name!r} needs a positive tile or sizes to choose from, got {axis!r}")
    draw = generator(draw_seed(seed))

    def sizes(of_tile) -> dict[str, int]:
        return {n: of_tile(axis) if isinstance(axis, int) else draw.choice(list(axis)) for n, axis in axes.items()}

    def ragged(tile: int) -> int:
        return tile * draw.randint(1, max_tiles) + (draw.randint(1, tile - 1) if tile > 1 else 0)

    kinds = [
        ("one tile", sizes(lambda tile: tile)),
        ("whole tiles", sizes(lambda tile: tile * max(2, draw.randint(1, max_tiles)))),
        *(("ragged", sizes(ragged)) for _ in range(count)),
        ("short", sizes(lambda tile: draw.randint(1, max(1, tile - 1)))),
        ("one element", {n: 1 if isinstance(axis, int) or 1 in axis else min(axis) for n, axis in axes.items()}),
    ]
    tiled = [name for name, axis in axes.items() if isinstance(axis, int)]
    if zero and tiled:
        kinds.append(("no element", {**sizes(ragged), tiled[0]: 0}))
    return kinds


@dataclass(frozen=True)
class Cases:
    """What an exercise is tried on; :meth:`draw` makes the cases from a seed.

    Args:
        axes: For each axis its tile size, a ``range`` of sizes, or the only sizes allowed.
        dtypes: The first is used for shapes and layouts, each of the others on a whole-tile, a ragged
            and the fixed shapes.
        layouts: Layouts besides contiguous that the answer must accept.
        options: For each keyword argument its values; every combination is used in turn.
        count, max_tiles, zero: As in :func:`draw_shapes`.
        magnitude: When given, one more case has values this many times larger (100: ``exp`` overflows).
        fixed: Cases that are always tried, after the drawn ones: pairs of kind and sizes.
    """

    axes: Mapping[str, Axis]
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16)
    layouts: Sequence[str] = ("transposed", "padded", "offset")
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    count: int = 2
    max_tiles: int = 3
    zero: bool = False
    magnitude: float | None = None
    fixed: Sequence[tuple[str, Mapping[str, int]]] = ()

    def draw(self, seed: int) -> list[Case]:
        """The cases of a seed, simplest first. ``far`` is left out where its memory cannot be had."""
        shapes = draw_shapes(seed, self.axes, count=self.count, max_tiles=self.max_tiles, zero=self.zero)
        shapes += list(self.fixed)
        ragged = next(sizes for kind, sizes in shapes if kind == "ragged")
        whole = next(sizes for kind, sizes in shapes if kind == "whole tiles")
        first, *others = self.dtypes
        combinations = list(itertools.product(*self.options.values())) or [()]
        plans: list[dict[str, Any]] = []
        for number, (kind, sizes) in enumerate(shapes):
            # with options, the shapes that matter most are tried under each combination
            repeat = len(combinations) if kind in ("whole tiles", "ragged") else 1
            for turn in range(repeat):
                plans.append({"kind": kind, "sizes": sizes, "turn": number + turn if repeat == 1 else turn})
        for layout in self.layouts:
            if layout != "far":
                plans.append({"kind": "ragged", "sizes": ragged, "layout": layout})
            elif far_fits(torch.float16):
                leading = next(iter(ragged))
                sizes = {**ragged, leading: 3}
                plans.append({"kind": "ragged", "sizes": sizes, "layout": "far", "dtype": torch.float16})
        if self.magnitude is not None:
            plans.append({"kind": "ragged", "sizes": ragged, "magnitude": self.magnitude})
        for dtype in others:
            plans.append({"kind": "whole tiles", "sizes": whole, "dtype": dtype})
            plans.append({"kind": "ragged", "sizes": ragged, "dtype": dtype})
            plans += [{"kind": kind, "sizes": sizes, "dtype": dtype} for kind, sizes in self.fixed]
        cases = []
        for number, plan in enumerate(plans):
            choice = combinations[plan.pop("turn", number) % len(combinations)]
            cases.append(Case(**{"dtype": first, **plan}, options=dict(zip(self.options, choice)), seed=seed))
        return cases
