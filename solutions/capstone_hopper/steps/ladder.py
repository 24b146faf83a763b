"""The steps as data: number, name, what changes, source; and the difference between two of them."""

from __future__ import annotations

import ast
import difflib
import html
import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from .patch import source_of

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Step:
    """One rung: a kernel and what it changes against the rung before.

    Attributes:
        number: From 1; a try has the number of the step that it changes.
        name: Unique among all steps and tries.
        module: Dotted name of its module.
        changes: One line.
        gluon: Whether it is written in Gluon.
    """

    number: int
    name: str
    module: str
    changes: str
    gluon: bool

    @property
    def path(self) -> Path:
        """Its file."""
        return FOLDER.parent / ("/".join(self.module.split(".")[2:]) + ".py")

    @property
    def source(self) -> str:
        """Tile table and kernel, with a try's edits made, without imports and launch."""
        text = source_of(self.path)
        lines = text.splitlines()
        body = ast.parse(text).body
        launch = next(node.lineno for node in body if isinstance(node, ast.FunctionDef) and node.name == "forward")
        imports = max(node.end_lineno for node in body if isinstance(node, ast.Import | ast.ImportFrom))
        return "\n".join(lines[imports : launch - 1]).strip() + "\n"

    def load(self) -> ModuleType:
        """Its module, imported."""
        return importlib.import_module(self.module)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o (B, H, N, D) of q's dtype and the natural logsumexp (B, H, N), float32.

        Args:
            q, k, v: Contiguous (B, H, N, D), float16 or bfloat16, D 64 or 128, N a multiple of 128.
            causal: Query i sees keys j <= i.

        Raises:
            TypeError, ValueError: as :func:`.host.check` raises them.
            RuntimeError: a step in Gluon, and no Hopper GPU in use.
        """
        if self.gluon:
            from utils import runtime

            if runtime.INTERPRET or torch.cuda.get_device_capability(q.device) != (9, 0):
                raise RuntimeError(f"step {self.number}, {self.name}, needs a Hopper GPU (compute capability 9.0)")
        return self.load().forward(q, k, v, bool(causal))


def _step(number: int, file: str, name: str, changes: str) -> Step:
    return Step(number, name, f"{__package__}.{file}", changes, number >= 7)


STEPS: tuple[Step, ...] = (
    _step(
        1, "step01_textbook", "textbook", "FlashAttention as a textbook has it: 128 x 128, 8 warps, every tile masked"
    ),
    _step(2, "step02_exp2", "exp2", "powers of two, with log2(e) folded into the scale: one multiply-add a score"),
    _step(3, "step03_two_programs", "two programs", "smaller tiles and 4 warps: programs that share a multiprocessor"),
    _step(
        4, "step04_diagonal", "diagonal", "only the diagonal is masked, by an if in the one loop; longest tiles first"
    ),
    _step(5, "step05_heads_together", "heads together", "as many heads side by side as the L2 cache holds"),
    _step(
        6,
        "step06_descriptors",
        "descriptors",
        "tensor descriptors: the copy engine brings tiles, nobody computes addresses",
    ),
    _step(7, "step07_one_warpgroup", "one warpgroup", "Gluon: layouts, a ring of two stages, barriers; one warpgroup"),
    _step(8, "step08_producer", "producer", "a producer warp keeps the ring full, two consumer warpgroups compute"),
    _step(9, "step09_overlap", "overlap", "the softmax of a tile beside the products of its neighbours"),
    _step(10, "step10_ping_pong", "ping-pong", "the two warpgroups issue their products in turns"),
    _step(
        11,
        "step11_persistent",
        "persistent",
        "one program a multiprocessor with a list of tiles; nothing waits between tiles",
    ),
)
TRIES: tuple[Step, ...] = (
    _step(
        11, "try_lazy_rescaling", "lazy rescaling", "the output is rescaled only where a maximum grew by more than 2^8"
    ),
    _step(
        11,
        "try_polynomial_exp2",
        "polynomial exp2",
        "every fourth power by a polynomial on the multiply-add units",
    ),
    _step(11, "try_without_order", "without order", "ptxas may move the wait for the output ahead of the softmax"),
)
PACKAGE = _step(11, "package", "package", "the package's own kernel: three warpgroups, ragged lengths, grouped heads")
EVERYONE: tuple[Step, ...] = (*STEPS, *TRIES, PACKAGE)


def step(which: int | str | Step) -> Step:
    """A step by number (1 to 11) or name.

    Raises:
        ValueError: there is none.
    """
    if isinstance(which, Step):
        return which
    if isinstance(which, int) and 1 <= which <= len(STEPS):
        return STEPS[which - 1]
    for each in EVERYONE:
        if each.name == which:
            return each
    raise ValueError(f"step must be 1 to {len(STEPS)} or one of {', '.join(e.name for e in EVERYONE)}, got {which!r}")


def code_lines(source: str) -> list[str]:
    """Lines of code: without blank lines, lines of comment and docstrings."""
    documented = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return [line for i, line in lines if i not in documented and line.strip() and not line.strip().startswith("#")]


def new_lines(a: int | str | Step, b: int | str | Step) -> list[str]:
    """Lines of code that ``b`` has and ``a`` has not, in order."""
    before, after = code_lines(step(a).source), code_lines(step(b).source)
    matches = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [line for kind, _, _, i, j in matches if kind in ("insert", "replace") for line in after[i:j]]


def difference(a: int | str | Step, b: int | str | Step, context: int = 2) -> str:
    """The unified diff that leads from ``a``'s source to ``b``'s, with ``context`` lines around each change."""
    a, b = step(a), step(b)
    return "\n".join(
        difflib.unified_diff(
            a.source.splitlines(), b.source.splitlines(), f"{a.number}: {a.name}", f"{b.number}: {b.name}",
            n=context, lineterm="",
        )
    )  # fmt: skip


#: Background, text and border of a line of the diff by its first character.
_STYLES = {"+": "background:#e2f2e9;color:#00402b", "-": "background:#f7e7dc;color:#6b2f00", "@": "color:#595959"}


def difference_html(a: int | str | Step, b: int | str | Step, context: int = 2) -> str:
    """:func:`difference` as HTML: colours and the signs + and -, no script, no style sheet."""
    rows = []
    for line in difference(a, b, context).splitlines():
        if line.startswith(("---", "+++")):
            continue
        style = _STYLES.get(line[:1], "")
        rows.append(f'<div style="{style};padding:0 .6em;min-width:max-content">{html.escape(line) or " "}</div>')
    a, b = step(a), step(b)
    title = f"Step {b.number}, {html.escape(b.name)}, against step {a.number}, {html.escape(a.name)}"
    added = len(new_lines(a, b))
    return (
        f'<figure style="margin:0"><figcaption style="font-weight:600">{title}: {added} new lines</figcaption>'
        '<div role="region" tabindex="0" '
        f'aria-label="{title}" style="overflow-x:auto;border:1px solid #ccc;background:#fff;color:#1a1a1a;'
        f'font:12px/1.5 monospace;white-space:pre">{"".join(rows)}</div></figure>'
    )
