"""The rule book for students' modules: what passes, what does not, and that nothing in a module makes it raise."""

from __future__ import annotations

import ast
import contextlib
import importlib
import itertools
import re
import string
import types
from pathlib import Path

import pytest
import synthetic_cohort
import torch
from hostile import HOSTILE, TARGETS, write
from lab_answers import answers, edited, wrong_answers
from lab_places import ROOT, write_lab
from parameters import thorough_but

from grading.handed_out import modules_of
from grading.lab import find_lab, lab_names
from grading.policy import LONGEST, violations
from grading.policy.tables import PACKAGES
from grading.policy.uses import _is_complete
from utils.checks.forbid import MOST_FETCHED, OPERATOR_GROUPS

pytestmark = pytest.mark.compat

LAB = find_lab("lab2")
LABS = lab_names()


def refusals(source: str | bytes, lab: str = "lab2", filename: str = "gelu.py") -> list[str]:
    return list(map(str, violations(source, filename, find_lab(lab))))


@pytest.mark.slow
@pytest.mark.parametrize("name", LABS)
def test_every_module_of_the_course_passes(name):
    lab = find_lab(name)
    paths = [*sorted(lab.released.glob("*.py")), *modules_of(lab.solution)]
    found = {str(path): violations(path.read_bytes(), path.name, lab) for path in paths}
    assert paths and not any(found.values()), {path: why for path, why in found.items() if why}


#: Wrong answers that call what no module of a lab may use: refused before they run, and by their check.
REFUSED_ANSWERS = {"6.1-the-course's-own"}


@pytest.mark.slow
@pytest.mark.parametrize("number", thorough_but([2, 3, 4, 5, 6, 7], 7))
def test_every_answer_right_or_wrong_passes(number, tmp_path):
    lab = find_lab(str(number))
    wrong = [(str(wrong), wrong.filled(edited(lab.name))) for wrong in wrong_answers(lab.name) if wrong.edits]
    judged = set()
    for index, (name, places) in enumerate([("right", answers(lab.name).right), *wrong]):
        write_lab(lab.name, tmp_path / str(index), places)
        found = []
        for path in sorted((tmp_path / str(index)).glob("*.py")):
            if (text := path.read_bytes()) not in judged:
                judged.add(text)
                found += violations(text, path.name, lab)
        assert bool(found) == (name in REFUSED_ANSWERS), (name, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", LABS)
def test_students_who_print_assert_and_add_helpers_pass(name, tmp_path):
    lab = find_lab(name)
    synthetic_cohort.build(lab, tmp_path / "class", ["correct-with-helpers"])
    path = tmp_path / "class" / "correct-with-helpers" / TARGETS[lab.number]
    assert violations(path.read_bytes(), path.name, lab) == []


ORDINARY = r"""
import torch.nn.functional as F\nfrom torch import nn, Tensor\ny = F.pad\nclass Net(nn.Module):\n  pass
import torch\nx = torch.zeros(3)\nx.requires_grad = True\nx[0] = 1\ndtype = torch.float32\nprint(dtype.itemsize)
import math as m\nprint(m.inf, [m.sqrt(v) for v in (1, 2)])
def f(input, open=1, *, dir=None):\n  return [input for input in (input, open, dir)]
def f(x):\n  try:\n    return x()\n  except Exception as error:\n    raise ValueError(f"{type(error).__name__}: {error}") from error
def f(x):\n  try:\n    return x()\n  except BaseException:\n    print("failed")\n    raise
import functools\n@functools.lru_cache(maxsize=None)\ndef f(n):\n  return n
import contextlib\n@contextlib.contextmanager\ndef f():\n  with contextlib.suppress(KeyError):\n    yield
class A:\n  def __init__(self):\n    self.storage = 1\n    self.__x = 2\n  def __eq__(self, other):\n    return True\n  __hash__ = None
from dataclasses import dataclass\n@dataclass(frozen=True)\nclass A:\n  n: int\n  def __post_init__(self):\n    object.__setattr__(self, "n", 3)
import triton\nimport triton.language as tl\nN: tl.constexpr = 4\n@triton.jit\ndef g(x):\n  return x + N\n@triton.jit\ndef f(x_ptr, B: tl.constexpr):\n  tl.store(x_ptr, g(tl.load(x_ptr)))
x = getattr(3, "real", None)
class E(ValueError):\n  pass\ndef f(x: "E | None" = None, *, kind: type[BaseException] | None = None) -> dict[str, int]:\n  return {}
from .rows import as_rows\nfrom . import gelu\nfrom .helper import mine
if __name__ == "__main__":\n  print(__doc__, __name__)
if __name__ == "__main__":\n  import sys\n  from utils import roofline\n  print(roofline.matmul(2, 3, 4), sys.argv)
x = "{0:>8} {name!r} {a.b}"
# -*- coding: utf-8 -*-\nx = 1
from collections import OrderedDict\nclass Recent(OrderedDict):\n  def __getitem__(self, key):\n    return key
from typing import NamedTuple\nclass Tile(NamedTuple):\n  row: int\n  def area(self) -> int:\n    return self.row
from functools import wraps\ndef f(g):\n  @wraps(g)\n  def h(x):\n    return g(x)\n  return h
from enum import Enum, auto\nclass State(Enum):\n  A = auto()\n  B = auto()\ny = State(1)\ndef f(x: Enum) -> bool:\n  return isinstance(x, Enum)
import enum\nclass Kind(enum.IntEnum):\n  A = 1\n  def __str__(self):\n    return "a"
from dataclasses import dataclass, replace\n@dataclass\nclass A:\n  n: int = 0\n  def twice(self):\n    return type(self)(n=2 * self.n)\nb = replace(A(), n=3)
def f(x):\n  kind = type(x)\n  if kind is int or kind in (float, bool):\n    return kind.__name__\n  return f"{type(x)} {type(x).__name__}"
def f(x):\n  try:\n    return x()\n  except ValueError as error:\n    raise type(error)(f"here: {error}") from error
class A:\n  def f(self):\n    self.__dict__.pop("kept", None)\n    return dict(self.__dict__), sorted(self.__dict__), self.__dict__["n"]
LINE = "{:>8} {}"\nprint(LINE.format(1, 2), "{x:.3g}".format(x=3))
import triton\nimport triton.language as tl\n@triton.autotune([triton.Config({"B": 16})], key=["n"])\n@triton.jit\ndef f(x_ptr, n, B: tl.constexpr):\n  tl.store(x_ptr, n)
import abc\nclass Base(abc.ABC):\n  @abc.abstractmethod\n  def f(self): ...\nclass B(Base):\n  def f(self):\n    return 1
x = isinstance(3, (int, type(None))), issubclass(bool, int), isinstance(int, type)\ndef f(kind: type) -> type[int]:\n  return kind
def f(n):\n  assert isinstance(n, int), f"{type(n)}"
def f(n):\n  if not isinstance(n, int):\n    raise TypeError("expected int, got " + type(n).__name__)
def f(n):\n  raise TypeError("expected int, got %s" % type(n))
def f(n):\n  raise TypeError("expected int, got {}".format(type(n)))
def f(n):\n  raise TypeError("expected int, got " + str(type(n)))
def f(a, b):\n  return type(a) == type(b) and type(a) is int and type(b) in (int, float) and type(a) != bool
def f(a, wanted):\n  return type(a) is wanted
class A:\n  def __eq__(self, o):\n    return type(o) is type(self) and self.__dict__ == o.__dict__
class A:\n  def __eq__(self, o):\n    return o.__class__ == A and o.__class__ is self.__class__
class A:\n  def __repr__(self):\n    return f"{type(self).__name__}({self.__class__.__name__})"
class A:\n  def copy(self):\n    return {**self.__dict__, "n": 3}, list(self.__dict__), "n" in self.__dict__
class A:\n  def twice(self):\n    return type(self)(n=2 * self.n, m=3)
class A:\n  def twice(self):\n    return self.__class__(self.n, self.m)
def f(x):\n  return type(x)(f(v) for v in x)
def f(x):\n  try: pass\n  except ValueError as e:\n    raise type(e)(f"here {e}") from e
from typing import NamedTuple\nclass P(NamedTuple):\n  m: float\n  def __add__(self, o):\n    return P(self.m + o.m)
from collections.abc import Callable\ndef f(g: Callable[[type], int]) -> None: pass
from typing import Callable, Optional\nK = dict[str, Callable[[int], int]]
line = "{:>8}".format\nprint(line(3), list(map("{:.2f}".format, [1.0])))
ROW = "{:>8} {:>8}"\ndef show():\n  print(ROW.format(1, 2))
from triton import jit\n@jit\ndef k(x): pass
import triton\n@triton.jit(noinline=True)\ndef k(x): pass
import triton\ndef make():\n  @triton.jit\n  def k(x): pass\n  return k
from enum import Enum, auto\nclass S(Enum):\n  A, B = range(2)
from enum import Enum, auto\nimport torch\nclass S(Enum):\n  F16 = torch.float16\n  def bytes(self):\n    return self.value.itemsize
from enum import IntEnum\nclass S(IntEnum):\n  LOW = 1 << 0\n  HIGH = 1 << 1
from abc import ABC, abstractmethod\nclass A(ABC):\n  @abstractmethod\n  def f(self): ...
from dataclasses import dataclass, fields, asdict, replace\n@dataclass\nclass A:\n  n: int\n  def f(self):\n    return [g.name for g in fields(self)], asdict(self), replace(self, n=3)
from dataclasses import dataclass\ndef f():\n  @dataclass(slots=True)\n  class A:\n    n: int\n  return A(3)
SIZES = {int: 4, float: 8}\ndef f(x):\n  return SIZES[type(x)]
SIZES = {int: 4, float: 8}\ndef f(x):\n  return SIZES.get(type(x), 8)
from torch import nn\nclass A(nn.Module):\n  def __init__(self, **kw):\n    super().__init__()\n    nn.Module.__init__(self)
import numpy as np\ndef f(x):\n  return np.asarray([1.0]).astype(np.float32)
def f(x):\n  try: pass\n  except ValueError as e:\n    raise type(e)(str(e) + f" in {x}") from e
class A:\n  def twice(self):\n    return type(self)(int(self.n))
Nothing = type(None)\ndef f(x):\n  return isinstance(x, (int, type(None), type([]))) or x.__class__ is Nothing
def f(d):\n  return sorted(d, key=lambda k: (type(k).__name__, k))
class Meta:\n  type = 3\ndef f(x):\n  return x.type == "cuda"
class D(float):\n  pass
from collections import namedtuple\nPair = namedtuple("Pair", "m l")\nclass Stats(namedtuple("Stats", ["m", "l"])):\n  def merge(self, o): return o
from functools import reduce, partial, lru_cache, cached_property, total_ordering\n@total_ordering\nclass A:\n  def __lt__(self, o): return True\n  def __eq__(self, o): return True
import functools, operator\ndef prod(x): return functools.reduce(operator.mul, x, 1)
from contextlib import contextmanager, nullcontext
def f(x):\n  print("done", type(x), x.shape)
class A:\n  def g(self):\n    return self.__class__.limit + type(self).limit
ROW = "{:>8} " * 3\nprint(ROW.format(1, 2, 3), ("{:>8}" + " {:>8}").format(1, 2))
def f(names):\n  return " | ".join(["{:>8}"] * len(names)).format(*names)
def f(names):\n  return " ".join("{:>8}" for _ in names).format(*names) + ("{:>{}}" * 2).format(1, 2, 3, 4)
CELL = "{:>8.3f}"\nHEAD = 2 * CELL + ", "\ndef f(n):\n  return (CELL * int(n)).format(*range(n)) + HEAD.format(1, 2)
class V(tuple):\n  def __repr__(self):\n    return "v"\n  def twice(self):\n    return V(2 * v for v in self)
class V:\n  @classmethod\n  def of(cls, *values):\n    return cls(*values)\n  def twice(self):\n    return V(*(2 * v for v in self.values))
""".strip().split("\n")  # noqa: E501


@pytest.mark.parametrize("source", ORDINARY)
def test_ordinary_code_passes(source):
    assert refusals(source.replace("\\n", "\n")) == []


REFUSED = r"""
import os
import torch, sys
from torch import os as x
import torch\ntorch.os.system("x")
import torch\ntorch._C.foo()
import torch\nt = torch
import torch\nm = [torch]
import torch\ndef f(t=torch):\n  pass
import torch\ntorch.softmax = 3
import torch\ndel torch.softmax
import torch\nfor torch.softmax in []: pass
import torch\nwith x as torch.softmax: pass
from torch import Tensor\nTensor.sum = None
from torch import Tensor\nT = Tensor\nT.sum = None
import torch.nn.functional as F\nF.softmax = 1
from torch.nn import functional\nfunctional.softmax = 1
import triton.language as tl\ntl.dot = 1
from utils import checks
import utils.checks.core
from utils.operators import softmax
from utils import runtime\nruntime.sys.exit()
from .gelu import *
__name__ = "__main__"\nif __name__ == "__main__":\n  import os
from .gelu import MAIN as __name__\nif __name__ == "__main__":\n  import os
match "__main__":\n  case __name__:\n    pass\nif __name__ == "__main__":\n  import os
def f():\n  global __name__\n  try:\n    raise E\n  except E as __name__:\n    yield
def f():\n  if __name__ == "__main__":\n    import os
if __name__ == "__main__":\n  pass\nelse:\n  import os
from . import os
from .. import x
__import__("os")
e = eval
a, b = exec, 3
print(*map(eval, []))
(kept := open)
getattr(3, "a" + "b")
g = getattr
import torch\ngetattr(torch, "os")
import torch\nsetattr(torch.Tensor, "sum", 1)
(lambda: 0).__globals__
type(3).sum = 4
().__class__.__base__.__subclasses__()
def f():\n  try: pass\n  except: pass
def f():\n  try: pass\n  except BaseException: pass
try: pass\nexcept (ValueError, BaseException): pass
def f():\n  try: pass\n  finally: return 1
while 1:\n  try: pass\n  finally: break
class A(type): pass
class A(metaclass=B): pass
class A:\n  def __del__(self): pass
class A:\n  def __reduce__(self): pass
class A(int):\n  def __eq__(self, o): return True
type("A", (), {})
raise SystemExit
import contextlib\nwith contextlib.suppress(BaseException): pass
# -*- coding: utf-7 -*-
"{0.__globals__}".format(f)
import torch\n[torch for torch in [1]]\ntorch.os
import torch\ndef f():\n  y = [0 for torch in [1]]\n  torch.os
import torch\nclass A:\n  torch = 1\n  def f(self): torch.os
match x:\n  case object(__globals__=c): pass
import functools\nfunctools.sys
import dataclasses\ndataclasses.sys
import typing\ntyping.get_type_hints(f)
import torch.utils.cpp_extension
import numpy as np\nnp.load("x")
import numpy as np\nnp.array([1]).ctypes
def f(x: __import__("os").system("x")): pass
import torch\ntorch.load
import torch\ntorch.ops.aten
import torch\ntorch.compile(f)
def __getattr__(n): pass
x.f_back
__builtins__["x"]
from lab2_triton_kernels import gelu\ngelu.gelu_kernel = 3
import triton\ntriton.runtime
x.untyped_storage()
import torch\nimport triton\n@triton.jit\ndef f(x): torch.softmax(x)
import triton\nK = []\n@triton.jit\ndef f(x): K[0]()
import torch\nfrom triton.experimental import gluon\n@gluon.jit\ndef f(x): torch.softmax(x)
from triton.experimental.gluon import _runtime
import triton\ndef g(): pass\n@triton.jit\ndef f(x): g()
class E:\n  def __eq__(self, o): return o\n(E() == type(int))('L', (int,), {})
class E:\n  def __eq__(self, o): return o\n(E() == type)('L', (int,), {})
(type(int),)[0]('L', (int,), {})
sorted((type(int),))[0]('L', (int,), {})
def print(x): return x\nprint(type(int))('L', (int,), {})
kind = type(int)
class A:\n  kind = type(int)\nA.kind('L', (int,), {})
def f():\n  global kind\n  kind = type(int)
class T:\n  def __getitem__(self, k): return k\nT()[type(int)]('L', (int,), {})
type(int)(int)('L', (int,), {})
def f(x):\n  return type(x)(int)
getattr(int, "__class__")('L', (int,), {})
match int:\n  case object(__class__=c): c('L', (int,), {})
import typing\ntyping.get_origin(typing.Type[int])('L', (int,), {})
from dataclasses import dataclass, fields\n@dataclass\nclass A:\n  kind: type\nfields(A)[0].type('L', (int,), {})
from torch.autograd.function import FunctionMeta\nFunctionMeta('L', (int,), {})
put = object.__setattr__\nput(1, '__a' + 'b__', 3)
def f():\n  import triton\n  return triton.jit
import triton\ndef f(g):\n  j = triton.jit\n  return j(g)
import triton\n@hold(triton.jit)\ndef g(): pass
import abc\ndict(m=abc.ABCMeta)['m']('L', (int,), {})
from types import SimpleNamespace\nn = SimpleNamespace()\nn.__init__(**{'__a' + 'b__': 3})
from types import SimpleNamespace\nn = SimpleNamespace()\nSimpleNamespace.__init__(n, **{'__a' + 'b__': 3})
from types import SimpleNamespace\nn = SimpleNamespace(a=1)\ntype(n)(**{'__a' + 'b__': 3})
import functools\nfunctools.wraps.__call__(f, assigned=('__globals__',))
str.format('{0.__glo' + 'bals__}', f)
list(map(str.format, ['{0.__glo' + 'bals__}'], [f]))
def show(t, f):\n  return t.format(f)\nshow('{0.__glo' + 'bals__}', show)
getattr('{0.__glo' + 'bals__}', 'format')(f)
match '{0.__glo' + 'bals__}':\n  case object(format=g): g(f)
class E:\n  def __eq__(self, o): return o\n(E() == A().__dict__)['__a' + 'b__'] = 3
def dict(x): return x\ndict(k.__dict__)['__a' + 'b__'] = 3
import enum\nclass B(enum.Enum):\n  x: int\nB('L', {'__d' + 'el__': 1})
import enum\nclass B(enum.Enum):\n  f = lambda s: 1\nB('L', {'__d' + 'el__': 1})
import enum\nclass B(enum.Enum):\n  _ignore_ = ['A']\n  A = 1\nB('L', {'__d' + 'el__': 1})
import enum\nenum.Enum.__call__('L', {'__d' + 'el__': 1})
import numbers\nclass I(numbers.Integral): pass\nI.register(float)
import copy\ncopy.replace(n, **{'__a' + 'b__': 3})
import dataclasses\nd = dataclasses\nd.dataclass.__call__(int)
import functools\nimport abc\n(lambda m: m)(m=abc.ABCMeta)
def f():\n  def isinstance(a, b): return b\n  return isinstance(1, type)('L', (int,), {})
def f(kind=type): return kind('L', (int,), {})
class A(str):\n  def __eq__(self, o): return True
class A:\n  locals()['__a' + 'b__'] = 3
import torch\nclass L(torch.nn.Parameter): pass\nclass M(L):\n  def detach(self): return 3
import torch\ntorch.Tensor.__class__.__call__('L', (int,), {})
__match_args__, x = ('__globals__',), 1
import dataclasses\nimport torch\ndataclasses.dataclass(eq=True)(torch.nn.Parameter)
type(int)(*(v for v in ('L', (int,), {})))
class E:\n  def __radd__(self, o): return int\ntype(int)("a" + E())
def str(x): return int\ntype(int)(str(3))
KINDS = {}\nKINDS.get(3, type(int))('L', (int,), {})
import numbers\ntype(numbers.Integral).register(numbers.Integral, float)
('{0.__glo' + 'bals__}').format(f)
A = '{0.__glo'\nB = 'bals__}'\n(A + B).format(f)
'__glo'.join(['{0.', 'bals__}']).format(f)
''.join(['{0.__glo', 'bals__}']).format(f)
''.join(c for c in T).format(f)
''.join(['{}'] * K).format(f)
('{:{0.__glo' + 'bals__}}').format(f)
class E:\n  def __rmul__(self, o): return '{0.__glo' + 'bals__}'\n('{}' * E()).format(f)
class E:\n  def __rmul__(self, o): return ['{0.__glo' + 'bals__}']\n' '.join(['{}'] * E()).format(f)
class E:\n  def __radd__(self, o): return '{0.__glo' + 'bals__}'\n('{}' + E()).format(f)
def len(x): return E()\n('{}' * len(3)).format(f)
row = '{}'\nrow += '{0.__glo' + 'bals__}'\nrow.format(f)
def show(width, f): return f'{{:>{width}}}'.format(f)
class A:\n  def make(self, *v): return type(self)(*v)\nA.make(int, 'L', (int,), {})
class A:\n  def make(self, a, b, c): return type(self)(a, b, c)\nA.make(int, 'L', (int,), {})
from types import SimpleNamespace\nn = SimpleNamespace(a=1)\ntype(n)(('__a' + 'b__', 3) for _ in [1])
""".strip().split("\n")


@pytest.mark.parametrize("source", REFUSED)
def test_what_leads_out_of_a_lab_is_refused(source):
    assert refusals(source.replace("\\n", "\n"))


def rows_of_the_guide() -> list[list[str]]:
    """The guide's table of rules: about what, refused, heard, allowed."""
    guide = (ROOT / "grading" / "README.md").read_text(encoding="utf-8")
    section = guide.split("### What is refused, what is heard\n")[1].split("\n###")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line] for line in lines[1:]]


def code_of(cell: str) -> list[str]:
    """What stands as code in a cell, if it is a piece of Python that can stand alone."""
    found = []
    for code in re.findall(r"`([^`]+)`", cell):
        with contextlib.suppress(SyntaxError):
            ast.parse(code)
            found.append(code)
    return found


@pytest.mark.parametrize("row", rows_of_the_guide(), ids=lambda row: row[0])
def test_the_guides_examples_are_refused_and_allowed_as_it_says(row):
    head = "import torch, triton\nimport triton.language as tl\nimport numpy as np\n"
    refused, allowed = (code_of(row[place]) for place in (1, -1))
    for code in (each for each in refused if not each.startswith(("policy", "utils", "@"))):
        assert refusals(head + code), code
    assert allowed or row[0] == "values in disguise"
    for code in allowed:
        assert refusals(head + code) == [], code


def test_the_guide_names_each_group_of_operators_and_how_many_elements_python_may_fetch():
    heard = " ".join(row[2] for row in rows_of_the_guide())
    named = {"NumPy", "Python"}
    assert all(group in heard for group in OPERATOR_GROUPS if group not in named) and named < set(OPERATOR_GROUPS)
    assert f"more than {MOST_FETCHED} elements fetched" in heard and f"more than {MOST_FETCHED} different" in heard


@pytest.mark.parametrize(
    "source",
    [b"\xff", b"x = 1\0", "x = '\ud800'", "(" * 5000, "-" * 90_000 + "1", "a." * 50_000 + "a", "1+" * 9_999 + "1",
     "def", "x = 1\n" * LONGEST, "if 1:\n" * 3, "\f", b"\xef\xbb\xbfdef"],
)  # fmt: skip
def test_what_cannot_be_read_is_a_violation_and_no_error(source):
    found = violations(source, "gelu.py", LAB)
    assert bool(found) == (source != "\f") and all(each.line >= 1 and each.what and each.why for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", LABS)
def test_hostile_modules_are_refused_for_the_reason_that_students_read(name, tmp_path):
    lab = find_lab(name)
    refused = [each for each in HOSTILE if each.outcomes == ("refused",) and lab.number in each.labs]
    assert len(refused) >= 40
    for each in refused:
        write(tmp_path / each.name, lab, each)
        path = tmp_path / each.name / (each.module or TARGETS[lab.number])
        said = "\n".join(map(str, violations(path.read_bytes(), path.name, lab)))
        assert re.search(each.reason, said, re.DOTALL), (each.name, said)


def test_a_violation_says_where_what_and_what_to_do_instead():
    (found,) = violations("import torch\n\nx = eval('3')\n", "gelu.py", LAB)
    assert str(found) == "line 3: `eval`: a module is graded as it is written: it may not run text as code"
    (found,) = violations("import torch\ntorch.softmax = None\n", "gelu.py", LAB)
    assert (found.line, found.what) == (2, "`torch.softmax = ...`") and "write a function of your own" in found.why


@pytest.mark.parametrize(
    ("source", "instead"),
    [
        ("from types import SimpleNamespace", "write a dataclass with these fields, or a named tuple"),
        ("from dataclasses import make_dataclass", "write the class statement, with `@dataclass` above it"),
        ("import operator\nx = operator.attrgetter('n')", "write `lambda thing: thing.name`"),
        ("class V:\n  def f(self, v):\n    return type(self)(*v)", "write the class's name, `V(...)`, or name the arg"),
        ("class V:\n  def f(self, v):\n    return self.__class__(*v)", "write the class's name, `V(...)`"),
        ("def f(x, v):\n  return type(x)(*v)", "write the class's name, `TheClass(...)`"),
        ("def f(width, x):\n  return ('{:>' + width + '}').format(x)", "joined of whole texts by `+`, `* 3` or `join`"),
    ],
)
def test_honest_code_that_is_refused_is_told_what_to_write_instead(source, instead):
    (said,) = refusals(source)
    assert instead in said


def test_complete_texts_put_together_have_the_fields_of_their_parts_and_no_other():
    """So no attribute is named by a text of two halves; a text with half a field is not complete."""
    texts = ["".join(signs) for length in range(5) for signs in itertools.product("{}0.", repeat=length)]
    complete = [text for text in texts if _is_complete(text)]
    assert 20 < len(complete) < len(texts) / 2 and "{0.}" in complete and not {"{", "}", "{0", ".0}"} & {*complete}

    def fields(text: str) -> list[tuple[str, str]]:
        return [(name, spec) for _, name, spec, _ in string.Formatter().parse(text) if name is not None]

    for first, second in itertools.product(complete, repeat=2):
        assert fields(first + second) == fields(first) + fields(second)


@pytest.mark.slow
def test_a_released_statement_passes_where_it_stands_and_nowhere_else():
    lab = find_lab("lab4")
    released = (lab.released / "checkpoint.py").read_text()
    assert "import os" in released and refusals(released, "lab4", "checkpoint.py") == []
    assert refusals(released, "lab4", "memory.py")
    moved = released + "\n\ndef mine(path):\n    os.remove(path)\n"
    assert [each.split(":")[1] for each in refusals(moved, "lab4", "checkpoint.py")] == [" `os.remove`"]


@pytest.mark.parametrize("home", sorted(name for name in PACKAGES if name.split(".")[0] in ("torch", "numpy")))
def test_every_module_that_leads_out_of_torch_or_numpy_is_out_of_reach(home):
    held = vars(importlib.import_module(home))
    names = [name for name, value in held.items() if issubclass(type(value), types.ModuleType)]
    reached = {f"{home}.{name}" for name in names if not refusals(f"import {home}\nx = {home}.{name}.anything\n")}
    assert reached <= PACKAGES


@pytest.mark.parametrize("name", ["machinery_of_the_next_version", "select"])
def test_a_module_that_a_later_torch_brings_is_refused_without_being_listed(monkeypatch, name):
    assert refusals(f"import torch\ny = torch.{name}(3)\n") == []
    monkeypatch.setattr(torch, name, types.ModuleType(name), raising=False)
    refused = f"the module `torch.{name}` is not needed in a lab: use the ordinary functions of `torch`"
    assert [each.split(": ", 2)[2] for each in refusals(f"import torch\ny = torch.{name}(3)\n")] == [refused]
    assert refusals(f"import torch\nm = torch.{name}\n") and refusals(f"from torch import {name}\n")


@pytest.mark.parametrize("path", ["torch.chunk", "torch.trace", "numpy.array", "numpy.copy", "numpy.trace"])
def test_a_function_that_is_named_like_a_module_of_python_may_be_used(path):
    assert refusals(f"import torch\nimport numpy\ny = {path}(3)\n") == []


def test_the_policy_does_not_import_what_it_judges(tmp_path: Path):
    marker = tmp_path / "ran"
    violations(f"open({str(marker)!r}, 'w')\n", "gelu.py", LAB)
    assert not marker.exists()
