"""Fingerprints of measured source: blind to form, sensitive to what code does, the same on every Python."""

from __future__ import annotations

import hashlib

import pytest

from utils.fingerprint import cpp_form, fingerprint, python_form

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
    assert hashlib.sha256(form.encode()).hexdigest()[:16] == "2c8002760646e5dc"


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
        "def f(a, b=2) -> int:\n    return a + b",
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


def test_several_sources_count_with_their_names_and_order(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.cu").write_text("int x;")
    first = fingerprint(["a.py", "b.cu"], tmp_path)
    assert len(first) == 64 and first == fingerprint(["a.py", "b.cu"], tmp_path)
    assert first != fingerprint(["b.cu", "a.py"], tmp_path)
    (tmp_path / "b.cu").write_text("int  x ; // same")
    assert first == fingerprint(["a.py", "b.cu"], tmp_path)
    (tmp_path / "a.py").write_text("x = 2")
    assert first != fingerprint(["a.py", "b.cu"], tmp_path)


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
            fingerprint([source], tmp_path)
    with pytest.raises(FileNotFoundError, match=r"'gone\.py' is not there any more"):
        fingerprint(["gone.py"], tmp_path)
    with pytest.raises(ValueError, match="at least one file"):
        fingerprint([])
    for sources in ("a.py", ["a.py", 3]):
        with pytest.raises(TypeError, match="sources must be a list of paths, got"):
            fingerprint(sources)
