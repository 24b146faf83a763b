"""Tricks that come by a name which their source does not show: to read, to write, or to make a class with."""

from __future__ import annotations

from pathlib import Path

from grading.lab import Lab
from hostile import TARGETS, at_import, hostile

TEXT = (
    r"object\.__setattr__|write `@|stands in the source|written out|in disguise|metaclass|not yours|class statement|"
    r"internals|special"
)

at_import(
    "matched-attribute",
    "has a match statement read an attribute that it names in a text",
    "import abc\n\n\nclass Function(abc.ABC):\n    __match_args__ = ('__globals__',)\n\n\n"
    "Function.register(type(lambda: 0))\n\n\ndef reach():\n    match reach:\n        case Function(found):\n"
    "            return found\n\n\nreach()['__builtins__']['__import__']('os')._exit(0)",
    TEXT,
)
at_import(
    "wrapped-attribute",
    "has functools copy an attribute that it names in a text",
    "import functools\n\n\ndef reach():\n    def box():\n        pass\n\n"
    "    functools.wraps(reach, assigned=('__globals__',), updated=())(kept := Kept())\n"
    "    return kept.__dict__['__globals__']\n\n\nclass Kept:\n    pass\n\n\n"
    "reach()['__builtins__']['__import__']('os')._exit(0)",
    TEXT,
)
at_import(
    "class-of-an-enumeration",
    "has enum make a class whose special methods it names in a text",
    "import enum\n\nLate = enum.Enum('Late', {'__' + 'del__': lambda self: print('late'), 'A': 1})\nkept = Late.A",
    TEXT,
)
at_import(
    "class-of-abcmeta",
    "calls a metaclass of Python's with a table of methods",
    "import abc\n\nLiar = abc.ABCMeta('Liar', (int,), {'__eq__': lambda a, b: True, '__hash__': int.__hash__})",
    TEXT,
)
at_import(
    "class-of-a-type",
    "calls the type of a type with a table of methods",
    "Liar = type(int)('Liar', (int,), {'__eq__': lambda a, b: True, '__hash__': int.__hash__})",
    TEXT,
)
at_import(
    "class-of-a-type-handed-on",
    "has a function return the type of a type, and calls that",
    "def kind(thing):\n    return type(thing)\n\n\n"
    "Liar = kind(int)('Liar', (int,), {'__eq__': lambda a, b: True, '__hash__': int.__hash__})",
    TEXT,
)
at_import(
    "class-of-a-class-attribute",
    "does the same by way of __class__",
    "def make(kind, name, bases, methods):\n    return kind(name, bases, methods)\n\n\n"
    "Liar = make(int.__class__, 'Liar', (int,), {'__eq__': lambda a, b: True})",
    TEXT,
)
at_import(
    "equal-in-two-steps",
    "has a class of a class of numbers say that it equals anything",
    "class Number(int):\n    pass\n\n\nclass Liar(Number):\n    def __eq__(self, other):\n        return True\n\n"
    "    __hash__ = int.__hash__",
    TEXT,
)
at_import(
    "equal-under-another-name",
    "does the same with another name of int",
    "Number = int\n\n\nclass Liar(Number):\n    def __eq__(self, other):\n        return True\n\n"
    "    __hash__ = int.__hash__",
    TEXT,
)
at_import(
    "equal-as-an-enumeration",
    "does the same with a number of an enumeration",
    "import enum\n\n\nclass Liar(enum.IntEnum):\n    A = 3\n\n    def __eq__(self, other):\n        return True\n\n"
    "    __hash__ = int.__hash__",
    TEXT,
)
at_import(
    "set-by-object",
    "has object set an attribute that it names in a text",
    "class Kept:\n    pass\n\n\nkept = Kept()\nobject.__setattr__(kept, '__array' + '_interface__', {'version': 3})",
    TEXT,
)
at_import(
    "fields-written",
    "writes a field that it names in a text into an object's own table",
    "class Kept:\n    pass\n\n\nkept = Kept()\nkept.__dict__['__array' + '_interface__'] = {'version': 3}",
    TEXT,
)
at_import(
    "fields-updated",
    "does the same by a method of the table",
    "class Kept:\n    pass\n\n\nkept = Kept()\nkept.__dict__.update({'__array' + '_interface__': {'version': 3}})",
    TEXT,
)
at_import(
    "fields-of-a-namespace",
    "makes an object whose attributes it names in a text, so that NumPy reads memory at any address",
    "from types import SimpleNamespace\nimport numpy as np\n\n"
    "where = {'data': (id(SimpleNamespace), False), 'shape': (8,), 'typestr': '<u8', 'version': 3}\n"
    "words = np.asarray(SimpleNamespace(**{'__array' + '_interface__': where}))\nwords[0] += 1",
    r"types.*may use|SimpleNamespace",
)
at_import(
    "text-of-the-globals",
    "has a text that it puts together reach for the globals of a function",
    "def reach():\n    pass\n\n\nshown = ('{0.__glo' + 'bals__[__builtins__]}').format(reach)",
    TEXT + r"|a text",
)
at_import(
    "numbers-registered",
    "tells Python that floats are whole numbers, in whoever asks",
    "import numbers\n\nnumbers.Integral.register(float)",
    TEXT,
)
at_import(
    "class-dressed-up",
    "has dataclasses give a class of PyTorch a comparison of its own",
    "import dataclasses\nimport torch\n\ndataclasses.dataclass(torch.nn.Parameter)",
    TEXT,
)
at_import(
    "class-by-a-comparison",
    "has an object keep the class of a class that it is compared with",
    "class Keeps:\n    def __eq__(self, other):\n        return other\n\n\n"
    "Liar = (Keeps() == type(int))('Liar', (int,), {'__eq__': lambda a, b: True})",
    TEXT,
)
at_import(
    "class-by-itself",
    "has the class of a class say what class that class is of",
    "kind = type(int)(int)\nLiar = kind('Liar', (int,), {'__eq__': lambda a, b: True})",
    TEXT,
)
at_import(
    "class-by-getattr",
    "asks for the class of a class by the name of the attribute",
    "Liar = getattr(int, '__class__')('Liar', (int,), {'__eq__': lambda a, b: True})",
    TEXT + r"|write `thing",
)
at_import(
    "class-by-a-pattern",
    "has a match statement bind the class of a class",
    "match int:\n    case object(__class__=kind):\n        Liar = kind('Liar', (int,), {'__eq__': lambda a, b: True})",
    TEXT + r"|write `thing",
)
at_import(
    "class-by-a-field",
    "has a dataclass keep the class of a class as the type of a field",
    "from dataclasses import dataclass, fields\n\n\n@dataclass\nclass Kept:\n    kind: type\n\n\n"
    "Liar = fields(Kept)[0].type('Liar', (int,), {'__eq__': lambda a, b: True})",
    TEXT,
)
at_import(
    "text-by-str-format",
    "has str itself fill a text that is put together",
    "def reach():\n    pass\n\n\nshown = str.format('{0.__glo' + 'bals__[__builtins__]}', reach)",
    TEXT + r"|a text",
)
at_import(
    "text-by-a-product",
    "has a factor say what the product of a text is",
    "class Factor:\n    def __rmul__(self, text):\n        return '{0.__glo' + 'bals__[__builtins__]}'\n\n\n"
    "def reach():\n    pass\n\n\nshown = ('{}' * Factor()).format(reach)",
    TEXT,
)
at_import(
    "text-joined",
    "joins halves of a place to fill",
    "def reach():\n    pass\n\n\nshown = 'glo'.join(['{0.__', 'bals__[__builtins__]}']).format(reach)",
    TEXT,
)
at_import(
    "class-by-a-method",
    "calls a method that makes another instance with a class for the instance",
    "class Pair:\n    def like(self, *values):\n        return type(self)(*values)\n\n\n"
    "Liar = Pair.like(int, 'Liar', (int,), {'__eq__': lambda a, b: True})",
    TEXT,
)


@hostile(
    "oracle-asked",
    "finds the check's own functions in Python's table of modules, and has them answer",
    "refused",
    reason=TEXT,
    labs=(1,),
)
def _oracle(folder: Path, lab: Lab) -> None:
    text = (
        "import abc\n\n\nclass Function(abc.ABC):\n    __match_args__ = ('__globals__',)\n\n\n"
        "Function.register(type(lambda: 0))\n\n\n"
        "def _ask(name, given):\n    match _ask:\n        case Function(found):\n            pass\n"
        "    system = found['__builtins__']['__import__']('sys')\n"
        "    for module in list(system.modules.values()):\n"
        "        for value in list(module.__dict__.values()):\n"
        "            if getattr(value, 'name', None) == name and hasattr(value, 'expected'):\n"
        "                return value.expected(**given)\n\n\n"
    )
    for name in ("num_tiles", "num_waves", "last_wave_utilisation", "tiled_matmul_seconds"):
        text += (
            f"def {name}(**given):\n    for value in given.values():\n        if not value > 0:\n"
            f"            raise ValueError(f'a size must be above zero, got {{value}}')\n"
            f"    return _ask('{name}', given)\n\n\n"
        )
    (folder / TARGETS[1]).write_text(text, encoding="utf-8")
