"""Tricks on the process that the checks run in: changing them, the libraries under them, or what sees their errors."""

from __future__ import annotations

from hostile import at_call, at_import

at_import(
    "checks-overwritten",
    "replaces the function that fails a check",
    "import utils.checks.core\nutils.checks.core.fail = lambda *a, **k: None",
    r"import utils\.checks\.core.*may use",
)
at_call(
    "checks-overwritten-late",
    "does the same when it is called, through sys.modules",
    "import sys\nfor name, module in list(sys.modules.items()):\n    if name.startswith('utils.checks'):\n"
    "        for key in list(vars(module)):\n            if key.startswith('fail'):\n"
    "                setattr(module, key, lambda *a, **k: None)\nreturn 0",
    r"`sys`|import sys",
)
at_import(
    "check-function-replaced",
    "puts a function of its own in the place of every check",
    "import sys\nfor name in list(sys.modules):\n"
    "    if '.exercises.' in name:\n"
    "        for key in [k for k in vars(sys.modules[name]) if k.startswith('check_')]:\n"
    "            setattr(sys.modules[name], key, lambda *a, **k: print('passed'))",
    r"import sys",
)
at_import(
    "notebook-names-replaced",
    "puts functions of its own under the names that the check cells call",
    "names = get_ipython().user_ns\nfor key in list(names):\n    if key.startswith('check_'):\n"
    "        names[key] = lambda *a, **k: None",
    r"get_ipython",
)
at_import(
    "errors-not-shown",
    "replaces what IPython does with an error",
    "shell = get_ipython()\nshell.showtraceback = lambda *a, **k: None\nshell._showtraceback = lambda *a, **k: None",
    r"get_ipython",
)
at_import(
    "errors-handled",
    "registers a handler of its own for every error",
    "from IPython import get_ipython\nget_ipython().set_custom_exc((Exception,), lambda *a, **k: None)",
    r"IPython",
)
at_import(
    "equal-to-everything",
    "returns a number that says it equals anything",
    "class Anything(int):\n    def __eq__(self, other):\n        return True\n    def __ne__(self, other):\n"
    "        return False\n    __hash__ = int.__hash__",
    r"in disguise",
)
at_import(
    "builtins-replaced",
    "replaces abs and max by functions that make every difference small",
    "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.max = lambda *a, **k: 0",
    r"import builtins",
)
at_import(
    "torch-function-replaced",
    "replaces the comparison that checks of tensors make",
    "import torch\ntorch.allclose = lambda *a, **k: True\ntorch.equal = lambda *a, **k: True",
    r"torch\.allclose.*not yours to change",
)
at_import(
    "tensor-method-replaced",
    "replaces a method of every tensor under another name of its class",
    "from torch import Tensor\nT = Tensor\nT.__sub__ = lambda self, other: self * 0",
    r"not yours to change|special attributes",
)
at_import(
    "triton-function-replaced",
    "replaces a function of Triton's language",
    "import triton.language as tl\ntl.store = lambda *a, **k: None",
    r"tl\.store.*not yours to change",
)
at_import(
    "utils-function-replaced",
    "replaces a function of the course's library that its module imports",
    "from utils import runtime\nsetattr(runtime, 'pick', lambda **k: None)",
    r"runtime",
)
at_import(
    "code-replaced",
    "exchanges the code of a function that it may import",
    "from dataclasses import dataclass\ndataclass.__code__ = (lambda cls=None, **k: cls).__code__",
    r"__code__",
)
at_import(
    "through-globals",
    "reaches the system through a function's globals",
    "from dataclasses import dataclass\ndataclass.__globals__['sys'].modules.clear()",
    r"__globals__",
)
at_import(
    "through-subclasses",
    "reaches the system through the classes that Python knows",
    "for kind in ().__class__.__base__.__subclasses__():\n    if kind.__name__ == 'Popen':\n        kind(['true'])",
    r"__base__|__subclasses__",
)
at_import(
    "through-torch",
    "reaches the system through a module that PyTorch imports",
    "import torch\ntorch.os._exit(0)",
    r"torch\.os",
)
at_import(
    "names-made-of-text",
    "spells what it wants so that no search finds it",
    "import torch\nsystem = getattr(torch, 'o' + 's')\nsystem._exit(0)",
    r"getattr\(torch, 'o' \+ 's'\).*stands in the source",
)
at_import(
    "text-run-as-code",
    "hides its code in text",
    "exec(bytes.fromhex('696d706f7274206f730a6f732e5f65786974283029').decode())",
    r"`exec`",
)
at_import(
    "metaclass",
    "runs code by way of a metaclass",
    "class Kind(type):\n    def mro(cls):\n        return []",
    r"metaclass",
)
at_import(
    "finalizer",
    "runs code when the check is over",
    "class Later:\n    def __del__(self):\n        print('later')\n\nkept = Later()",
    r"__del__",
)
at_import(
    "pickle",
    "hands an object to other processes that runs code there",
    "class Payload:\n    def __reduce__(self):\n        return (print, ('unpickled',))",
    r"__reduce__",
)
at_call(
    "frames",
    "looks for the expected values in the frames of the check that calls it",
    "try:\n    raise ValueError('where am I')\nexcept ValueError as error:\n    frame = error.__traceback__.tb_frame\n"
    "while frame is not None:\n    if 'expected' in frame.f_locals:\n        return frame.f_locals['expected']\n"
    "    frame = frame.f_back\nreturn 0",
    r"__traceback__|tb_frame|f_back",
)
at_call(
    "frames-of-generators",
    "finds the check's frame through a generator",
    "steps = (step for step in [1])\nreturn steps.gi_frame.f_back.f_locals.get('expected', 0)",
    r"gi_frame",
)
at_call(
    "garbage-collector",
    "looks for the check's objects among all that Python keeps",
    "import gc\nfor thing in gc.get_objects():\n    if isinstance(thing, dict) and 'expected' in thing:\n"
    "        return thing['expected']\nreturn 0",
    r"import gc",
)
at_import(
    "tracing",
    "follows the check line by line",
    "import sys\nsys.settrace(lambda frame, event, argument: None)",
    r"import sys",
)
at_import(
    "deadline-disarmed",
    "takes the handler of the check's alarm away",
    "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)",
    r"import signal",
)
at_call(
    "deadline-swallowed",
    "goes on when the check says that time is over",
    "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        continue",
    r"except BaseException",
)
at_call(
    "deadline-swallowed-by-finally",
    "goes on when the check says that time is over, by a jump out of finally",
    "while True:\n    try:\n        while True:\n            pass\n    finally:\n        continue",
    r"finally",
)
