"""The rule book for a student's module: what its source may name, decided without running it.

:func:`violations` reads the syntax tree and refuses what leads out of a lab: imports beyond the listed modules, the
system, files, frames and other internals, names made from text, and changes of what the module does not own. A released
statement that stands where it was released is the course's own and passes. Each :class:`Violation` says what is
there, in which line, and what to write instead.

What this cannot do. Python is too lively for a reader of source to be sure what runs: an object handed over may be
changed by its methods, a class passed to a function may be patched there, a loop may never end. So the policy only
narrows what a module can try. Behind it stand the sandbox (no network, no files of the course, limits on time, memory
and processes), the seal (:mod:`grading.seal`: PyTorch, Triton and the checks are what they were), and the scenarios,
whose expected values never enter the process that runs a student's code. A point needs all of them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from grading.lab import Lab
from grading.policy.paths import own_of
from grading.policy.rules import Reader, Violation

LONGEST = 200_000
"""Most characters of a module: several times the longest solution."""

DEEPEST = 120
"""Most levels of brackets, blocks and operators inside each other."""

MOST = 20
"""Violations that are listed; more of them teach nothing."""

__all__ = ["Violation", "violations"]


def violations(source: str | bytes, filename: str, lab: Lab) -> list[Violation]:
    """What in a student's module is against the rules, in the order of its lines; empty for an ordinary module.

    Args:
        source: the module as it was handed in; bytes are read as UTF-8.
        filename: its name in the lab's folder, such as ``"gelu.py"``: the released module of that name is known.
        lab: the lab that it belongs to.

    Returns:
        At most :data:`MOST` violations. Source that cannot be read (too long, too deep, no Python) is a violation too;
        nothing that stands in a module makes this function raise.
    """
    try:
        text = source.decode("utf-8-sig") if isinstance(source, bytes) else source
    except UnicodeDecodeError as error:
        return [Violation(1, "bytes that are no UTF-8", f"save the file as UTF-8 ({error.reason})")]
    tree = _parsed(text)
    if isinstance(tree, Violation):
        return [tree]
    own = own_of(lab)
    reader = Reader(own, Path(filename).name)
    try:
        reader.read(tree)
    except (RecursionError, MemoryError):
        reader.found.add(Violation(1, "code nested too deeply", "split it into functions"))
    return sorted(reader.found)[:MOST]


def _parsed(text: str) -> ast.Module | Violation:
    if len(text) > LONGEST:
        return Violation(1, f"{len(text):,} characters", f"a module of a lab has at most {LONGEST:,}")
    if "\0" in text:
        return Violation(text[: text.index("\0")].count("\n") + 1, "a null byte", "save the file as plain UTF-8 text")
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text, maxsplit=2)[:2], start=1):
        coding = re.match(r"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", line)
        if coding and coding[1].lower().replace("_", "-") not in ("utf-8", "utf8", "utf-8-sig", "ascii"):
            return Violation(number, f"the encoding {coding[1]!r}", "save the file as UTF-8 and take this line out")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return Violation(error.lineno or 1, "not Python", f"{error.msg}: run the module before you hand it in")
    except (RecursionError, MemoryError):
        return Violation(1, "code nested too deeply for Python to read", "split it into functions")
    except (ValueError, OverflowError, UnicodeError) as error:
        return Violation(1, "not Python", f"{error}: run the module before you hand it in")
    level: list[ast.AST] = [tree]
    for _ in range(DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree
    return Violation(getattr(level[0], "lineno", 1), "code nested too deeply", "split it into functions")
