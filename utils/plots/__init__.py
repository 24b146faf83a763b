"""Every figure of the course: one look, drawn from real data, with alternative text."""

from utils.plots.curves import Series, sweep
from utils.plots.labels import label_points
from utils.plots.roofline import Ceilings, Point, roofline_plot
from utils.plots.show import png, show
from utils.plots.style import ARITHMETIC, HBM, LIMIT, LINK, ON_CHIP, WASTE, WRONG, figure, tidy
from utils.plots.table import Table, table

__all__ = [
    "ARITHMETIC",
    "HBM",
    "LIMIT",
    "LINK",
    "ON_CHIP",
    "WASTE",
    "WRONG",
    "Ceilings",
    "Point",
    "Series",
    "Table",
    "figure",
    "label_points",
    "png",
    "roofline_plot",
    "show",
    "sweep",
    "table",
    "tidy",
]
