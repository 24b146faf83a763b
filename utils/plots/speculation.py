"""Speculative decoding drawn: rounds of real text token by token, and what two distributions have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from utils.plots.check import require_between, require_same_length
from utils.plots.marks import centred
from utils.plots.style import ARITHMETIC, IDLE, INK, MUTED, SMALL, TEXT, WASTE_HATCH, bare, figure, mix, styled
from utils.units import number

_ACCEPTED, _ADDED, _DROPPED = mix(ARITHMETIC, 0.28), ARITHMETIC, IDLE
_REJECTED = {"facecolor": "white", "edgecolor": "#8A8A8A", "hatch": WASTE_HATCH}
_MONO = 11.0  # points; a character of the monospaced font is 0.602 of them wide
#: In characters: a line of the figure, the room before a round, around a token's text, and before the added token.
_LINE, _MARGIN, _PAD, _APART = 59.0, 4.0, 0.9, 1.2


@dataclass(frozen=True)
class DraftedRound:
    """One round as text: the drafted tokens, how many of them were accepted, and the token that the target added."""

    drafted: tuple[str, ...]
    accepted: int
    added: str | None

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= len(self.drafted):
            raise ValueError(f"accepted must be between 0 and {len(self.drafted)} drafted tokens, got {self.accepted}")


def visible(token: str) -> str:
    """A token with its blanks and line ends made visible."""
    return token.replace(" ", "·").replace("\n", "↵").replace("\t", "→") or "∅"


@styled
def drafted_text(rounds: Sequence[DraftedRound], *, title: str, subtitle: str = "") -> Figure:
    """A line a round: accepted, rejected and dropped tokens of the draft, then the target's own token."""
    rounds = list(rounds)
    require_between("the number of rounds", [len(rounds)], 1, 24)
    require_between("the drafted tokens of a round", (len(each.drafted) for each in rounds), 0, 12)
    widest = max(_width(each) for each in rounds)
    fig, ax = figure(title, subtitle=subtitle, height=0.82 + 0.245 * len(rounds))
    bare(ax)
    for row, each in enumerate(rounds):
        x = 0.0
        for place, token in enumerate(each.drafted):
            kind = "accepted" if place < each.accepted else "rejected" if place == each.accepted else "dropped"
            if each.added is None and kind != "accepted":
                kind = "dropped"  # the text ended before it was judged
            x = _token(ax, x, row, token, kind)
        if each.added is not None:
            _token(ax, x + _APART, row, each.added, "added")
        count = each.accepted + (each.added is not None)
        ax.text(-1.2, row, f"+{count}", ha="right", va="center", size=SMALL, color=MUTED)
    handles = [
        Patch(facecolor=_ACCEPTED, label="drafted, accepted"),
        Patch(**_REJECTED, label="rejected"),
        Patch(facecolor=_DROPPED, label="discarded, not checked"),
        Patch(facecolor=_ADDED, label="the target's own"),
    ]
    ax.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, fontsize=SMALL,
        handlelength=1.3, columnspacing=1.4, borderaxespad=0.1,
    )  # fmt: skip
    ax.set_xlim(-_MARGIN, max(widest, _LINE - _MARGIN))
    ax.set_ylim(len(rounds) - 0.45, -0.6)
    accepted, drafted = sum(each.accepted for each in rounds), sum(len(each.drafted) for each in rounds)
    made = accepted + sum(each.added is not None for each in rounds)
    parts = [
        "".join(each.drafted[: each.accepted]) + (f"[{each.added}]" if each.added is not None else "")
        for each in rounds
    ]
    fig.alt = (
        f"{title.rstrip('.')}. {len(rounds)} rounds, {accepted} of {drafted} drafted tokens accepted, {made} tokens of "
        f"text. The target's own tokens in brackets: {''.join(parts)}"
    )
    return fig


def _token(ax, x: float, row: int, token: str, kind: str) -> float:
    """Draw one token and return where the next begins; the unit of x is a character."""
    text = visible(token)
    width = len(text) + _PAD
    style = {
        "accepted": {"facecolor": _ACCEPTED, "edgecolor": "none"},
        "rejected": _REJECTED,
        "dropped": {"facecolor": _DROPPED, "edgecolor": "none"},
        "added": {"facecolor": _ADDED, "edgecolor": "none"},
    }[kind]
    box = FancyBboxPatch((x, row - 0.36), width, 0.72, boxstyle="round,pad=0,rounding_size=0.18", **style)
    box.set_linewidth(0.9)
    ax.add_patch(box)
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if kind == "rejected" else None
    ink = "white" if kind == "added" else MUTED if kind == "dropped" else INK
    centred(ax, x + width / 2, row + 0.02, text, size=_MONO, color=ink, family="DejaVu Sans Mono", bbox=ground)
    return x + width + 0.35


def _width(each: DraftedRound) -> float:
    """Characters that a round takes."""
    tokens = [*each.drafted, *([] if each.added is None else [each.added])]
    return sum(len(visible(token)) + _PAD + 0.35 for token in tokens) + _APART


@styled
def overlap_bars(
    target: Sequence[float], draft: Sequence[float], labels: Sequence[str], *, title: str, subtitle: str = ""
) -> Figure:
    """Two distributions over some tokens: what they share, what only the draft has, and what only the target has.

    Args:
        target, draft: probabilities of the tokens drawn, each between 0 and 1.
        labels: the tokens.
    """
    require_same_length("target, draft and labels", target, draft, labels)
    require_between("the number of tokens", [len(labels)], 1, 16)
    require_between("a probability", (*target, *draft), 0, 1)
    fig, ax = figure(title, subtitle=subtitle, height=3.0, grid="y")
    for x, (p, q) in enumerate(zip(target, draft, strict=True)):
        shared = min(p, q)
        ax.bar(x, shared, 0.74, color=_ACCEPTED)
        if p > q:
            ax.bar(x, p - shared, 0.74, bottom=shared, color=_ADDED)
        elif q > p:
            ax.bar(x, q - shared, 0.74, bottom=shared, **_REJECTED)
    ax.set_xticks(
        range(len(labels)), [visible(label) for label in labels], rotation=35, ha="right", size=TEXT,
        family="DejaVu Sans Mono",
    )  # fmt: skip
    ax.set_ylabel("probability")
    handles = [
        Patch(facecolor=_ACCEPTED, label="min(p, q): drafted and accepted"),
        Patch(**_REJECTED, label="q above p: rejected"),
        Patch(facecolor=_ADDED, label="p above q: the residual"),
    ]
    ax.legend(handles=handles, frameon=False, fontsize=SMALL, loc="upper right")
    rows = ", ".join(f"{visible(t)} p {number(p, 2)} q {number(q, 2)}" for t, p, q in zip(labels, target, draft))
    fig.alt = f"{title.rstrip('.')}. Probabilities of tokens under the target (p) and the draft (q): {rows}."
    return fig
