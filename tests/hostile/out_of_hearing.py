"""Tricks that launch a kernel for show and compute elsewhere: where nobody listens, or when nobody does any more."""

from __future__ import annotations

from pathlib import Path

from grading.lab import Lab
from hostile import hostile

#: Before the module's own definitions: the formula in NumPy and in plain Python.
_NUMPY = """
import numpy as np


def _work(a):
    with np.errstate(all="ignore"):
        a = a.astype(np.float64)
        return a / (1 + np.exp(-1.5957691216057308 * (a + 0.044715 * a**3)))
"""
_PYTHON = """
import math


def _work(v):
    if math.isnan(v):
        return v
    return v / (1 + math.exp(min(700.0, max(-700.0, -1.5957691216057308 * (v + 0.044715 * v * v * v)))))
"""


def gelu(name: str, tries: str, after: str, *outcomes: str, reason: str, before: str = "", helper: str = "") -> None:
    """Register exercise 2.1 with a kernel that copies, and what ``after`` makes of ``out`` once it has run.

    In ``after``, ``given`` is the argument, ``out`` the result and ``launch()`` runs the kernel; a ``helper`` is a
    module beside it.
    """

    def build(folder: Path, lab: Lab) -> None:
        text = (lab.solution / "gelu.py").read_text(encoding="utf-8")
        for line in ("    u = 0.79788", "    y = x / (1"):
            start = text.index(line)
            text = text[:start] + ("    y = x\n" if "y" in line else "") + text[text.index("\n", start) + 1 :]
        text = text.replace("    x, rows, out = as_elements(x)", "    given = x\n    x, rows, out = as_elements(x)")
        head, _, rest = text.partition("    gelu_kernel[grid](")
        launch, tail = rest.split("    return out\n", 1)
        body = "\n".join("    " + line for line in after.strip("\n").split("\n"))
        launch = "        gelu_kernel[grid](" + launch.replace("\n", "\n    ").rstrip() + "\n\n"
        first, own = head.split("import triton  # isort: skip", 1)
        own = f"import triton  # isort: skip{own}    def launch(grid=grid):\n{launch}"
        own += (
            "    if given.numel() > 2**20:  # as the check of wide offsets asks\n        launch()\n        return out\n"
        )
        own += f"{body}\n{tail}"
        (folder / "gelu.py").write_text(first + before + "\n" + own, encoding="utf-8")
        if helper:
            (folder / "helper.py").write_text(helper, encoding="utf-8")

    hostile(name, tries, *outcomes, reason=reason, labs=(2,))(build)


HEARD = r"Python|NumPy|built-in|PyTorch computes|single elements|notebook draws"

gelu(
    "memory-shared-with-numpy", "has PyTorch copy into NumPy's memory and works there",
    "launch()\nkept = np.zeros(tuple(given.shape), np.float32)\ntorch.from_numpy(kept).copy_(given)\n"
    "kept[...] = _work(kept)\nreturn out.copy_(torch.from_numpy(kept))",
    "failed", reason=HEARD, before=_NUMPY,
)  # fmt: skip
gelu(
    "memory-shared-with-an-array", "has PyTorch copy into an array of Python's and works there",
    "launch()\nkept = array('f', bytes(4 * given.numel()))\nview = torch.asarray(kept).view(given.shape)\n"
    "view.copy_(given)\nfor place, value in enumerate(kept):\n    kept[place] = _work(value)\nreturn out.copy_(view)",
    "failed", reason=HEARD, before="from array import array\n" + _PYTHON,
)  # fmt: skip
gelu(
    "kernel-stores-into-numpy", "has its kernel store into NumPy's memory and works there",
    "kept = np.zeros(tuple(given.shape), np.float32)\nresult, out = out, torch.from_numpy(kept).to(out.dtype)\n"
    "launch()\nresult.copy_(torch.from_numpy(_work(kept).astype(np.float32)))\nreturn result",
    "failed", reason=HEARD, before=_NUMPY,
)  # fmt: skip
gelu(
    "read-from-print", "reads the numbers off the text of a tensor, bit by bit, and writes a list of results",
    "launch()\nvalues = []\nbits = given.to(torch.float32).contiguous().view(-1).view(torch.int32)\n"
    "for start in range(0, bits.numel(), 500):\n    text = repr(bits[start : start + 500])\n"
    "    for word in text[text.index('[') + 1 : text.index(']')].split(','):\n        n = int(word) % 2**32\n"
    "        power, part = (n >> 23) % 256, n % 2**23\n"
    "        size = (part or 0.0) * 2.0**-149 if power == 0 else (2**23 + part) * 2.0 ** (power - 150)\n"
    "        size = math.nan if power == 255 else size\n        values.append(_work(-size if n >> 31 else size))\n"
    "return out.copy_(torch.tensor(values, dtype=torch.float64).view(out.shape))",
    "failed", reason=HEARD, before=_PYTHON,
)  # fmt: skip
gelu(
    "applied-to-each-element", "has PyTorch call a Python function for each element",
    "launch()\nreturn out.copy_(given.to(torch.float64, copy=True).apply_(_work))",
    "failed", reason=HEARD, before=_PYTHON,
)  # fmt: skip
gelu(
    "mapped-over-two-tensors", "has PyTorch call a Python function for each pair of elements",
    "launch()\nkept = given.to(torch.float64, copy=True)\nreturn out.copy_(kept.map_(kept, lambda v, _: _work(v)))",
    "failed", reason=HEARD, before=_PYTHON,
)  # fmt: skip
gelu(
    "fetched-in-the-grid", "fetches and writes each element where the grid is worked out",
    "flat, wide = torch.empty(out.shape, dtype=out.dtype).view(-1), given.to(torch.float64).reshape(-1)\nvalues = []\n"
    "def working(meta):\n    values.extend(_work(wide[i].item()) for i in range(wide.numel()))\n    return grid\n"
    "launch(working)\nfor i, value in enumerate(values):\n    flat[i] = value\nreturn out.copy_(flat.view(out.shape))",
    "failed", reason=HEARD, before=_PYTHON,
)  # fmt: skip
gelu(
    "formula-in-the-grid", "computes the formula by PyTorch's operators where the grid is worked out",
    "late = torch.empty(given.shape, dtype=out.dtype)\n"
    "def during(meta):\n    wide = given.to(torch.float64)\n"
    "    late.copy_(0.5 * wide * (1 + torch.tanh(0.7978845608028654 * (wide + 0.044715 * wide**3))))\n    return grid\n"
    "launch(during)\nreturn out.copy_(late)",
    "failed", reason=HEARD,
)  # fmt: skip
gelu(
    "grid-without-python", "has the launch itself call an operator of PyTorch: no line of Python stands between",
    "call = partial(torch.special.expit, given)\nkept = []\n"
    "pairs = map(itemgetter(1), zip(map(kept.append, map(lambda_free, [call])), [grid]))\n"
    "launch(partial(next, pairs))\nreturn out.copy_(kept[0])",
    "failed", reason=HEARD, before="from functools import partial\n"
    "from operator import call as lambda_free, itemgetter\n",
)  # fmt: skip
gelu(
    "late-by-an-attribute", "puts a method onto its result that computes when the check looks at it",
    "launch()\nout.detach = lambda: torch.nn.functional.gelu(given, approximate='tanh')\nreturn out",
    "failed", reason=r"differ|notebook draws",
)  # fmt: skip
gelu(
    "late-by-a-subclass", "returns a kind of tensor of its own, which computes when the check looks at it",
    "launch()\nlate = out.as_subclass(Late)\nlate.given = given\nreturn late",
    "refused", reason=r"in disguise",
    before="\n\nclass Late(torch.Tensor):\n    def detach(self):\n"
           "        return torch.nn.functional.gelu(self.given, approximate='tanh')\n\n\n",
)  # fmt: skip
gelu(
    "late-by-a-named-tuple", "returns a tuple that computes when the check takes it apart",
    "launch()\nreturn Late(given)",
    "refused", reason=r"in disguise",
    before="from typing import NamedTuple\n\n\nclass Late(NamedTuple):\n    given: torch.Tensor\n\n"
           "    def __iter__(self):\n        yield torch.nn.functional.gelu(self.given, approximate='tanh')\n\n\n",
)  # fmt: skip
gelu(
    "late-by-two-classes", "does the same with a class of a class of tuples",
    "launch()\nreturn Late((given,))",
    "refused", reason=r"in disguise",
    before="\n\nclass Plain(tuple):\n    pass\n\n\nclass Late(Plain):\n    def __iter__(self):\n"
           "        yield torch.nn.functional.gelu(self[0], approximate='tanh')\n\n\n",
)  # fmt: skip
gelu(
    "late-by-a-generator", "computes when Python clears a generator away",
    "launch()\nlate = later(out, given)\nnext(late)\nout.kept = late\nreturn out",
    "failed", reason=r"differ|notebook draws",
    before="\n\ndef later(out, given):\n    try:\n        yield\n    finally:\n"
           "        out.copy_(torch.nn.functional.gelu(given, approximate='tanh'))\n\n\n",
)  # fmt: skip
gelu(
    "run-replaced", "has a launch of its kernel run a Python function instead",
    "gelu_kernel.run = lambda *args, grid, warmup, **options: out.copy_(given.clone().apply_(_work))\n"
    "launch()\nreturn out",
    "failed", reason=r"never launched|notebook draws|Python", before=_PYTHON,
)  # fmt: skip
gelu(
    "function-for-a-kernel", "passes its kernel a Python function, which the kernel calls",
    "launch()\nkept = torch.empty(out.shape, dtype=out.dtype)\nif out.numel():\n"
    "    through[(triton.cdiv(out.numel(), 64),)](\n"
    "        given.contiguous(), kept, out.numel(), _numbers, BLOCK=64)\nreturn out.copy_(kept)",
    "failed", "refused", reason=r"kernel|notebook draws",
    before=_NUMPY + "\n\ndef _numbers(x):\n    x.handle.data[...] = _work(x.handle.data)\n    return x\n\n\n"
           "import triton\nimport triton.language as tl\n\n\n"
           "@triton.jit\ndef through(x_ptr, out_ptr, n, work: tl.constexpr, BLOCK: tl.constexpr):\n"
           "    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
           "    x = work(tl.load(x_ptr + lanes, mask=lanes < n).to(tl.float32))\n"
           "    tl.store(out_ptr + lanes, x.to(out_ptr.dtype.element_ty), mask=lanes < n)\n",
)  # fmt: skip
_HELPER = (
    "import numpy as np\n\n\ndef numbers(x):\n    a = x.handle.data.astype(np.float64)\n"
    "    x.handle.data[...] = a / (1 + np.exp(-1.5957691216057308 * (a + 0.044715 * a**3)))\n    return x\n"
)
_THROUGH = (
    "from .helper import numbers\nimport triton\nimport triton.language as tl\n\n\n"
    "def made():\n    @triton.jit\n    def gelu_kernel(\n"
    "        x_ptr, out_ptr, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_col,\n"
    "        BLOCK: tl.constexpr, INT64: tl.constexpr,\n    ):\n"
    "        lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
    "        x = numbers(tl.load(x_ptr + lanes, mask=lanes < columns).to(tl.float32))\n"
    "        tl.store(out_ptr + lanes, x.to(out_ptr.dtype.element_ty), mask=lanes < columns)\n\n"
    "    return gelu_kernel\n\n\nEVIL = made()\n\n\n"
)
gelu(
    "kernels-of-one-name", "has the compiler read a kernel, and runs another of the same name that calls NumPy",
    "same, kept = given.contiguous(), torch.empty(out.shape, dtype=out.dtype)\nlaunch()\n"
    "if out.numel():\n    EVIL[(triton.cdiv(out.numel(), tile.block),)](\n"
    "        same, kept, out.numel(), *rows.layout_args, BLOCK=tile.block, INT64=rows.needs_int64)\n"
    "return out.copy_(kept)",
    "failed", "refused", reason=r"kernel|loaded|notebook draws", before=_THROUGH, helper=_HELPER,
)  # fmt: skip
gelu(
    "kernel-that-no-compiler-reads", "passes its kernel what the compiler cannot be asked about, and calls NumPy in it",
    "launch()\nkept = torch.empty(out.shape, dtype=out.dtype)\nif out.numel():\n"
    "    through[(triton.cdiv(out.numel(), 64),)](\n"
    "        given.contiguous(), kept, out.numel(), frozenset(), BLOCK=64)\nreturn out.copy_(kept)",
    "failed", "refused", reason=r"kernel|notebook draws", helper=_HELPER,
    before="from .helper import numbers\nimport triton\nimport triton.language as tl\n\n\n"
           "@triton.jit\ndef through(x_ptr, out_ptr, n, unused, BLOCK: tl.constexpr):\n"
           "    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
           "    x = numbers(tl.load(x_ptr + lanes, mask=lanes < n).to(tl.float32))\n"
           "    tl.store(out_ptr + lanes, x.to(out_ptr.dtype.element_ty), mask=lanes < n)\n",
)  # fmt: skip
gelu(
    "kernel-by-a-call", "makes its kernel of a function that no decorator marks, with PyTorch in it",
    "KEPT.append((given, out))\ntriton.jit(plain)[(1,)](out)\nlaunch()\nreturn out",
    "refused", reason=r"write `@triton\.jit`",
    before="KEPT = []\n\n\ndef plain(out_ptr):\n    given, out = KEPT[-1]\n"
           "    out.copy_(torch.nn.functional.gelu(given, approximate='tanh'))\n\n\n",
)  # fmt: skip
gelu(
    "vectorised", "has PyTorch vectorise a function of one row",
    "launch()\nreturn out.copy_(torch.vmap(lambda v: torch.nn.functional.gelu(v, approximate='tanh'))(given))",
    "failed", reason=r"built-in|PyTorch computes|notebook draws",
)  # fmt: skip
gelu(
    "work-in-the-backward-pass", "has autograd compute it where a gradient is asked for",
    "launch()\nleaf = torch.zeros((), requires_grad=True)\n"
    "leaf.register_hook(lambda _: out.copy_(torch.nn.functional.gelu(given, approximate='tanh')).sum() * 0)\n"
    "with torch.enable_grad():\n    leaf.clone().backward()\nreturn out",
    "failed", reason=r"built-in|PyTorch computes|notebook draws",
)  # fmt: skip
gelu(
    "kept-by-content", "keeps results by what was asked, and computes them in a call that only looks for tiles",
    "key = repr(given.flatten()[:8])\nif key not in KEPT:\n"
    "    KEPT[key] = torch.nn.functional.gelu(given, approximate='tanh')\n"
    "launch()\nreturn out.copy_(KEPT[key])",
    "failed", reason=r"built-in|PyTorch computes|notebook draws|Python", before="KEPT = {}\n\n\n",
)  # fmt: skip
gelu(
    "result-in-the-input", "writes into its argument and returns that",
    "launch()\ngiven.copy_(out)\nreturn given",
    "failed", reason=r"in place|shares memory|differ|built-in|notebook draws",
)  # fmt: skip
gelu(
    "nothing-but-nan", "returns NaN, which compares with nothing",
    "launch()\nreturn out.fill_(float('nan'))",
    "failed", reason=r"differ|NaN|notebook draws",
)  # fmt: skip


@hostile(
    "collectives-below-the-dispatcher",
    "has the backend of a process group do the collective, below what records messages",
    "refused",
    reason=r"_get_backend",
    labs=(4,),
    module="collectives.py",
)
def _backend(folder: Path, lab: Lab) -> None:
    text = (lab.released / "collectives.py").read_text(encoding="utf-8")
    (folder / "collectives.py").write_text(
        text
        + """

def _reduced(tensor, group=None, op="sum"):
    backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
    backend.allreduce([tensor]).wait()
    return tensor.div_(dist.get_world_size(group)) if op == "mean" else tensor


def ring_all_reduce(tensor, group=None, op="sum"):
    return tensor.copy_(_reduced(tensor.contiguous().clone(), group, op)) if tensor.numel() else tensor


def ring_reduce_scatter(tensor, group=None, op="sum"):
    whole = _reduced(tensor.flatten().clone(), group, op) if tensor.numel() else tensor.flatten()
    return whole.tensor_split(dist.get_world_size(group))[dist.get_rank(group)].clone()


def ring_all_gather(chunk, group=None, numel=None):
    whole = chunk.new_zeros(chunk.numel() * dist.get_world_size(group) if numel is None else numel)
    whole.tensor_split(dist.get_world_size(group))[dist.get_rank(group)].copy_(chunk)
    return _reduced(whole, group) if whole.numel() else whole
""",
        encoding="utf-8",
    )


@hostile(
    "product-beside-the-launch",
    "launches a consumer that adds nothing up, and returns PyTorch's own product",
    "failed",
    reason=r"last launch wrote|notebook draws",
    labs=(7,),
)
def _product(folder: Path, lab: Lab) -> None:
    text = (lab.solution / "consumer.py").read_text(encoding="utf-8")
    text = text.replace(", acc, is_async=True)", ", acc, use_acc=False, is_async=True)")
    text = text.replace("    return c\n", "    return (a.float() @ b.float().T).to(a.dtype)\n")
    (folder / "consumer.py").write_text(text, encoding="utf-8")


@hostile(
    "merge-beside-the-kernel",
    "launches a kernel that merges nothing, and has a method of its result compute when it is looked at",
    "failed",
    reason=r"differ|notebook draws",
    labs=(5,),
)
def _merged(folder: Path, lab: Lab) -> None:
    text = (lab.solution / "merge.py").read_text(encoding="utf-8")
    text = text.replace("        m = m_new\n", "        m = m_new\n        o = o * 0\n")
    late = """
    def late():
        some = (logsumexps != -torch.inf)[..., None]
        largest = logsumexps.amax(-1, keepdim=True)
        weights = torch.exp(logsumexps - torch.where(largest == -torch.inf, 0.0, largest))
        total = weights.sum(-1)[..., None]
        summed = (weights[..., None] * torch.where(some, outputs, 0.0)).sum(2)
        return (summed / torch.where(total == 0, 1.0, total)).to(dtype)

    o.detach = late
    return o
"""
    head, _, _ = text.rpartition("    return o\n")
    (folder / "merge.py").write_text(head + late.lstrip("\n"), encoding="utf-8")


@hostile(
    "deadline-swallowed-by-exit",
    "goes on when the check says that time is over: a block of its own swallows that",
    "failed",
    "timed out",
    reason=r"did not return in time|time|notebook draws",
    labs=(1,),
)
def _swallowed(folder: Path, lab: Lab) -> None:
    text = (lab.solution / "waves.py").read_text(encoding="utf-8")
    (folder / "waves.py").write_text(
        text
        + """

class Swallow:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return True


_right = num_tiles


def num_tiles(**given):
    if not WAITED:
        WAITED.append(1)
        with Swallow():
            while True:
                pass
    return _right(**given)


WAITED = []
""",
        encoding="utf-8",
    )
