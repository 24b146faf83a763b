"""Observations on disk: one JSON file an exercise, and one safetensors file beside it if it has tensors.

Who writes them shares a process with a student's code, so who reads them trusts nothing: only plain files, of a limited
size, in these two formats.
"""

from __future__ import annotations

import builtins
import json
import numbers
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

MOST_JSON_BYTES = 1 << 20
MOST_TENSOR_BYTES = 64 << 20
MOST_ERROR_CHARACTERS = 300
DEEPEST = 50  # lists in one another
#: Errors that a student is told of by name: Python's, the course's, PyTorch's and Triton's. A name of the student's own
#: could be made of hidden inputs.
ERRORS = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)}
ERRORS |= {
    "CheckpointError",
    "EngineFull",
    "NoRoom",
    "OutOfBlocks",
    "OutsideGroup",
    "RanksFailed",
    "ReadyMade",
    "TooLong",
}
ERRORS |= {"CompilationError", "InterpreterError", "LinAlgError", "OutOfMemoryError", "UnsupportedLanguageConstruct"}
PLACE = re.compile(r"\((?P<file>[^()]+), line (?P<line>[1-9]\d{0,4})\)$", re.ASCII)


class Unreadable(ValueError):
    """A file that no scenario wrote; the text says what is wrong with it, and nothing that is in it."""


@dataclass(frozen=True)
class Other:
    """A value that is no observation, by the name of its type."""

    kind: str


@dataclass(frozen=True)
class Raised:
    """The error that a scenario ended with: ``"ValueError: bad size (gelu.py, line 12)"``.

    A student's code wrote it, and may have put hidden inputs into it: ``text`` is for the instructor only.
    """

    text: str

    def told(self, lines: Mapping[str, int]) -> str:
        """What its student may read: ``"ValueError at gelu.py, line 12"``, or less.

        Args:
            lines: how many lines each file of the submission has.
        """
        name, place = self.text.split(":")[0], PLACE.search(self.text)
        kind = name if name in ERRORS else "an error"
        known = place and int(place["line"]) <= lines.get(place["file"], 0)
        return f"{kind} at {place['file']}, line {place['line']}" if known else kind


def plain(value: Any) -> Any:
    """The value as an observation: numbers as Python's, tuples as lists, tensors detached on the CPU.

    Anything else becomes an :class:`Other`.
    """
    if value is None or isinstance(value, (bool, str, Other)):
        return value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    return Other(type(value).__name__)


def _plain_tensor(value: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():  # what it holds, whatever a method of the student's own says of it
        value = torch.Tensor.detach(value)
    if value.numel() * value.element_size() > MOST_TENSOR_BYTES // 4:
        return Other(f"tensor of {value.numel():,} elements")
    if value.layout != torch.strided or value.is_complex():
        return Other(f"tensor of {value.dtype} and {value.layout}")
    return value.cpu().contiguous().clone()


def write(folder: Path, exercise: str, observations: Mapping[str, Any]) -> None:
    """Write an exercise's observations, the JSON last and whole."""
    tensors: dict[str, torch.Tensor] = {}
    content = {str(name): _encoded(plain(value), tensors) for name, value in observations.items()}
    if tensors:
        _replace(folder / f"{exercise}.safetensors", safetensors.torch.save(tensors))
    _replace(folder / f"{exercise}.json", json.dumps({"observations": content}).encode())


def write_error(folder: Path, exercise: str, error: BaseException, where: str = "") -> None:
    """Write that an exercise ended with an error, and where in the student's files it was raised."""
    text = raised_text(error, where)
    _replace(folder / f"{exercise}.json", json.dumps({"error": text}).encode())


def raised_text(error: BaseException, where: str = "") -> str:
    """``"ValueError: bad size (gelu.py, line 12)"``, cut to :data:`MOST_ERROR_CHARACTERS`."""
    try:
        said = str(error)
    except Exception:
        said = "(its text cannot be shown)"
    place = f" ({where})" if where else ""
    whole = f"{type(error).__name__}: {said}"
    return whole[: MOST_ERROR_CHARACTERS - len(place)] + place


def _encoded(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[str(len(tensors))] = value
        return {"tensor": str(len(tensors) - 1)}
    if isinstance(value, Other):
        return {"other": value.kind}
    if isinstance(value, list):
        return [_encoded(entry, tensors) for entry in value]
    return value


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def read(folder: Path, exercise: str) -> dict[str, Any] | Raised:
    """An exercise's observations, or the error that it ended with.

    Raises:
        FileNotFoundError: there is no file of that exercise.
        Unreadable: the files are not what :func:`write` or :func:`write_error` writes.
    """
    content = _parsed(_bytes(folder / f"{exercise}.json", MOST_JSON_BYTES))
    if not isinstance(content, dict):
        raise Unreadable("it is not a table of observations")
    if isinstance(content.get("error"), str):
        return Raised(printable(content["error"]))
    found = content.get("observations")
    if not isinstance(found, dict):
        raise Unreadable("it is not a table of observations")
    tensors = _Tensors(folder / f"{exercise}.safetensors")
    return {name: _decoded(value, tensors) for name, value in found.items()}


def printable(text: str) -> str:
    """The text on one line, without control characters, cut to :data:`MOST_ERROR_CHARACTERS`."""
    line = " ".join(text[: 4 * MOST_ERROR_CHARACTERS].split())
    return "".join(c for c in line if c.isprintable())[:MOST_ERROR_CHARACTERS]


class _Tensors:
    """The tensors of a safetensors file, loaded when the first is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loaded: dict[str, torch.Tensor] | None = None

    def get(self, key: Any) -> torch.Tensor:
        if self.loaded is None:
            try:
                self.loaded = safetensors.torch.load(_bytes(self.path, MOST_TENSOR_BYTES))
            except FileNotFoundError as error:
                raise Unreadable("its tensors are missing") from error
            except Unreadable as error:
                raise Unreadable(f"its tensors cannot be read: {error}") from error
            except Exception as error:
                raise Unreadable("its tensors cannot be read") from error
        if not isinstance(key, str) or key not in self.loaded:
            raise Unreadable("a tensor is missing")
        return self.loaded[key]


def _decoded(value: Any, tensors: _Tensors, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise Unreadable("its lists are nested too deeply")
    if isinstance(value, list):
        return [_decoded(entry, tensors, depth + 1) for entry in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors.get(value["tensor"])
    kind = value.get("other")
    return Other(printable(kind)[:60] if isinstance(kind, str) else "object")


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Unreadable("it is no JSON that can be read") from error


def _bytes(path: Path, most: int) -> bytes:
    """What a plain file holds: no link, no pipe, no device, no more than ``most`` bytes."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable("it is no plain file") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Unreadable("it is no plain file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(handle)
    if len(content) > most:
        raise Unreadable(f"it is larger than {most:,} bytes")
    return content
