"""Mutation operators: the mistakes that a student makes, one at a time, in the text of a solution.

Each operator looks at one node of the syntax tree and gives what may stand in its place, as text. Everything outside of
the node stays as it is written, so that a mutant reads like the solution with a slip in it.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: Gives what may stand in place of a node: text for the node itself, or (another node, text).
Operator = Callable[[ast.AST, "Source"], Iterator[str]]


@dataclass(frozen=True)
class Mutant:
    """A solution's text with one mistake in it.

    Attributes:
        operator: what kind of mistake (``"comparison"``).
        line: of the text, from 1, where it begins.
        before: that line as the solution has it.
        after: the line, or what became of it, with the mistake; empty where it is gone.
        text: the whole text.
    """

    operator: str
    line: int
    before: str
    after: str
    text: str


class Source:
    """A solution's text, dedented, with the syntax tree of it."""

    def __init__(self, text: str) -> None:
        self.text = textwrap.dedent(text).strip("\n") + "\n"
        self.tree = ast.parse(self.text)
        self.starts = [0]
        for line in self.text.encode().splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.variables = list(dict.fromkeys(node.id for node in self._variables()))

    def _variables(self) -> list[ast.Name]:
        """The names of values, as far as the text shows, in its order: not called, no module, no type."""
        types = {
            part for node in ast.walk(self.tree) for part in ast.walk(getattr(node, "annotation", None) or ast.Pass())
        }
        called = {node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        names = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node not in types | called]
        names = [node for node in names if not _module(node) and not hasattr(builtins, node.id)]
        return sorted(names, key=lambda node: (node.lineno, node.col_offset))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends, in bytes of the text."""
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.AST) -> str:
        """The text of a node."""
        begin, end = self.span(node)
        return self.text.encode()[begin:end].decode()

    def operand(self, node: ast.AST) -> str:
        """The text of a node as part of a larger expression: in parentheses unless it is an atom."""
        text = self.of(node)
        atoms = ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript | ast.Tuple | ast.List
        return text if isinstance(node, atoms) else f"({text})"

    def replaced(self, node: ast.AST, text: str) -> str:
        """The whole text with another one in place of a node."""
        begin, end = self.span(node)
        raw = self.text.encode()
        return (raw[:begin] + text.encode() + raw[end:]).decode()


# ---- expressions ----
BESIDE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
          ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip
OTHER_WAY = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<"}


def comparison(node: ast.AST, source: Source) -> Iterator[str]:
    """A bound by one (``<`` for ``<=``), and the other way round."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = source.of(node.left), source.of(node.comparators[0])
        for table in (BESIDE, OTHER_WAY):
            if type(node.ops[0]) in table:
                yield f"{left} {table[type(node.ops[0])]} {right}"


SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
         ast.MatMult: "@", ast.BitAnd: "&", ast.BitOr: "|", ast.LShift: "<<", ast.RShift: ">>"}  # fmt: skip
INSTEAD = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "%", ast.Mod: "//",
           ast.BitAnd: "|", ast.BitOr: "&"}  # fmt: skip
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult, ast.Pow)


def dropped_term(node: ast.AST, source: Source) -> Iterator[str]:
    """One side of a sum, a product or a quotient alone."""
    if isinstance(node, ast.BinOp):
        yield source.operand(node.left)
        yield source.operand(node.right)


def doubled_term(node: ast.AST, source: Source) -> Iterator[str]:
    """A term counted twice."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield f"{source.of(node)} {SIGNS[type(node.op)]} {source.operand(node.right)}"


def arithmetic(node: ast.AST, source: Source) -> Iterator[str]:
    """Another operator: minus for plus, a quotient for a product."""
    if isinstance(node, ast.BinOp) and type(node.op) in INSTEAD:
        yield f"{source.operand(node.left)} {INSTEAD[type(node.op)]} {source.operand(node.right)}"


def swapped_operands(node: ast.AST, source: Source) -> Iterator[str]:
    """The operands of what does not commute, and of a call with two positional arguments, the other way round."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ORDERED):
        yield f"{source.operand(node.right)} {SIGNS[type(node.op)]} {source.operand(node.left)}"
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not _symmetric(source.of(node.func)):
        parts = [source.of(part) for part in (*node.args, *node.keywords)]
        for first in range(len(node.args) - 1):
            changed = [*parts]
            changed[first : first + 2] = reversed(changed[first : first + 2])
            yield f"{source.of(node.func)}({', '.join(changed)})"


def _symmetric(name: str) -> bool:
    return name.split(".")[-1] in ("max", "min", "maximum", "minimum", "add", "mul", "isinstance", "logaddexp", "gcd")


def by_one(node: ast.AST, source: Source) -> Iterator[str]:
    """A bound, an index or a count that is one more or one less."""
    parent = source.parents.get(node)
    bound = isinstance(parent, ast.Slice)
    bound |= isinstance(parent, ast.Call) and node in parent.args and _counts(source.of(parent.func))
    index = isinstance(parent, ast.Subscript) and node is parent.slice and isinstance(node, ast.Constant | ast.BinOp)
    whole = isinstance(node, ast.Constant) and type(node.value) is int
    if not isinstance(node, ast.expr) or isinstance(node, ast.Tuple | ast.Starred | ast.Slice):
        return
    if whole:
        yield str(node.value + 1)
        yield str(node.value - 1) if node.value > 0 else f"({node.value - 1})"
    elif bound or (index and not isinstance(getattr(node, "value", None), str)):
        yield f"{source.operand(node)} + 1"
        yield f"{source.operand(node)} - 1"


def _counts(name: str) -> bool:
    return name.split(".")[-1] in ("range", "cdiv", "ceil", "min", "arange", "narrow", "islice")


def constant(node: ast.AST, source: Source) -> Iterator[str]:
    """Another number, fill value or truth value."""
    if not isinstance(node, ast.Constant):
        infinite = (
            re.fullmatch(r"-?(float\(\"-?inf\"\)|(torch|math)\.inf)", source.of(node))
            if hasattr(node, "lineno")
            else None
        )
        if infinite and isinstance(node, ast.UnaryOp | ast.Call | ast.Attribute):
            yield "0.0"
            yield "-1e4"
        return
    if node.value is True or node.value is False:
        yield str(not node.value)
    elif type(node.value) is float:
        yield "1.0" if node.value == 0 else "0.0"
        yield f"({node.value!r} * 2)" if node.value else '-float("inf")'


def condition(node: ast.AST, source: Source) -> Iterator[str]:
    """A condition that always holds, never holds, or is turned round; one part of it alone."""
    if isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield word.join(source.operand(value) for value in node.values)
        for left_out in range(len(node.values)):
            kept = [source.operand(value) for value in node.values if value is not node.values[left_out]]
            yield (" and " if isinstance(node.op, ast.And) else " or ").join(kept)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.operand(node.operand)
    if isinstance(node, ast.IfExp):
        yield source.of(node.body)
        yield source.of(node.orelse)
    parent = source.parents.get(node)
    if isinstance(parent, ast.If | ast.While) and node is parent.test:
        if isinstance(parent, ast.If):
            yield "True"
        yield "False"


def unary(node: ast.AST, source: Source) -> Iterator[str]:
    """A sign that is missing."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
        yield source.operand(node.operand)


PAIRS = (
    ("max", "sum"), ("sum", "max"), ("max", "min"), ("min", "max"), ("maximum", "minimum"), ("minimum", "maximum"),
    ("amax", "sum"), ("exp2", "exp"), ("exp", "exp2"), ("log2", "log"), ("log", "log2"), ("mean", "sum"),
    ("sum", "mean"), ("any", "all"), ("all", "any"), ("rsqrt", "sqrt"), ("argmax", "argmin"), ("cdiv", "fdiv"),
    ("ceil", "floor"), ("floor", "ceil"), ("zeros", "ones"), ("zeros_like", "ones_like"), ("zeros", "empty"),
    ("empty", "zeros"), ("empty_like", "zeros_like"), ("all_reduce", "broadcast"),
    ("reduce_scatter_tensor", "all_reduce"),
    ("append", "extend"), ("popleft", "pop"), ("pop", "popleft"), ("appendleft", "append"), ("first", "last"),
    ("tril", "triu"), ("cummax", "cumsum"), ("isend", "send"), ("irecv", "recv"), ("erf", "tanh"), ("clamp", "abs"),
    ("setdefault", "get"), ("add_", "copy_"), ("copy_", "add_"), ("div_", "mul_"), ("mul_", "div_"),
)  # fmt: skip


def other_function(node: ast.AST, source: Source) -> Iterator[str]:
    """A function that is taken for another: a maximum for a sum, exp for exp2, one collective for another."""
    parent = source.parents.get(node)
    if not (isinstance(parent, ast.Call) and node is parent.func):
        return
    name = source.of(node)
    stem, last = name[: len(name) - len(name.split(".")[-1])], name.split(".")[-1]
    for right, wrong in PAIRS:
        if last == right:
            yield stem + wrong


#: Calls that a student forgets: what they are called on, or their first argument, stands alone.
FORGOTTEN = ("clone", "contiguous", "detach", "to", "float", "double", "long", "reversed", "sorted", "trans", "t",
             "transpose", "abs", "sqrt", "exp", "exp2", "where", "cdiv", "list", "tuple", "set", "copy", "dict", "int",
             "view", "reshape", "flatten", "unsqueeze", "squeeze", "min", "max", "minimum", "maximum", "ceil", "floor",
             "round", "sum", "clamp", "requires_grad_", "item", "log", "log2")  # fmt: skip


def forgotten_call(node: ast.AST, source: Source) -> Iterator[str]:
    """What a call was made on, without the call: no clone, no clamp, no cast, not reversed."""
    if not isinstance(node, ast.Call):
        return
    name = source.of(node.func).split(".")[-1]
    if name not in FORGOTTEN:
        return
    method = isinstance(node.func, ast.Attribute) and not _module(node.func.value)
    if method:
        yield source.operand(node.func.value)
    else:
        for argument in node.args[-2:] if name == "where" else node.args[:2]:
            yield source.operand(argument)


def _module(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "tl", "triton", "math", "dist", "F", "itertools")


def dropped_argument(node: ast.AST, source: Source) -> Iterator[str]:
    """A call without one of its named arguments: no mask, no ``other``, no group."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            parts = [source.of(part) for part in (*node.args, *node.keywords) if part is not keyword]
            yield f"{source.of(node.func)}({', '.join(parts)})"


NARROWER = {"float32": ("float16", "bfloat16"), "float64": ("float32",), "int64": ("int32",), "float": ("half",)}


def narrower_dtype(node: ast.AST, source: Source) -> Iterator[str]:
    """A dtype with fewer bits, for an accumulator, an intermediate or an offset."""
    if isinstance(node, ast.Attribute) and node.attr in NARROWER and _module(node.value):
        for name in NARROWER[node.attr]:
            yield f"{source.of(node.value)}.{name}"


def axis(node: ast.AST, source: Source) -> Iterator[str]:
    """``[:, None]`` for ``[None, :]``; two indices of a subscript the other way round; a step of -1 left out."""
    if not isinstance(node, ast.Subscript):
        return
    if isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 2:
        first, second = (source.of(part) for part in node.slice.elts)
        if first != second:
            yield f"{source.of(node.value)}[{second}, {first}]"
    if isinstance(node.slice, ast.Slice) and node.slice.step is not None:
        yield source.of(node.value)


def constant_for_a_name(node: ast.AST, source: Source) -> Iterator[str]:
    """A fixed number in place of a stride, a scale, a size: what holds in the example only."""
    parent = source.parents.get(node)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and isinstance(parent, ast.BinOp):
        yield "1"
        yield "0"


def tuple_order(node: ast.AST, source: Source) -> Iterator[str]:
    """Two results, or two names, the other way round."""
    if isinstance(node, ast.Tuple) and len(node.elts) > 1 and not isinstance(source.parents.get(node), ast.Subscript):
        parts = [source.of(part) for part in node.elts]
        for first in range(len(parts) - 1):
            changed = [*parts]
            changed[first : first + 2] = reversed(changed[first : first + 2])
            text = ", ".join(changed)
            yield f"({text})" if source.of(node).startswith("(") else text


def not_saved(node: ast.AST, source: Source) -> Iterator[str]:
    """Tensors kept on the context by hand, not by ``save_for_backward``."""
    if isinstance(node, ast.Call) and source.of(node.func).endswith(".save_for_backward"):
        owner = source.of(node.func).rsplit(".", 1)[0]
        yield f"setattr({owner}, 'saved_tensors_kept', ({', '.join(source.of(part) for part in node.args)},))"


EXPRESSIONS: tuple[Operator, ...] = (
    comparison, dropped_term, doubled_term, arithmetic, swapped_operands, by_one, constant, condition, unary,
    other_function, forgotten_call, dropped_argument, narrower_dtype, axis, constant_for_a_name, tuple_order, not_saved,
)  # fmt: skip


def other_name(node: ast.AST, source: Source) -> Iterator[str]:
    """A variable that is taken for the one named before it, or after it, in the text."""
    if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)) or node.id not in source.variables:
        return
    place = source.variables.index(node.id)
    yield from source.variables[max(0, place - 1) : place] + source.variables[place + 1 : place + 2]


# ---- statements ----
REMOVED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.For, ast.If, ast.With, ast.Delete, ast.Raise,
           ast.Assert, ast.Continue, ast.Break)  # fmt: skip


def statement(node: ast.AST, source: Source) -> Iterator[str]:
    """A statement that is missing, and an assignment with another operator."""
    if isinstance(node, REMOVED) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        yield "pass"
    if isinstance(node, ast.AugAssign):
        target, value = source.of(node.target), source.of(node.value)
        yield f"{target} = {value}"
        yield f"{target} {'-' if isinstance(node.op, ast.Add) else '+'}= {value}"
    if isinstance(node, ast.Break):
        yield "continue"
    if isinstance(node, ast.Continue):
        yield "break"
    if isinstance(node, ast.If) and not node.orelse and not isinstance(source.parents.get(node), ast.If):
        body = textwrap.dedent(" " * node.body[0].col_offset + source.text.encode()[
            source.span(node.body[0])[0] : source.span(node.body[-1])[1]].decode())  # fmt: skip
        yield textwrap.indent(body, " " * node.col_offset).lstrip()


def calls_reordered(source: Source) -> Iterator[tuple[int, str, str]]:
    """Two statements, one after the other, that change places: line, what stands there then, and the whole text."""
    for node in ast.walk(source.tree):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(block, list):
                continue
            for first, second in itertools.pairwise(block):
                if _order_counts(first, second):
                    raw, (a, b), (c, d) = source.text.encode(), source.span(first), source.span(second)
                    text = (raw[:a] + raw[c:d] + raw[b:c] + raw[a:b] + raw[d:]).decode()
                    yield first.lineno, f"{source.of(second)}; {source.of(first)}", text


def _order_counts(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether both are simple statements, and one writes what the other uses, or both call for an effect."""
    if not all(isinstance(node, ast.Expr | ast.Assign | ast.AugAssign) for node in (first, second)):
        return False
    if any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in (first, second)):
        return False  # a docstring
    if isinstance(first, ast.Expr) or isinstance(second, ast.Expr):
        return True
    writes, uses = zip(*(_names(node) for node in (first, second)))
    return bool(writes[0] & uses[1] or writes[1] & uses[0])


def _names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """The names that a statement writes (an attribute by its owner), and all that it uses."""
    writes: set[str] = set()
    for target in getattr(statement, "targets", None) or [getattr(statement, "target", None)]:
        writes |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)} if target is not None else set()
    return writes, {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


# ---- all of them ----
def mutants(text: str, names: bool = False) -> list[Mutant]:
    """Every mutant of a solution's text, each text once, in the order of the lines.

    Args:
        text: Of the solution, or of a part of it.
        names: Whether variables are taken for one another as well: where the other mistakes are few.

    Raises:
        SyntaxError: the text is no Python.
    """
    source = Source(text)
    found: dict[str, Mutant] = {}
    lines = source.text.splitlines()
    operators = (*EXPRESSIONS, statement, *((other_name,) if names else ()))
    for node in ast.walk(source.tree):
        for operator in operators:
            for instead in operator(node, source) if hasattr(node, "lineno") else ():
                changed = source.replaced(node, instead)
                if _parses(changed):
                    _add(found, operator.__name__, node.lineno, lines, source, changed)
    for line, _, changed in calls_reordered(source):
        if _parses(changed):
            _add(found, "calls_reordered", line, lines, source, changed)
    return sorted(found.values(), key=lambda mutant: mutant.line)


def _add(found: dict[str, Mutant], name: str, line: int, lines: list[str], source: Source, changed: str) -> None:
    tree = ast.dump(ast.parse(changed))
    if tree == ast.dump(source.tree) or tree in found:
        return
    after = changed.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(lines, after)) if a != b), min(len(lines), len(after)) - 1)
    more = len(after) - len(lines)
    last = next(i for i in range(len(lines)) if i >= len(lines) - first or i >= len(after) - first
                or lines[-1 - i] != after[-1 - i]) if lines[first:] != after[first:] else 0  # fmt: skip
    was, now = lines[first : len(lines) - last], after[first : len(lines) - last + more]
    found[tree] = Mutant(name.replace("_", " "), first + 1, _short(was), _short(now), changed)


def _short(lines: list[str]) -> str:
    return " ⏎ ".join(line.strip() for line in lines)


def _parses(text: str) -> bool:
    try:
        compile("def f():\n" + textwrap.indent(text, "    ") + "\n    yield", "mutant", "exec")
    except (SyntaxError, ValueError):
        try:
            compile("for _ in ():\n" + textwrap.indent(text, "    "), "mutant", "exec", ast.PyCF_ONLY_AST)
        except (SyntaxError, ValueError):
            return False
    return True
