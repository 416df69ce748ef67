"""What the tests of drawn pages share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text


def assert_apart_on_the_page(figure: Figure, texts: Iterable[Text]) -> None:
    """No text leaves the page or lies on another. The figure has been drawn as it is saved."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    page = figure.bbox
    for text, box in boxes:
        inside = page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
        assert inside, f"{text!r} at {box.extents} on a page of {page.extents}"
    for (one, at), (other, there) in combinations(boxes, 2):
        assert not at.padded(-1).overlaps(there.padded(-1)), f"{one!r} lies on {other!r}"


def line_of(axes: Axes, gid: str) -> Line2D:
    """The one line of that name."""
    (line,) = (line for line in axes.lines if line.get_gid() == gid)
    return line
