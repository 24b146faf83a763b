"""What a number in prose is bound to: an expression over claims, fields of records and a notebook's stored tables.

    1 - gap.forward.ratio
    attention_steps:points[head_dim=64,causal=false].timed.(exp2/textbook).seconds
    table:[step=ping_pong].cycles_a_tile

A claim's id is what its cell computed; ``benchmark:path`` is a field of a record (:mod:`utils.records`); ``table:path``
is a column of the nearest stored table above that has such rows. In a path a name is a key, with ``_`` for
all that is neither letter nor digit, and ``*`` every key; ``[key=value]`` keeps the elements of a list that have it
(``value/value``: one of these) and ``[0]`` takes one; ``(a/b)`` is the quotient of two paths. Each element that is left
gives one value. Around them: numbers, ``+ - * / **``, ``[a, b]`` and the functions of :data:`FUNCTIONS`. Nothing else
is evaluated.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from utils.claims.ledger import ledger

FUNCTIONS = {"min": np.min, "max": np.max, "median": np.median, "sorted": np.sort}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_PREFIXES = {"": 1, "n": 1e-9, "µ": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PREFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_NAME = re.compile(r"[a-z]\w*:(?:[\w.]|(?<=\.)\*(?=\.)|\[[^\]]*\]|\(\w+/\w+\))+|[a-z]\w*(?:\.\w+)+")


def claim_values() -> dict[str, Any]:
    """The computed value of every claim by its id, percentages as fractions and milliseconds as seconds."""
    units = {"%": 1e-2, "ms": 1e-3}
    return {c.id: c.computed * units[c.unit] if c.unit in units else c.computed for c in ledger()}


def per_unit(unit: str) -> float:
    """What a value in SI units is multiplied by to be printed in a unit: 100 for "%", 1e3 for "ms", 1 for "times"."""
    if unit in ("%", "percent"):
        return 100.0
    prefix = re.fullmatch(r"([nµmkKMGTP]i?)(?:FLOPs?(?:/s)?|tokens/s|B/s|B|s|Hz)", unit)
    return 1 / _PREFIXES[prefix[1]] if prefix else 1.0


def is_printed_as(value: float, text: str) -> bool:
    """Whether a value, in the printed unit, rounds to the digits of a text: 9.614 to "9.6"."""
    last_place = 10.0 ** -len(text.partition(".")[2])
    return abs(value - float(text.replace(",", "").replace("−", "-"))) <= 0.5 * last_place * (1 + 1e-9)


def evaluate(expression: str, claims: Mapping[str, Any], results: Callable[[str], Any]) -> np.ndarray:
    """The values of an expression, a float64 array of one dimension.

    Args:
        expression: see the module.
        claims: id -> value in SI units.
        results: What lies below ``benchmark:``, lists and dicts as in a record's results; for ``table`` the rows of
            each cell above, the nearest first.

    Raises:
        ValueError: the expression is none, or names a claim or a field that is not there or is no number.
    """
    named: dict[str, np.ndarray] = {}

    def name(found: re.Match[str]) -> str:
        values = field(found[0], results) if ":" in found[0] else [claims.get(found[0])]
        if not values or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            raise ValueError(f"{found[0]} is no number of a claim, a record or a table")
        named[f"v{len(named)}"] = np.array(values, dtype=np.float64)
        return f"v{len(named) - 1}"

    try:
        return _computed(ast.parse(_NAME.sub(name, expression), mode="eval").body, named)
    except SyntaxError as error:
        raise ValueError("it is not an expression") from error


def _computed(node: ast.expr, named: Mapping[str, np.ndarray]) -> np.ndarray:
    match node:
        case ast.Constant(value=int() | float() as constant):
            return np.array([float(constant)])
        case ast.Name(id=id) if id in named:
            return named[id]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand, named)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_computed(left, named), _computed(right, named))
        case ast.List(elts=[_, *_] as elements):
            return np.hstack([_computed(element, named) for element in elements])
        case ast.Call(func=ast.Name(id=id), args=[_, *_] as elements, keywords=[]) if id in FUNCTIONS:
            return np.atleast_1d(FUNCTIONS[id](np.hstack([_computed(element, named) for element in elements])))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed")


def field(path: str, results: Callable[[str], Any]) -> list[Any]:
    """The values that a path with its benchmark leads to, see the module; an empty list if it leads nowhere."""
    if quotient := re.search(r"\((\w+)/(\w+)\)", path):
        above, below = (field(path.replace(quotient[0], quotient[n]), results) for n in (1, 2))
        return [a / b for a, b in zip(above, below, strict=True)]
    benchmark, _, rest = path.partition(":")
    if benchmark == "table":
        return next((values for rows in results(benchmark) if (values := _followed(rows, rest))), [])
    return _followed(results(benchmark), rest)


def _followed(start: Any, path: str) -> list[Any]:
    nodes = [start]
    for step in re.findall(r"\w+|\*|\[[^\]]*\]", path):
        if step[0] == "[":
            nodes = _kept(nodes, step[1:-1])
        elif step == "*":
            nodes = [item for node in _flat(nodes) for item in node.values()]
        else:
            keyed = [
                {_plain(key): item for key, item in node.items()} for node in _flat(nodes) if isinstance(node, dict)
            ]
            nodes = [node[_plain(step)] for node in keyed if _plain(step) in node]
    return _flat(nodes)


def tables(text: str) -> list[dict[str, Any]]:
    """The rows of a table as a cell's plain text shows it (``plots.table``), by column; numbers in SI units."""
    lines = text.splitlines()
    rule = next((n for n, line in enumerate(lines) if n and re.fullmatch(r"-+(?:  -+)*", line)), None)
    if rule is None:
        return []
    spans = [found.span() for found in re.finditer("-+", lines[rule])]
    head, *rows = ([line[a:b].strip() for a, b in spans] for line in (lines[rule - 1], *lines[rule + 1 :]))
    return [{column: _value(cell) for column, cell in zip(head, row, strict=True)} for row in rows]


def _value(cell: str) -> Any:
    found = re.fullmatch(r"([+−-]?[\d,]*\.?\d+)(?: ?([^\d\s]\S*))?", cell)
    return float(found[1].replace(",", "").replace("−", "-")) / per_unit(found[2] or "") if found else cell


def _flat(nodes: Sequence[Any]) -> list[Any]:
    return [item for node in nodes for item in (node if isinstance(node, list) else [node])]


def _kept(lists: Sequence[Any], condition: str) -> list[Any]:
    if re.fullmatch(r"-?\d+", condition):
        return [items[int(condition)] for items in lists]
    wanted = [(_plain(key), values.split("/")) for key, _, values in (c.partition("=") for c in condition.split(","))]
    kept = []
    for item in _flat(lists):
        keyed = {_plain(key): _plain(value) for key, value in item.items()}
        if all(keyed.get(key) in map(_plain, values) for key, values in wanted):
            kept.append(item)
    return kept


def _plain(text: Any) -> str:
    text = f"{text:g}" if isinstance(text, float) else str(text)
    return re.sub(r"\W+", "_", text.strip()).lower()
