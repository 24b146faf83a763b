"""Which submissions of a class hold the same code beyond what is handed out: ``LAB/similar.csv``, for the instructor.

The comparison is winnowing's (Schleimer, Wilkerson and Aiken 2003, "Winnowing: local algorithms for document
fingerprinting"), by the library ``copydetect``: names become ``V``, spaces and comments fall away, and pieces of
``PIECE`` characters of what is left are compared. Three things are done here. What is handed out is taken out
of each submission, line by line; modules are written anew from their syntax trees, so that layout does not
matter; and a piece that many submissions hold says nothing, since such a piece comes by itself.

No grade depends on it. It reads text that strangers wrote, so it runs in a process of its own, for a limited time.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, groupby
from operator import itemgetter
from pathlib import Path

from grading.lab import ROOT, Lab, find_lab

#: Characters of the shortest piece that counts, and of the pieces that are compared, after names became one letter.
PIECE = 35
#: A piece that more submissions hold says nothing (the same number as Moss's option ``-m``).
COMMON = 10
#: What makes a pair worth a look: a shared piece of many lines; or most of what one of them wrote, and not a few lines.
LONG, PERCENT, LINES = 20, 80, 6
#: A pair is in ``similar.csv`` from this per cent on.
LISTED = 25
LONGEST = 200_000  # characters of one submission that are compared: several times the longest lab
SECONDS = 600
COURSE = "the course's solution"


@dataclass(frozen=True)
class Similar:
    """Two submissions that hold the same pieces.

    Attributes:
        student: one of them.
        similar_to: the other one.
        percent: of what the student wrote, how much is in the other one.
        percent_of_other: of what the other one wrote, how much is in the student's.
        files: the student's modules in which it stands.
        longest_lines: lines of the longest shared piece.
        longest_at: where it is: ``merge.py 12-30``.
        other_at: where it is in the other one.
    """

    student: str
    similar_to: str
    percent: int
    percent_of_other: int
    files: Sequence[str]
    longest_lines: int
    longest_at: str
    other_at: str

    @property
    def flagged(self) -> bool:
        """Whether it is worth a look."""
        most = max(self.percent, self.percent_of_other) >= PERCENT
        return self.longest_lines >= (LINES if most else LONG)


# ---- what a student wrote


@dataclass(frozen=True)
class Work:
    """What one submission holds beyond what is handed out: lines of code, with the module and the line of each."""

    lines: tuple[str, ...]
    places: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(self.lines)


@functools.cache
def code_lines(text: str) -> list[tuple[int, str]]:
    """The code of a module, written anew without comments and docstrings: each line with its number in ``text``.

    A module that Python cannot read has none; it is not graded either.
    """
    try:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(body := getattr(node, "body", None), list):
                node.body = [one for one in body if not _is_text(one)] or [ast.Pass(lineno=getattr(node, "lineno", 1))]
        anew = ast.unparse(tree)
        numbers = {new.lineno: old.lineno for new, old in zip(_statements(ast.parse(anew)), _statements(tree))}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found, number = [], 0
    for index, line in enumerate(anew.splitlines(), start=1):
        number = numbers.get(index, number)
        found.append((number, line.strip()))
    return found


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _statements(tree: ast.AST) -> list[ast.stmt]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def work_in(modules: Mapping[str, str], released: Mapping[str, str]) -> Work:
    """What is written in modules, by name, beyond the lines of the released ones."""
    given = {line for text in released.values() for _, line in code_lines(text)}
    found = [
        ((name, number), line)
        for name, text in sorted(modules.items())
        if text != released.get(name)
        for number, line in code_lines(text)
        if line and line not in given
    ]
    return Work(tuple(line for _, line in found), tuple(place for place, _ in found))


# ---- comparing


def compare(
    works: Mapping[str, Work], released: Mapping[str, str], together: Iterable[Sequence[str]] = ()
) -> list[Similar]:
    """The pairs that are listed, those with the longest shared piece first; each in both directions.

    Args:
        works: by student.
        released: the lab's modules as they are handed out, by name: a piece that stands there says nothing.
        together: students who handed in one submission together; they are not compared with one another.
    """
    from copydetect import CodeFingerprint, compare_files  # it loads matplotlib

    def fingerprint(text: str) -> CodeFingerprint:
        return CodeFingerprint("student.py", PIECE, 1, fp=io.StringIO(text[:LONGEST]))

    prints = {student: fingerprint(work.text) for student, work in works.items() if work.lines}
    handed_out = fingerprint("\n".join(line for text in released.values() for _, line in code_lines(text))).hashes
    # copies that differ in names only count once: what a large group shares is no common piece for that
    distinct = {one.filtered_code: one.hashes for one in prints.values()}
    holders = Counter(piece for pieces in distinct.values() for piece in pieces)
    for one in prints.values():
        says = {piece for piece in one.hashes if piece not in handed_out and holders[piece] <= COMMON}
        one.hash_idx = {piece: at for piece, at in one.hash_idx.items() if piece in says}
        one.hashes = says
    group = {student: index for index, members in enumerate(together) for student in members}
    found = []
    for one, other in combinations(sorted(prints), 2):
        if one in group and group[one] == group.get(other):
            continue
        _, shares, slices = compare_files(prints[one], prints[other])
        percents = [round(100 * float(share)) for share in shares]
        if max(percents) >= LISTED:
            pieces = [_pieces(works[student], of) for student, of in zip((one, other), slices)]
            found += [
                _similar((one, other), percents, pieces),
                _similar((other, one), percents[::-1], pieces[::-1]),
            ]
    return sorted(found, key=lambda pair: (-pair.longest_lines, -pair.percent, pair.student, pair.similar_to))


@dataclass(frozen=True)
class _Piece:
    """Lines of one module that are in another submission too."""

    module: str
    first: int
    last: int
    lines: int

    def __str__(self) -> str:
        return f"{self.module} {self.first}-{self.last}"


def _pieces(work: Work, slices: Sequence[Sequence[int]]) -> list[_Piece]:
    """The pieces of a work that these slices of its text are, longest first; a piece ends where its module ends."""
    found, text = [], work.text
    for start, end in zip(*slices):
        first, last = (text.count("\n", 0, int(at)) for at in (start, end))
        for module, places in groupby(work.places[first : last + 1], key=itemgetter(0)):
            numbers = [number for _, number in places]
            found.append(_Piece(module, numbers[0], numbers[-1], len(numbers)))
    return sorted(found, key=lambda piece: -piece.lines)


def _similar(pair: tuple[str, str], percents: Sequence[int], pieces: Sequence[Sequence[_Piece]]) -> Similar:
    (mine, *_), (other, *_) = pieces
    files = sorted({piece.module for piece in pieces[0]})
    return Similar(*pair, *percents, files, min(mine.lines, other.lines), str(mine), str(other))


# ---- the class


class NotCompared(Exception):
    """The submissions could not be compared; the text says why, in one line."""


def similar_in(lab: Lab, submissions: Mapping[str, Path], together: Iterable[Sequence[str]] = ()) -> list[Similar]:
    """The similar pairs of a class, from a process of its own.

    Args:
        lab: the lab.
        submissions: by student, the folder of the modules that were read.
        together: students who handed in one submission together.

    Raises:
        NotCompared: ``copydetect`` is not installed, or the comparison failed or took too long.
    """
    if not _is_installed():
        raise NotCompared("copydetect is not installed; make grade installs it, or pip install copydetect")
    folders = {student: str(folder) for student, folder in submissions.items()}
    given = json.dumps({"lab": lab.name, "submissions": folders, "together": [list(members) for members in together]})
    command = [sys.executable, "-m", "grading.similar"]
    try:
        ran = subprocess.run(command, input=given, cwd=ROOT, text=True, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotCompared(f"it takes more than {SECONDS} s") from error
    if ran.returncode:
        raise NotCompared(ran.stderr.strip().rsplit("\n", 1)[-1] or f"the process ended with {ran.returncode}")
    return [Similar(**pair) for pair in json.loads(ran.stdout)]


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("copydetect") is not None
    except ValueError:  # a module that stands there without a specification
        return False


def main() -> int:
    """Compare the submissions that standard input names, and print the pairs as JSON."""
    given = json.load(sys.stdin)
    lab = find_lab(given["lab"])
    released = _modules(lab.released)
    works = {student: work_in(_modules(Path(at)), released) for student, at in given["submissions"].items()}
    works[COURSE] = work_in(_modules(lab.solution), released)
    json.dump([asdict(pair) for pair in compare(works, released, given["together"])], sys.stdout)
    return 0


def _modules(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))}


def words(pairs: Iterable[Similar]) -> dict[str, str]:
    """What the column ``look`` says of each student: ``"87 % as grace: merge.py"``, the most similar one first."""
    found: dict[str, list[Similar]] = {}
    for pair in pairs:
        if pair.flagged:
            found.setdefault(pair.student, []).append(pair)
    said = {}
    for student, theirs in found.items():
        first, *more = sorted(theirs, key=lambda pair: -pair.percent)
        files = ", ".join(first.files) if len(first.files) <= 2 else f"{len(first.files)} files"
        said[student] = f"{first.percent} % as {first.similar_to}: {files}" + f" (and {len(more)} more)" * bool(more)
    return said


if __name__ == "__main__":
    raise SystemExit(main())
