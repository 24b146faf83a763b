"""A paged cache drawn from its own state: block tables, who holds which block, and where memory is wasted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from utils.plots.animate import Animation, animate
from utils.plots.check import require_between, require_data
from utils.plots.marks import box, centred
from utils.plots.style import HBM, INK, LIMIT, MUTED, SMALL, TEXT, WASTE, WASTE_HATCH, bare, figure, mix, styled

_EMPTY = mix(WASTE, 0.5)


class Manager(Protocol):
    """What a picture needs of a block manager: lab 5's has it."""

    num_blocks: int
    block_size: int
    sequences: Mapping[str, Any]

    def table(self, id: str) -> Sequence[int]: ...

    def length(self, id: str) -> int: ...

    def references(self, block: int) -> int: ...


@dataclass(frozen=True)
class PoolState:
    """A block manager at one moment; made by :func:`pool_state`.

    ``contents`` are the words in each block's slots, of blocks that are held.
    """

    block_size: int
    tables: Mapping[str, tuple[int, ...]]
    lengths: Mapping[str, int]
    references: tuple[int, ...]
    contents: Mapping[int, tuple[str, ...]]
    copies: tuple[tuple[int, int], ...] = ()
    caption: str = ""

    @property
    def wasted(self) -> int:
        """Slots of held blocks that hold no token."""
        held = {block for table in self.tables.values() for block in table}
        return sum(self.block_size - len(self.contents[block]) for block in held)


def pool_state(
    manager: Manager,
    words: Mapping[str, Sequence[str]],
    *,
    caption: str = "",
    copies: Sequence[tuple[int, int]] = (),
) -> PoolState:
    """Read a block manager's tables.

    Args:
        words: what each sequence's tokens are called, by its id.
        copies: pairs (source, target) of blocks that were just copied.

    Raises:
        ValueError: a sequence without as many words as it has tokens, tables that disagree about a shared block.
    """
    require_between("the number of blocks", [manager.num_blocks], 1, 16)
    contents: dict[int, tuple[str, ...]] = {}
    tables, lengths = {}, {}
    for id in manager.sequences:
        tables[id], lengths[id] = tuple(manager.table(id)), manager.length(id)
        named = tuple(words.get(id, ()))[: lengths[id]]
        if len(named) < lengths[id]:
            raise ValueError(f"sequence {id!r} has {lengths[id]} tokens, but {len(named)} words name them")
        for i, block in enumerate(tables[id]):
            text = named[i * manager.block_size : (i + 1) * manager.block_size]
            shared = manager.references(block) > 1 and block in contents
            if shared and contents[block][: len(text)] != text[: len(contents[block])]:
                raise ValueError(f"block {block} is shared, but its sequences have different words in it")
            if not (shared and len(contents[block]) > len(text)):
                contents[block] = text
    references = tuple(manager.references(block) for block in range(manager.num_blocks))
    return PoolState(manager.block_size, tables, lengths, references, contents, tuple(copies), caption)


@styled
def block_tables(state: PoolState, *, title: str) -> Figure:
    """Draw each sequence in the order of its tokens, and the pool as it is; lines between them are the block tables."""
    rows = max(_rows(state), len(state.references))
    fig, ax = figure(title, height=0.55 + 0.29 * rows, grid="none")
    _draw_state(ax, state=state, rows=rows)
    fig.alt = f"{title.rstrip('.')}. {_said(state)}"
    return fig


def block_animation(states: Sequence[PoolState], *, title: str, alt: str) -> Animation:
    """Play a block manager's states, each with its caption."""
    require_data("block_animation", states)
    if len({(state.block_size, len(state.references)) for state in states}) != 1:
        raise ValueError("an animation needs states of one pool")
    rows = max(max(_rows(state) for state in states), len(states[0].references))
    return animate(
        [partial(_draw_state, state=state, rows=rows) for state in states],
        title=title, alt=alt, captions=[state.caption for state in states],
        height=0.55 + 0.29 * rows, seconds_per_frame=2.0,
    )  # fmt: skip


def _rows(state: PoolState) -> int:
    return sum(len(table) for table in state.tables.values()) + max(0, len(state.tables) - 1)


def _said(state: PoolState) -> str:
    tables = [f"{id}: {state.lengths[id]} tokens in blocks {', '.join(map(str, t))}" for id, t in state.tables.items()]
    shared = [str(block) for block, count in enumerate(state.references) if count > 1]
    more = f" Shared: block {', '.join(shared)}." if shared else ""
    free = sum(count == 0 for count in state.references)
    return f"{'; '.join(tables) or 'No sequence'}. {free} of {len(state.references)} blocks are free.{more}"


def _draw_state(ax: Axes, *, state: PoolState, rows: int) -> None:
    bare(ax)
    size, pool_x = state.block_size, state.block_size + 1.9
    ax.text(0, -0.62, "sequences, each in order", size=TEXT, weight="bold", va="bottom", color=INK)
    ax.text(pool_x, -0.62, "the pool", size=TEXT, weight="bold", va="bottom", color=INK)
    row = 0.0
    for id, table in state.tables.items():
        for i, block in enumerate(table):
            words = state.contents[block][: max(0, state.lengths[id] - i * size)]
            _block(ax, 0, row, size, words, edge="#8A8A8A")
            if i == 0:
                ax.text(-0.12, row + 0.41, id, ha="right", va="center", size=TEXT, weight="bold", color=INK)
            line = FancyArrowPatch(
                (size + 0.04, row + 0.41), (pool_x - 0.36, block + 0.41), arrowstyle="-|>", mutation_scale=7,
                linewidth=0.9, color=LIMIT, shrinkA=0, shrinkB=0,
            )  # fmt: skip
            ax.add_patch(line)
            row += 1
        row += 1
    for block, count in enumerate(state.references):
        words = state.contents[block] if count else ()
        _block(ax, pool_x, block, size, words, edge=LIMIT if count > 1 else "#8A8A8A", free=not count)
        ax.text(pool_x - 0.1, block + 0.41, str(block), ha="right", va="center", size=SMALL, color=MUTED)
        note = f"{count} tables" if count > 1 else "" if count else "free"
        ax.text(pool_x + size + 0.1, block + 0.41, note, va="center", size=SMALL, color=INK if count > 1 else MUTED)
    for source, target in state.copies:
        x = pool_x + size + 0.95
        ax.add_patch(
            FancyArrowPatch(
                (x, source + 0.41), (x, target + 0.41), arrowstyle="-|>", mutation_scale=10, linewidth=1.6, color=HBM,
                connectionstyle="arc3,rad=-0.45" if target > source else "arc3,rad=0.45",
            )
        )  # fmt: skip
        ax.text(x + 0.42, (source + target) / 2 + 0.41, "copy", size=SMALL, color=HBM, va="center")
    ax.set_xlim(-0.75, pool_x + size + 1.8)
    ax.set_ylim(rows + 0.1, -1.25)


def _block(ax: Axes, x: float, y: float, size: int, words: Sequence[str], *, edge: str, free: bool = False) -> None:
    """One block: its slots with their words; a held block's empty slots are hatched as waste."""
    for i in range(size):
        filled = i < len(words)
        face = mix(HBM, 0.62) if filled else "white" if free else _EMPTY
        look = {"edgecolor": "white", "linewidth": 0.6}
        if not filled and not free:
            look = {"edgecolor": "#B5B5B5", "linewidth": 0, "hatch": WASTE_HATCH}
        box(ax, x + i, y, 1, 0.82, face, **look)
        if filled:
            word = words[i].strip() or "·"
            centred(ax, x + i + 0.5, y + 0.41, word)
    box(ax, x, y, size, 0.82, edgecolor=edge, linewidth=1.8 if edge == LIMIT else 0.8)
