"""The two roofs of this GPU as it is: copy bandwidth by size, and matrix products by number format and size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli
from utils import runtime, timing
from utils.record_schemas import POSITIVE, SIZE, TEXT, TIMING

COPY_BYTES = [1 << power for power in range(20, 33)]
LARGE_COPY = 1 << 28
QUICK_COPY_BYTES = [1 << 22, 1 << 26, 1 << 30]
MATMUL_SIZES = {
    "fp64": [1024, 2048, 4096],
    "fp32": [1024, 2048, 4096, 8192],
    "tf32": [1024, 2048, 4096, 8192],
    "fp16": [1024, 2048, 4096, 8192, 16384],
    "bf16": [1024, 2048, 4096, 8192, 16384],
    "fp8": [1024, 2048, 4096, 8192, 16384],
}
QUICK_MATMUL_SIZES = {"fp32": [2048], "tf32": [4096], "fp16": [4096], "bf16": [2048, 4096, 8192]}

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def copy_call(nbytes: int) -> Callable[[], object]:
    """A function that copies ``nbytes`` bytes from one buffer to another on the GPU."""
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=runtime.DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def matmul_call(dtype: str, n: int) -> Callable[[], object]:
    """A function that multiplies two random (n, n) matrices in ``dtype``.

    Random values matter: a product of zeros draws less power, so the GPU clocks higher than on real data.

    Raises:
        RuntimeError: this GPU or this PyTorch has no such product.
    """
    if dtype == "fp8":
        if not hasattr(torch, "float8_e4m3fn"):
            raise RuntimeError("this PyTorch has no 8-bit floating point")
        a = torch.randn(n, n, device=runtime.DEVICE).to(torch.float8_e4m3fn)
        b = (
            torch.randn(n, n, device=runtime.DEVICE).to(torch.float8_e4m3fn).t()
        )  # column-major, as the hardware wants it
        one = torch.ones((), device=runtime.DEVICE)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    a, b = (torch.randn(n, n, device=runtime.DEVICE, dtype=torch.float32).to(_DTYPES[dtype]) for _ in range(2))
    out = torch.empty(n, n, device=runtime.DEVICE, dtype=_DTYPES[dtype])
    precision = "tf32" if dtype == "tf32" else "ieee"

    def call() -> None:
        torch.backends.cuda.matmul.fp32_precision = precision
        torch.mm(a, b, out=out)

    return call


SCHEMA = {
    "copy": [{"bytes": SIZE, **TIMING, "bytes_per_second": POSITIVE}],
    "matmul": [{"dtype": TEXT, "n": SIZE, **TIMING, "flops_per_second": POSITIVE}],
    "unavailable": {str: TEXT},
    "launch": TIMING,
    "best": {"copy_bytes_per_second": POSITIVE, "matmul_flops_per_second": {str: POSITIVE}},
}


def measure(
    quick: bool = False,
    copy_bytes: Sequence[int] | None = None,
    matmul_sizes: dict[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Both roofs; ``quick`` takes a few sizes and a few seconds.

    Returns a dict with ``copy`` (bytes of one buffer, bytes read plus written per second), ``matmul`` (FLOP/s by
    dtype and n), ``unavailable`` (dtype -> why it was not measured), ``launch`` (the shortest time that this method
    shows, of a kernel that does next to nothing) and ``best`` (the highest rate of each; of copies, among those of
    at least 256 MiB).

    Raises:
        RuntimeError: there is no GPU here.
    """
    copy_bytes = copy_bytes or (QUICK_COPY_BYTES if quick else COPY_BYTES)
    matmul_sizes = matmul_sizes or (QUICK_MATMUL_SIZES if quick else MATMUL_SIZES)
    former = torch.backends.cuda.matmul.fp32_precision
    try:
        one = torch.zeros(1, device=runtime.DEVICE)
        launch = timing.measure(lambda: one.fill_(1.0), rounds=50)
        copies = []
        for nbytes in copy_bytes:
            timed = timing.measure(copy_call(nbytes))
            copies.append({"bytes": nbytes, **timed.as_dict(), "bytes_per_second": 2 * nbytes / timed.median})
        products, unavailable = [], {}
        for dtype, sizes in matmul_sizes.items():
            for n in sizes:
                try:
                    timed = timing.measure(matmul_call(dtype, n), warmup=10, rounds=20)
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    unavailable[dtype] = str(error).splitlines()[0]
                    break
                products.append(
                    {"dtype": dtype, "n": n, **timed.as_dict(), "flops_per_second": 2 * n**3 / timed.median}
                )
    finally:
        torch.backends.cuda.matmul.fp32_precision = former
    # a copy's last writes may still be in L2 when it ends: only buffers far larger than L2 show what memory does
    large = [c["bytes_per_second"] for c in copies if c["bytes"] >= LARGE_COPY]
    best_copy = max(large or [c["bytes_per_second"] for c in copies])
    best: dict[str, float] = {}
    for product in products:
        best[product["dtype"]] = max(best.get(product["dtype"], 0.0), product["flops_per_second"])
    return {
        "copy": copies,
        "matmul": products,
        "unavailable": unavailable,
        "launch": launch.as_dict(),
        "best": {"copy_bytes_per_second": best_copy, "matmul_flops_per_second": best},
    }


def table(results: dict[str, Any]) -> str:
    """Both roofs in TB/s and TFLOP/s."""
    copies = [
        [f"copy {c['bytes'] / 2**20:,.0f} MiB", f"{c['bytes_per_second'] / 1e12:.3f} TB/s"] for c in results["copy"]
    ]
    products = [
        [f"matmul {p['dtype']} {p['n']}", f"{p['flops_per_second'] / 1e12:.1f} TFLOP/s"] for p in results["matmul"]
    ]
    missing = [[f"matmul {dtype}", f"not measured: {why}"] for dtype, why in results["unavailable"].items()]
    launch = [["shortest time", f"{results['launch']['seconds'] * 1e6:.2f} us"]]
    return benchmark_cli.text_table(["what", "rate"], copies + products + missing + launch)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("ceilings", measure, table, SCHEMA))
