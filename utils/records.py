"""Recorded measurements: what a GPU really did, with device, date, versions, command and the source that was measured.

Some records hold the results of arithmetic that takes minutes, and no timings. They are computed on a CPU and say so.

A reader without a GPU sees these figures, and a notebook's claims rest on them. Each benchmark has one JSON file in
``utils/records/``, written by its script in ``benchmarks/`` on a machine with a GPU and never by hand: the file keeps
a digest of what it says, so that a figure, a device or a date that was edited is refused, and a fingerprint of the
measured source, so that a test fails when the source has changed since (:func:`stale`). The digest leaves out the
sources' paths: when a measured file is renamed, it is renamed in its records too, and the fingerprint tells whether it
is the same source.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils import record_schemas
from utils.atomic_write import write_atomically
from utils.course_modules import Course
from utils.fingerprint import fingerprint

__all__ = ["DIRECTORY", "Record", "RecordError", "benchmark_names", "fingerprint", "load", "path_of", "save", "stale"]

#: Where the records are.
DIRECTORY = Path(__file__).resolve().parent / "records"

#: The device of records that were computed without a GPU.
CPU = f"CPU ({platform.machine()})"

_FORMAT = 1
_KEYS = ("format", "benchmark", "device", "date", "versions", "command", "sources", "fingerprint", "digest", "results")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class RecordError(ValueError):
    """A record that cannot be trusted: the message names the file and the value."""


@dataclass(frozen=True)
class Record:
    """The measurements of one benchmark as they were recorded.

    Attributes:
        benchmark: Its name, ``"latency"``.
        device: The GPU as its driver calls it, ``"NVIDIA H100 80GB HBM3"``, or ``"CPU (x86_64)"``.
        date: The day, ``"2026-11-20"``.
        versions: What ran: ``python``, ``torch``, ``triton``, ``cuda``, ``driver``, ``numpy``.
        command: What repeats the measurement, ``"python -m benchmarks.latency"``.
        sources: The measured source, as paths relative to the course (see :mod:`utils.fingerprint`).
        fingerprint: That source's fingerprint when it was measured.
        results: The figures, in the benchmark's ``SCHEMA``; times in seconds, sizes in bytes.
    """

    benchmark: str
    device: str
    date: str
    versions: Mapping[str, str]
    command: str
    sources: tuple[str, ...]
    fingerprint: str
    results: Any

    @property
    def label(self) -> str:
        """Device and date, for the caption of a figure: ``"NVIDIA H100 80GB HBM3, 2026-11-20"``."""
        return f"{self.device}, {self.date}"


def path_of(benchmark: str) -> Path:
    """The file of a benchmark's record.

    Raises:
        ValueError: ``benchmark`` is not a name in lower case.
    """
    if not isinstance(benchmark, str) or not _NAME.fullmatch(benchmark):
        raise ValueError(f"benchmark must be a name of lower-case letters, digits and underscores, got {benchmark!r}")
    return DIRECTORY / f"{benchmark}.json"


def benchmark_names() -> list[str]:
    """Names of the benchmarks that are recorded, sorted."""
    return sorted(path.stem for path in DIRECTORY.glob("*.json"))


def load(benchmark: str) -> Record:
    """Read the recorded measurements of one benchmark.

    Raises:
        ValueError: ``benchmark`` is no benchmark's name, or nothing is recorded for it (the message lists what is).
        RecordError: the file is damaged or was edited.
    """
    path = path_of(benchmark)
    if not path.is_file():
        raise ValueError(
            f"nothing is recorded for {benchmark!r}; there are records of: {', '.join(benchmark_names()) or 'nothing'}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(f"{path.name}: not a text file in UTF-8: {error}") from error
    return parse(text, benchmark, path.name)


def parse(text: str, benchmark: str, filename: str) -> Record:
    """Read a record from its text: what :func:`load` does with a file's content.

    Raises:
        RecordError: as :func:`load`.
    """
    try:
        raw = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{filename}: not valid JSON: {error}") from error
    problems = _problems(raw, benchmark)
    if problems:
        raise RecordError(_first(problems, filename))
    return Record(
        benchmark=benchmark,
        device=raw["device"],
        date=raw["date"],
        versions=raw["versions"],
        command=raw["command"],
        sources=tuple(raw["sources"]),
        fingerprint=raw["fingerprint"],
        results=raw["results"],
    )


def save(
    benchmark: str, results: Any, schema: object, sources: Sequence[str], command: str, *, on_cpu: bool = False
) -> Path:
    """Record measurements that were made just now on this machine's GPU, or results of its CPU; return the file.

    The record is checked as :func:`load` would check it before the benchmark's file is replaced, in one step: a failure
    leaves the former record as it was.

    Args:
        benchmark: Its name.
        results: The figures.
        schema: What they must hold, for :func:`utils.record_schemas.check`.
        sources: The measured source, as paths relative to the course.
        command: What repeats the measurement.
        on_cpu: The results are arithmetic and not timings, and were computed on the CPU.

    Raises:
        RuntimeError: kernels do not run on a GPU here, so nothing can have been measured (but ``on_cpu``).
        ValueError: ``benchmark`` is no benchmark's name, or a source leads nowhere.
        FileNotFoundError: a source is not there.
        RecordError: the results do not have the schema, or hold a number that is not finite.
    """
    from utils import runtime

    path = path_of(benchmark)
    if not (on_cpu or runtime.HAS_GPU):
        raise RuntimeError(
            f"cannot record {benchmark!r}: no GPU is in use here, so nothing was measured "
            "(python -m utils.runtime says why)"
        )
    _refuse_non_finite(results, "results", path.name)
    problems = record_schemas.check(json.loads(json.dumps(results)), schema, "results")
    if problems:
        raise RecordError(_first(problems, path.name))
    raw = {
        "format": _FORMAT,
        "benchmark": benchmark,
        "device": CPU if on_cpu else runtime.gpu_name(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "command": command,
        "sources": list(sources),
        "fingerprint": fingerprint(sources),
        "digest": "",  # in its place in the file; known once the rest is
        "results": results,
    }
    raw["digest"] = digest(raw)
    text = as_text(raw)
    parse(text, benchmark, path.name)
    write_atomically(path, text.encode())
    return path


def stale() -> list[str]:
    """What is out of date, one sentence a record: its measured source has changed or gone since it was measured."""
    problems = []
    course = Course()
    for benchmark in benchmark_names():
        record = load(benchmark)
        try:
            current = fingerprint(record.sources, course)
        except (ValueError, FileNotFoundError) as error:
            problems.append(f"{benchmark}: {error}")
            continue
        if current != record.fingerprint:
            problems.append(
                f"{benchmark}: {', '.join(record.sources)} changed since it was measured on {record.date}: "
                f"run `{record.command}`{'' if record.device.startswith('CPU') else ' on a GPU'}"
            )
    return problems


def digest(raw: Mapping[str, Any]) -> str:
    """SHA-256 of a record but its keys ``"digest"`` and ``"sources"``, independent of how the file is laid out."""
    rest = {key: value for key, value in raw.items() if key not in ("digest", "sources")}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of what ran here: Python, PyTorch, Triton, CUDA, the GPU's driver and NumPy."""
    import numpy
    import torch
    import triton

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "none",
        "numpy": numpy.__version__,
        "driver": "unknown",
    }
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        answer = []
    if answer:
        found["driver"] = answer[0]
    return found


def as_text(raw: Mapping[str, Any]) -> str:
    """A record as JSON that reads and diffs well: one line for each item of a list.

    Raises:
        ValueError: a number is not finite.
    """
    return _pretty(raw, "") + "\n"


def _pretty(value: Any, indent: str) -> str:
    flat = json.dumps(value, allow_nan=False)
    if not isinstance(value, dict | list) or (len(flat) + len(indent) <= 150 and not _nests(value)) or not value:
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {_pretty(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _pretty(item, inner) for item in value) + f"\n{indent}]"


def _nests(value: dict | list) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return any(isinstance(item, dict) or (isinstance(item, list) and len(item) > 8) for item in items)


def _problems(raw: object, benchmark: str) -> list[str]:
    """What is wrong with a parsed record; empty when it can be trusted."""
    if not isinstance(raw, dict):
        return [f"must be an object with the keys {', '.join(_KEYS)}, got {type(raw).__name__}"]
    problems = [f"key {key!r} is missing" for key in _KEYS if key not in raw]
    problems += [f"key {key!r} is not part of a record" for key in raw if key not in _KEYS]
    if problems:
        return problems
    if type(raw["format"]) is not int or raw["format"] != _FORMAT:
        problems.append(f"format must be {_FORMAT}, got {raw['format']!r}")
    if raw["benchmark"] != benchmark:
        problems.append(f"benchmark must be {benchmark!r}, as the file's name says, got {raw['benchmark']!r}")
    for key in ("device", "command"):
        if not isinstance(raw[key], str) or not raw[key]:
            problems.append(f"{key} must be a text that is not empty, got {raw[key]!r}")
    problems += _date_problem(raw["date"])
    named = raw["versions"]
    if not isinstance(named, dict) or not named or not all(isinstance(v, str) and v for v in named.values()):
        problems.append(f"versions must map names to texts, got {named!r}")
    sources = raw["sources"]
    if not isinstance(sources, list) or not sources or not all(isinstance(s, str) and s for s in sources):
        problems.append(f"sources must be a list of at least one path, got {sources!r}")
    for key in ("fingerprint", "digest"):
        if not isinstance(raw[key], str) or not re.fullmatch(r"[0-9a-f]{64}", raw[key]):
            problems.append(f"{key} must be 64 hexadecimal digits, got {raw[key]!r}")
    if not problems and digest(raw) != raw["digest"]:
        header = ", ".join(
            f"{key} {raw[key]!r}" for key in _KEYS if key not in ("format", "benchmark", "sources", "digest", "results")
        )
        problems.append(
            f"the file was edited after it was measured: {header} and the results do not match digest "
            f"{raw['digest']} (restore the file, or record it again on a GPU)"
        )
    return problems


def _first(problems: list[str], filename: str) -> str:
    return f"{filename}: {problems[0]}" + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def _date_problem(date: object) -> list[str]:
    try:
        datetime.date.fromisoformat(date)
    except (TypeError, ValueError):
        return [f"date must be a day such as 2026-11-20, got {date!r}"]
    return []


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that can have been measured")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} appears twice")
        found[key] = value
    return found


def _refuse_non_finite(value: Any, where: str, filename: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{filename}: {where} must be finite, got {value!r}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RecordError(f"{filename}: {where} has a key that is not a text: {key!r}")
            _refuse_non_finite(item, f"{where}.{key}", filename)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _refuse_non_finite(item, f"{where}[{i}]", filename)
    elif not isinstance(value, str | int | float) and value is not None:
        raise RecordError(f"{filename}: {where} must be plain JSON data, got {value!r} of type {type(value).__name__}")
