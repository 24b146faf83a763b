"""Fingerprints of measured source: blind to form, sensitive to what code does, the same on every Python."""

from __future__ import annotations

import hashlib
import re

import pytest

from utils.course_modules import Course
from utils.fingerprint import cpp_form, files, fingerprint, python_form

# What Python versions parse differently: f-strings and their specs, new empty fields, defaults that a dump leaves out.
SAMPLE = '''
"""Module."""
from __future__ import annotations
import os, sys as s  # comment
X: int = 3
Y = -1.5e-7 + 2j
async def g(a, /, b=1, *c, d: "x" = 2, **e) -> None:
    """doc"""
    async with a as b, c: await d
    async for x in y: yield x
class A(B, metaclass=M):
    \'\'\'doc\'\'\'
    x = f"a{X}b" "c" f"{Y!r:>{s.maxsize}}" f"{X=}" f"{X:}{\'\'}" f"é{{{X}}}"
    def f(self):
        """only"""
def h(x):
    match x:
        case {"a": 1, **rest} if rest: return [i for i in x if i]
        case A(x=1) | [1, *_]: pass
        case _: ...
    try: pass
    except* ValueError as e: raise
    else: pass
    finally: del x
    z = lambda a, *b: (a, b)
    print(f"{x!r}" f"{x:%Y-%m}", b"\\xff", "\\ud800", 1_000, 0xff, True, None, ...)
    with open(x) as f, g() as h: global q; q = {**x, "a": {1, 2}}
    while (n := 3) > 2: break
    return a[1:2, ::3, ...] @ b if not c else (yield)
'''


def test_a_fixed_source_has_the_same_fingerprint_on_every_python():
    form = python_form(SAMPLE)
    assert hashlib.sha256(form.encode()).hexdigest()[:16] == "a1cecb7f67d2a3ee"


CODE = """
def f(a, b=2):
    return a + b
"""


@pytest.mark.parametrize(
    "same",
    [
        "def f(a, b = 2): return (a\n  + b)",
        '"""A module."""\n\ndef f(a, b=2):\n    """What it does."""\n    # why\n    return a + b  # how',
        "def f(\n    a,\n    b=2,\n):\n    return a + b\n",
        "import math\nfrom typing import Any\ndef f(a: Any, b: int = 2) -> float:\n    return a + b",
        "__all__ = ['f']\ndef f(a, b=2):\n    pass\n    return a + b",
    ],
)
def test_comments_docstrings_and_formatting_do_not_count(same):
    assert python_form(same) == python_form(CODE)


@pytest.mark.parametrize(
    "other",
    [
        "def f(a, b=3):\n    return a + b",
        "def f(a, b=2.0):\n    return a + b",
        "def f(a, b=True):\n    return a + b",
        "def f(a, b='2'):\n    return a + b",
        "def f(a, *, b=2):\n    return a + b",
        "def f(a, b=2):\n    return b + a",
        "def f(a, b=2):\n    return a - b",
        "@jit\ndef f(a, b=2):\n    return a + b",
        "def f(a, b=2):\n    'doc'\n    'not a docstring'\n    return a + b",
        "async def f(a, b=2):\n    return a + b",
        "def f(a, b=2):\n    return a % b",
        "def f(a, b=2):\n    return a + abs(b)",
    ],
)
def test_whatever_code_does_counts(other):
    assert python_form(other) != python_form(CODE)


def test_parts_of_an_f_string_count_however_they_are_split():
    assert python_form('f"a{x}" "b"') == python_form('f"a{x}b"')
    assert python_form('f"a{x}b"') != python_form('f"a{x!r}b"') != python_form('f"a{x!r:>3}b"')


def test_a_member_is_independent_of_its_neighbours():
    before, after = "A = 1\ndef f(): return A\ndef g(): return 2", "A = 5\ndef f(): return A\ndef g(): return 3"
    assert python_form(before, "f") == python_form(after, "f")
    assert python_form(before, "g") != python_form(after, "g")
    assert python_form(before, "A") != python_form(after, "A")
    with pytest.raises(ValueError, match="no top-level function, class or assignment called 'h'"):
        python_form(before, "h")


# A course of two modules: a kernel with its launcher, and what calls them.
KERNELS = """
import torch
import triton
import triton.language as tl

@triton.jit
def scale_kernel(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = offsets < n
    x = tl.load(x_ptr + offsets, mask=kept)
    tl.store(out_ptr + offsets, x * factor, mask=kept)

class Tile:
    rows: int = 64
    columns: int = 128
    def __init__(self, warps):
        self.warps = warps
    def area(self):
        return self.rows * self.columns

def scale(x, *, factor=2.0, tile=None):
    if x.ndim != 1:
        raise ValueError(f"x must have one dimension, got {x.ndim}")
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), tile.rows),)
    scale_kernel[grid](x, out, x.numel(), factor, BLOCK=tile.rows, num_warps=tile.warps)
    return out

def halve(x, *, factor=0.5, tile=None):
    return scale(x, factor=factor, tile=tile)
"""
BENCHMARK = """
import torch
from lib import kernels
from lib.kernels import Tile, scale

def measure(x, tile):
    doubled = scale(x, factor=2.0, tile=tile)
    halved = kernels.halve(x, tile=tile)
    return {"seconds": [float(row.sum(dim=0)) for row in doubled], "area": tile.area(), "norm": torch.sum(halved)}
"""


def of_course(tmp_path, kernels=KERNELS, benchmark=BENCHMARK, name="kernels"):
    (tmp_path / "lib").mkdir(exist_ok=True)
    for file in (tmp_path / "lib").iterdir():
        file.unlink()
    (tmp_path / "lib" / f"{name}.py").write_text(kernels)
    (tmp_path / "lib" / "bench.py").write_text(benchmark)
    return fingerprint([f"lib/{name}.py", "lib/bench.py"], Course(tmp_path))


def renamed(old, new):
    return lambda text: re.sub(rf"\b{old}\b", new, text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("offsets", "where"),  # a local variable
        ("x_ptr", "source_ptr"),  # a parameter by position
        ("BLOCK", "BLOCK_N"),  # a parameter by keyword, at a launch
        ("factor", "times"),  # a keyword of two functions and their calls
        ("scale_kernel", "multiply_kernel"),
        ("halve", "half_of"),  # called as an attribute of its module
        ("Tile", "Block"),
        ("rows", "height"),  # a field
        ("warps", "warp_count"),  # an attribute that __init__ sets
        ("area", "elements"),  # a method (the text of the same name stays)
        ("row", "line"),  # the variable of a comprehension
    ],
)
def test_a_renamed_name_of_the_courses_own_does_not_count(old, new, tmp_path):
    before = of_course(tmp_path)
    kernels, benchmark = (renamed(old, new)(text) for text in (KERNELS, BENCHMARK))
    benchmark = benchmark.replace(f'"{new}"', f'"{old}"')
    assert (kernels, benchmark) != (KERNELS, BENCHMARK)
    assert of_course(tmp_path, kernels, benchmark) == before


def test_a_renamed_module_and_other_imports_do_not_count(tmp_path):
    before = of_course(tmp_path)
    assert of_course(tmp_path, KERNELS, BENCHMARK.replace("kernels", "scaling"), name="scaling") == before
    relative = BENCHMARK.replace("from lib import kernels", "from . import kernels as k").replace("kernels.h", "k.h")
    assert of_course(tmp_path, benchmark=relative) == before
    assert (
        of_course(tmp_path, KERNELS.replace("triton.language as tl", "triton.language as t").replace("tl.", "t."))
        == before
    )
    assert (
        of_course(
            tmp_path,
            benchmark=BENCHMARK.replace("torch.sum", "total").replace("import torch", "from torch import sum as total"),
        )
        == before
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            'raise ValueError(f"x must have one dimension, got {x.ndim}")',
            'raise ValueError("x: one dimension") from None',
        ),
        ("class Tile:", 'class Tile:\n    """How a kernel cuts its work."""\n'),
        ("def scale(x, *, factor=2.0, tile=None):", "def scale(x: torch.Tensor, *, factor: float = 2.0, tile=None):"),
        ("import torch\nimport triton\n", "import triton\nimport torch, os\n"),
        ("    return out", "    return (\n        out  # a comment\n    )"),
    ],
)
def test_texts_of_errors_docstrings_annotations_and_imports_do_not_count(old, new, tmp_path):
    assert KERNELS.count(old) == 1
    assert of_course(tmp_path, KERNELS.replace(old, new)) == of_course(tmp_path)


def test_the_order_of_top_level_definitions_does_not_count(tmp_path):
    head, halve = KERNELS.split("def halve")
    assert of_course(tmp_path, head.replace("class Tile", f"def halve{halve}\nclass Tile")) == of_course(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.load(", "tl.cat("),  # another function of a library
        ("x * factor", "x + factor"),
        ("rows: int = 64", "rows: int = 32"),
        ("offsets < n", "n < offsets"),
        ("(x, out, x.numel()", "(out, x, x.numel()"),  # two arguments exchanged
        ("x.ndim != 1", "x.ndim != 2"),  # when an error is raised, though not what it says
        ("raise ValueError", "raise TypeError"),
        ("num_warps=", "num_stages="),  # Triton's options
        ("BLOCK: tl.constexpr", "BLOCK"),  # an annotation that changes what is compiled
        ("torch.empty_like", "torch.zeros_like"),
        ("x.numel(), tile.rows", "x.numel(), tile.columns"),  # another field of the course's own
        ("self.rows * self.columns", "self.rows * self.rows"),
        ("scale(x, factor=factor", "halve(x, factor=factor"),  # another function of the course's own
    ],
)
def test_a_changed_statement_counts(old, new, tmp_path):
    assert KERNELS.count(old) == 1
    assert of_course(tmp_path, KERNELS.replace(old, new)) != of_course(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.sum", "torch.amax"),
        ("row.sum", "row.amax"),
        ("(dim=0)", "(keepdim=0)"),
        ("kernels.halve(", "kernels.scale("),
        ("factor=2.0", "tile=2.0"),
        ('"seconds"', '"minutes"'),
        ("for row in doubled", "for row in halved"),
    ],
)
def test_a_changed_call_counts(old, new, tmp_path):
    assert BENCHMARK.count(old) == 1
    assert of_course(tmp_path, benchmark=BENCHMARK.replace(old, new)) != of_course(tmp_path)


def test_variables_that_are_called_like_a_librarys_attribute_are_variables():
    code = "def f(x, {0}):\n    {0} = {0} + 1\n    return x.sum({0}), x.amax()"
    assert python_form(code.format("sum")) == python_form(code.format("offset"))
    assert python_form(code.format("sum")) != python_form(code.format("sum").replace("x.sum", "x.amax"))


def test_names_of_inner_functions_are_told_apart():
    code = "def f(a):\n    def g(b):\n        return a - b\n    return [g(c) for c in a]"
    assert python_form(code) == python_form(code.replace("b", "d"))
    assert python_form(code) != python_form(code.replace("a - b", "b - a"))
    shadowed = "def f(a):\n    return [a for a in a]"
    assert python_form(shadowed) == python_form("def f(a):\n    return [b for b in a]")
    assert python_form(shadowed) != python_form("def f(a):\n    return [a for b in a]")


KERNEL = """
#include <cstdio>  // for printf
#define TWICE(x) \\
    ((x) + (x))
/* a
   kernel */
__global__ void k(int *p) { p[0] = 1'000; printf("// no comment, %d\\n", 'a'); }
"""


def test_cuda_source_ignores_comments_and_whitespace():
    same = """
#include <cstdio>
#define TWICE(x)   ((x) + (x)) // doubled
__global__   void k(int*p){p[0]=1'000;
   printf("// no comment, %d\\n",'a');/* done */}"""
    assert cpp_form(same) == cpp_form(KERNEL)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("p[0] = 1'000", "p[0] = 1'001"),
        ("// no comment, %d", "// a comment, %d"),
        ("int *p", "int **p"),
        ("((x) + (x))", "((x) +(x) +(x))"),
        ("void k", "voidk"),
        ("'a'", "'b'"),
        ("#include <cstdio>  // for printf\n#define", "#include <cstdio> #define"),
    ],
)
def test_cuda_source_sees_every_token(before, after):
    assert before in KERNEL
    assert cpp_form(KERNEL.replace(before, after)) != cpp_form(KERNEL)


def test_operators_and_literals_are_single_tokens():
    assert cpp_form("a + ++b") != cpp_form("a ++ + b")
    assert cpp_form("f<<<1, 2>>>()") == cpp_form("f <<< 1,2 >>> ( )")
    assert cpp_form('R"(a // b)"').split("\n") == ['R"(a // b)"']
    assert cpp_form("1.5e-3f - 2") == "1.5e-3f\n-\n2"


def test_several_sources_count_in_any_order(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.cu").write_text("int x;")

    def of(*sources):
        return fingerprint(sources, Course(tmp_path))

    first = of("a.py", "b.cu")
    assert len(first) == 64 and first == of("b.cu", "a.py") == of("a.py", "b.cu", "a.py::x")
    assert first != of("a.py") != of("b.cu")
    (tmp_path / "b.cu").write_text("int  x ; // same")
    assert first == of("a.py", "b.cu")
    (tmp_path / "a.py").write_text("x = 2")
    assert first != of("a.py", "b.cu")


# A benchmark, what it measures, and what times it.
SCRIPT = """
import importlib
from solutions import lab
from utils import timing
SOURCES = ["benchmarks/apart.py"]
SCHEMA = {"seconds": lab.unused()}
UNUSED = 3
def measure():
    return timing.seconds(lab.ours)
if __name__ == "__main__":
    raise SystemExit(measure())
"""
LAB = """
from solutions import tiles
TILE = tiles.of(64)
lab_settings.cache = 2
def ours():
    return TILE
def unused():
    return 1
"""
FILES = {
    "benchmarks/script.py": SCRIPT,
    "benchmarks/apart.py": "def apart(): return 5",
    "solutions/lab.py": LAB,
    "solutions/tiles.py": "def of(n): return n + 1\ndef other(n): return n - 1",
    "utils/timing.py": "def seconds(f): return f() / 7",
}


def of_script(folder, *more, **changes):
    for path, text in FILES.items():
        file = folder / path
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(text.replace(*changes.get(file.stem, ("", ""))))
    sources = ["benchmarks/script.py", *more]
    return fingerprint(sources, Course(folder)), files(sources, Course(folder))


def test_what_a_script_measures_is_what_it_leads_to_by_name(tmp_path):
    first, found = of_script(tmp_path)
    assert found == ["benchmarks/script.py", "solutions/lab.py", "solutions/tiles.py"]
    for counts in (
        {"lab": ("return TILE", "return -TILE")},
        {"tiles": ("n + 1", "n + 2")},  # by way of a constant
        {"lab": ("cache = 2", "cache = 3")},  # what acts on import
        {"script": ("lab.ours", "lab.ours()")},
    ):
        assert of_script(tmp_path, **counts)[0] != first, counts
    for does_not in (
        {"lab": ("return 1", "return 2")},
        {"tiles": ("n - 1", "n - 2")},
        {"timing": ("/ 7", "/ 8")},
        {"apart": ("5", "6")},
        {"script": ("UNUSED = 3", "UNUSED = 4")},
        {"script": ('seconds"', 'hertz"')},
    ):
        assert of_script(tmp_path, **does_not)[0] == first, does_not


def test_what_no_name_leads_to_is_listed_and_what_is_not_measured_is_left_out(tmp_path):
    first, found = of_script(tmp_path, "benchmarks/apart.py", "!solutions/tiles.py")
    assert found == ["benchmarks/apart.py", "benchmarks/script.py", "solutions/lab.py"]
    arguments = ("benchmarks/apart.py", "!solutions/tiles.py")
    assert of_script(tmp_path, *arguments, apart=("5", "6"))[0] != first
    assert of_script(tmp_path, *arguments, tiles=("n + 1", "n + 2"))[0] == first


def test_bad_sources_are_refused_by_name(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.cu").write_text("x")
    (tmp_path / "broken.py").write_text("def f(:")
    for source, message in [
        ("/etc/passwd.py", "inside the course"),
        ("../secret.py", "inside the course"),
        ("a.txt", "must end in one of"),
        ("a.cu::kernel", "only a Python source"),
        ("broken.py", r"broken\.py does not parse"),
    ]:
        with pytest.raises(ValueError, match=message):
            fingerprint([source], Course(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"'gone\.py' is not there any more"):
        fingerprint(["gone.py"], Course(tmp_path))
    with pytest.raises(ValueError, match="at least one file"):
        fingerprint([])
    for sources in ("a.py", ["a.py", 3]):
        with pytest.raises(TypeError, match="sources must be a list of paths, got"):
            fingerprint(sources)
