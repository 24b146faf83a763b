"""Figures of formats: their text tells what is drawn, the data is drawn as it is, and what cannot be is refused."""

import numpy as np
import pytest
import torch

from tests.drawn import picture_of
from utils.formats import ELEMENTS, FORMATS, grid, quantization_error, rounding_error
from utils.plots.formats import LOOKS, error_over_granularity, error_over_magnitude, format_grids

MAGNITUDES = torch.exp2(torch.linspace(-20, 20, 161))


def test_every_format_has_its_own_look():
    assert set(LOOKS) == set(FORMATS) and len(set(LOOKS.values())) == len(LOOKS)


@pytest.mark.slow
def test_a_stroke_stands_for_each_positive_number():
    fig = format_grids({name: grid(name) for name in ELEMENTS}, title="Five formats on one axis")
    drawn = [[path.vertices[0, 0] for path in lines.get_paths()] for lines in fig.axes[0].collections]
    assert [len(strokes) for strokes in drawn] == [126, 123, 7, 127, 7]
    assert drawn[2] == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert "e4m3: 126 numbers from 0.00195 to 448; e5m2: 123 numbers from 1.53×10⁻⁵ to 57,344" in fig.alt
    picture_of(fig)


@pytest.mark.slow
def test_a_curve_of_errors_says_where_a_format_is_good():
    errors = {name: rounding_error(MAGNITUDES, name) for name in ("e4m3", "int8")}
    fig = error_over_magnitude(errors, MAGNITUDES, title="Floats keep their precision, integers do not")
    line = fig.axes[0].lines[0]
    assert np.allclose(line.get_ydata(), errors["e4m3"]) and np.allclose(line.get_xdata(), MAGNITUDES)
    assert "e4m3: smallest error 2.7 %, at most 10 % from 0.0066 to 360; int8: smallest error 0.33 %" in fig.alt
    assert {note.get_text() for note in fig.axes[0].texts} >= {"e4m3", "int8"}
    picture_of(fig)


def test_granularities_are_drawn_in_order_with_the_spread_of_the_matrices():
    matrices = [torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    blocks = {"tensor": None, "row": 64, "16": 16}
    errors = {
        "int4": {w: [quantization_error(x, "int4", b) for x in matrices] for w, b in blocks.items()},
        "nvfp4": {"16": [quantization_error(x, "nvfp4") for x in matrices]},
    }
    fig = error_over_granularity(errors, title="Finer scales lose less")
    ax = fig.axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["tensor", "row", "16"]
    assert np.allclose(ax.lines[0].get_ydata(), [np.median(values) for values in errors["int4"].values()])
    assert list(ax.lines[1].get_xdata()) == [2]
    band = ax.collections[0].get_paths()[0].vertices
    assert np.isclose(band[:, 1].max(), max(errors["int4"]["tensor"]))
    assert "int4: tensor " in fig.alt and "nvfp4: 16 " in fig.alt
    picture_of(fig)


REFUSED = {
    "no formats": (lambda: format_grids({}, title="A"), "format_grids needs at least one entry"),
    "an unknown format": (lambda: format_grids({"e3m4": [1]}, title="A"), "format must be one of e4m3, .* got 'e3m4'"),
    "nothing above 0": (lambda: format_grids({"int4": [-1, 0]}, title="A"), "int4: numbers above 0 needs at least one"),
    "no errors": (lambda: error_over_magnitude({}, [1], title="A"), "error_over_magnitude needs at least one"),
    "an error too few": (lambda: error_over_magnitude({"int4": [0.1]}, [1, 2], title="A"), r"same length.*\[2, 1\]"),
    "an error of 0": (lambda: error_over_magnitude({"int4": [0.0]}, [1], title="A"), "errors of int4 must be positive"),
    "a magnitude of 0": (lambda: error_over_magnitude({"int4": [0.1]}, [0], title="A"), "magnitudes must be positive"),
    "no matrix": (lambda: error_over_granularity({"int4": {"row": []}}, title="A"), "int4, row needs at least one"),
    "no granularity": (lambda: error_over_granularity({"int4": {}}, title="A"), "int4 needs at least one"),
    "an error above 1": (lambda: error_over_granularity({"int4": {"row": [2]}}, title="A"), "between 0 and 1, got 2"),
    "a NaN": (lambda: error_over_granularity({"int4": {"row": [float("nan")]}}, title="A"), "nan"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_drawn_is_refused(what):
    draw, text = REFUSED[what]
    with pytest.raises(ValueError, match=text):
        draw()
