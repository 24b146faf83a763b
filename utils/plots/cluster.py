"""Machines of several GPUs: which link joins which, and how fast it is."""

from __future__ import annotations

from matplotlib.figure import Figure

from utils.plots.check import require_between
from utils.plots.marks import box, centred, readable
from utils.plots.style import ARITHMETIC, INK, LINK, MUTED, SMALL, bare, figure, mix, styled
from utils.units import quantity

_NIC = mix(LINK, 0.45)
_MIDDLE = 3.6


@styled
def rails_plot(gpus: int, inside: float, network: float, *, title: str, subtitle: str = "") -> Figure:
    """Draw two machines of so many GPUs: all of one machine on NVLink, each with a network card, and cards on rails.

    Args:
        gpus: GPUs, and cards, of a machine: from 2 to 16.
        inside, network: bytes/s that a GPU sends over NVLink, and a card over the network.

    Raises:
        ValueError: another number of GPUs.
    """
    require_between("gpus", [gpus], 2, 16)
    fig, ax = figure(title, subtitle=subtitle, height=3.6)
    bare(ax).set(xlim=(-1.35, gpus + 0.15), ylim=(-0.2, 7.4))
    for k in range(gpus):
        ax.plot([k + 0.5, k + 0.5], [2.6, 4.6], color=_NIC, linewidth=1.8, zorder=0)
    for name, up in (("machine 0", 1), ("machine 1", -1)):

        def at(height: float, up: int = up) -> float:
            return _MIDDLE + up * height

        box(ax, -0.1, min(at(0.75), at(3.5)), gpus + 0.2, 2.75, edgecolor=MUTED, linewidth=0.8)
        ax.text(-0.25, at(2.1), name, ha="right", va="center", size=SMALL, color=INK)
        box(ax, 0.1, at(3.0) - 0.25, gpus - 0.2, 0.5, LINK)
        centred(ax, gpus / 2, at(3.0), f"NVLink: each GPU sends {quantity(inside, 'B/s', 3)}", color=readable(LINK))
        for k in range(gpus):
            box(ax, k + 0.12, at(2.1) - 0.35, 0.76, 0.7, mix(ARITHMETIC, 0.55))
            centred(ax, k + 0.5, at(2.1), f"GPU {k}")
            box(ax, k + 0.22, at(1.2) - 0.25, 0.56, 0.5, _NIC)
            centred(ax, k + 0.5, at(1.2), "card")
            ax.plot([k + 0.5] * 2, [at(1.45), at(1.75)], color=MUTED, linewidth=0.8, zorder=0)
            ax.plot([k + 0.5] * 2, [at(2.45), at(2.75)], color=LINK, linewidth=1.6, zorder=0)
    sent = f"network: each\ncard sends\n{quantity(network, 'B/s', 3)}"
    ax.text(-0.25, _MIDDLE, sent, ha="right", va="center", size=SMALL)
    fig.alt = (
        f"Two machines of {gpus} GPUs. In each, NVLink joins all GPUs, of which each sends "
        f"{quantity(inside, 'B/s', 3)}, and each GPU has a network card of its own. A line, a rail, joins the cards of "
        f"equal number of the two machines: each sends {quantity(network, 'B/s', 3)}."
    )
    return fig
