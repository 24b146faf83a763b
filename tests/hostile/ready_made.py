"""Tricks that have the work done by a ready operator, a table, or a kernel that computes nothing."""

from __future__ import annotations

import contextlib
import functools
import io
from pathlib import Path

from grading.lab import Lab
from hostile import hostile

RULES = r"built-in|converts to NumPy|no Triton kernel|PyTorch computes|notebook draws|from_dlpack|torch\."


def _gelu(name: str, tries: str, answer: str, *outcomes: str, reason: str = RULES, before: str = "") -> None:
    """The launch of exercise 2.1 replaced by ``answer``, with more imports ``before`` the module's own."""

    def build(folder: Path, lab: Lab) -> None:
        path = folder / "gelu.py"
        text = (lab.solution / "gelu.py").read_text(encoding="utf-8")
        head, _, rest = text.partition("    ### BEGIN SOLUTION 2.1: GeLU, the launch")
        tail = rest.split("    ### END SOLUTION\n", 1)[1]
        body = "\n".join("    " + line for line in answer.strip("\n").split("\n"))
        path.write_text(f"{head}{body}\n{tail}\n{before}\n", encoding="utf-8")

    hostile(name, tries, *outcomes, reason=reason, labs=(2,))(build)


_gelu("ready-operator", "calls PyTorch's own GeLU", "return torch.nn.functional.gelu(x, approximate='tanh')", "failed")
_gelu("ready-module", "calls PyTorch's GeLU as a module", "return torch.nn.GELU(approximate='tanh')(x)", "failed")
_gelu("ready-alias", "calls it under another name", "return work(x, approximate='tanh')", "failed",
      before="from torch.nn.functional import gelu as work")  # fmt: skip
_gelu("ready-through-ops", "calls it in the dispatcher", "return torch.ops.aten.gelu(x, approximate='tanh')", "refused")
_gelu("ready-through-c", "calls it below Python", "return torch._C._nn.gelu(x, approximate='tanh')", "refused")
_gelu("ready-by-name", "calls it by a name made of text",
      "return getattr(torch.nn.functional, 'ge' + 'lu')(x, approximate='tanh')", "refused",
      reason=r"stands in the source")  # fmt: skip
_gelu(
    "ready-compiled",
    "has PyTorch's compiler write the kernel",
    "return torch.compile(torch.nn.GELU('tanh'))(x)",
    "refused",
)
_gelu("modes-switched-off", "switches off what listens to PyTorch",
      "with torch._C.DisableTorchFunction():\n    return torch.nn.functional.gelu(x, approximate='tanh')",
      "refused")  # fmt: skip
_gelu("through-numpy", "works on the tensor's memory by NumPy",
      "a = np.from_dlpack(x)\nb = a / (1 + np.exp(-1.5957691216 * (a + 0.044715 * a**3)))\n"
      "np.from_dlpack(out)[...] = b\nreturn out",
      "refused", before="import numpy as np")  # fmt: skip
_gelu("through-bare-memory", "works on the bytes of the tensor's memory",
      "for place, byte in enumerate(x.untyped_storage()):\n    out.untyped_storage()[place] = byte\nreturn out",
      "refused", reason=r"bare memory")  # fmt: skip
_gelu("formula-in-pytorch", "computes the formula by PyTorch's operators",
      "return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))", "failed")  # fmt: skip
_gelu("computed-by-python", "launches its kernel for show and computes each element in Python",
      "pieces = [torch.tensor([v.item()]) for v in x.reshape(-1)]\n"
      "out.copy_(torch.cat(pieces).reshape(out.shape))\nreturn out", "failed",
      reason=r"single elements|no Triton kernel|notebook draws")  # fmt: skip
_gelu("operator-in-a-kernel", "calls PyTorch from a kernel, where nobody listens",
      "KEPT.append((x, out))\nreached[(1,)](out, 1)\nreturn out", "refused", reason=r"kernel",
      before="KEPT = []\n\n\n@triton.jit\ndef reached(out_ptr, n):\n"
             "    torch.nn.functional.gelu(KEPT[-1][0])\n")  # fmt: skip

_COPIED = (
    "@triton.jit\ndef copied(x_ptr, out_ptr, n, BLOCK: tl.constexpr):\n"
    "    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
    "    tl.store(out_ptr + lanes, tl.load(x_ptr + lanes, mask=lanes < n), mask=lanes < n)\n"
)
_gelu("operator-in-the-grid", "calls PyTorch's own GeLU where the grid is worked out",
      "flat = x.contiguous()\n"
      "def grid(meta):\n    out.copy_(torch.nn.functional.gelu(x, approximate='tanh'))\n"
      "    return (triton.cdiv(x.numel(), 64),)\n"
      "if x.numel():\n    copied[grid](flat, torch.empty_like(flat), x.numel(), BLOCK=64)\nreturn out",
      "failed", before=_COPIED)  # fmt: skip
_gelu("formula-in-a-hook", "computes the formula in a hook of an autotuned kernel's configuration",
      "flat, kept = x.contiguous(), torch.empty_like(x.contiguous())\n"
      "def hook(arguments):\n    out.copy_(0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x))))\n"
      "if x.numel():\n"
      "    tuned = triton.autotune([triton.Config({'BLOCK': 64}, pre_hook=hook)], key=[])(copied)\n"
      "    tuned[(triton.cdiv(x.numel(), 64),)](flat, kept, x.numel())\nreturn out",
      "failed", before=_COPIED)  # fmt: skip


@hostile(
    "answers-by-heart",
    "knows the answers to the seed that its notebook shows",
    "failed",
    reason=r"notebook draws|n=|m=|wrong|exercise 1\.8",
    labs=(1,),
)
def _by_heart(folder: Path, lab: Lab) -> None:
    """The right functions, asked by the check with the shown seed; their answers become a table."""
    from solutions.lab1_roofline import waves
    from solutions.lab1_roofline.exercises.waves import check_waves

    names = ("num_tiles", "num_waves", "last_wave_utilisation", "tiled_matmul_seconds")
    known: dict[str, dict[str, object]] = {name: {} for name in names}

    def recorder(name: str) -> object:
        @functools.wraps(getattr(waves, name))  # the check looks at what stands behind a wrapper
        def recorded(*args: object, **kwargs: object) -> object:
            key = repr((args, sorted(kwargs.items())))
            known[name][key] = getattr(waves, name)(*args, **kwargs)
            return known[name][key]

        return recorded

    with contextlib.redirect_stdout(io.StringIO()):
        check_waves(*map(recorder, names), seed=18)
    text = f"KNOWN = {known!r}\n\n"
    for name in names:
        text += (
            f"def {name}(*args, **kwargs):\n    for value in (*args, *kwargs.values()):\n        if not value > 0:\n"
            f"            raise ValueError(f'a size must be above zero, got {{value}}')\n"
            f"    return KNOWN['{name}'].get(repr((args, sorted(kwargs.items()))), 1)\n\n"
        )
    (folder / "waves.py").write_text(text, encoding="utf-8")


@hostile("scores-itself", "puts a file of results beside its modules", "not attempted", reason=r"written")
def _results(folder: Path, lab: Lab) -> None:
    (folder / "results.json").write_text('{"score": 100, "max_score": 100}')
    (folder / f"{lab.name}.json").write_text('{"score": 100}')
    (folder / "gradebook.db").write_bytes(b"SQLite format 3\0")
