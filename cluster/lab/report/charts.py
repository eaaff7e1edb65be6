"""Charts as matplotlib figures, and as SVG that follows the page's light or dark theme.

matplotlib is imported when the first chart is drawn.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours by role, (light, dark): CSS variables of the page. Figures are drawn in the light colours, which are mapped
# back to variables by value, so light values must be unique.
THEME = {
    "page": ("#f4f5f7", "#0e1318"),
    "card": ("#ffffff", "#171e25"),
    "ink": ("#16202c", "#e6ebf0"),
    "soft": ("#5b6877", "#93a1b0"),
    "rule": ("#dde2e8", "#2a343f"),
    "accent": ("#0f766e", "#2dd4bf"),
    "full": ("#cfd6de", "#3a4652"),
    "kept": ("#7fb8d6", "#3f7fa3"),
    "line": ("#1d6fb8", "#62b0f0"),
    "whole": ("#8b97a5", "#7d8b99"),
    "good": ("#15803d", "#4ade80"),
    "bad": ("#c81e1e", "#f87171"),
    "event": ("#d97706", "#fbbf24"),
    "warn": ("#8a5a00", "#f3cf7a"),
    "warn-page": ("#fff6e0", "#2a2412"),
    "warn-rule": ("#f0d9a0", "#57481b"),
}
COLOR = {name: light for name, (light, _) in THEME.items()}

# Tableau's colour-blind palette, for white and black backgrounds.
SERIES_COLORS = ("#1170aa", "#fc7d0b", "#57606c", "#5fa2ce", "#c85200", "#7b848f", "#a3acb9", "#a3cce9")

WIDTH, HEIGHT, LEGEND_ROW = 620, 340, 16


@dataclass(frozen=True, slots=True)
class Point:
    """One data point. ``low, high``: confidence interval, ``nan`` for none; ``text``: tooltip."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    text: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Named points; ``joined``: by a line in order of x; ``marked``: with markers. ``color``: index in
    ``SERIES_COLORS``, ``None`` for the next one."""

    name: str
    points: Sequence[Point]
    joined: bool = True
    marked: bool = True
    color: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A shaded range of the x axis, such as the duration of a fault; infinite ends are clipped. ``name``: label at the
    top; ``text``: tooltip."""

    low: float
    high: float
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """``log``: base ten; ``percent``: labels in percent; ``low``, ``high``: limits, ``None`` for those of the data."""

    title: str
    log: bool = False
    percent: bool = False
    low: float | None = None
    high: float | None = None

    def apply(self, axes: Axes, name: str) -> None:
        """Set up axis ``name`` (``x`` or ``y``) of ``axes``, after the data are drawn."""
        axis = getattr(axes, f"{name}axis")
        limits = (self.low, self.high)
        low, high = getattr(axes.dataLim, f"interval{name}")
        if self.log and 0 < low <= high < math.inf:
            places = _log_ticks(low, high)
            axes.set(**{f"{name}scale": "log"})
            axis.set_ticks(places)
            axis.set_ticks([], minor=True)
            limits = (places[0], places[-1]) if len(places) > 1 else (low / 2, high * 2)
        axis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %" if self.percent else f"{value:.4g}")
        axes.set(**{f"{name}lim": limits, f"{name}label": self.title})


def chart(title: str, series: Sequence[Series], x: Axis, y: Axis, spans: Sequence[Span] = ()) -> Figure:
    """Draw these series. Lines break at non-finite values; series without finite points are omitted."""
    shown = [each for each in series if any(math.isfinite(p.x) and math.isfinite(p.y) for p in each.points)]
    columns = 3 if all(len(each.name) <= 26 for each in shown) else 2
    figure = new_figure(title, WIDTH, HEIGHT + LEGEND_ROW * max(0, math.ceil(len(shown) / columns) - 1))
    (axes,) = figure.axes
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=COLOR["ink"], pad=20 if spans else 10)
    axes.margins(x=0.02 if any(each.marked for each in shown) else 0)
    for number, each in enumerate(shown):
        _draw(
            axes,
            each,
            SERIES_COLORS[(number if each.color is None else each.color) % len(SERIES_COLORS)],
            "os"[number % 2],
        )
    x.apply(axes, "x")
    y.apply(axes, "y")
    first, last = axes.get_xlim()
    for span in spans:
        low, high = max(span.low, first), min(span.high, last)
        if low <= high:
            set_tooltips(axes.axvspan(low, high, color=SERIES_COLORS[4], alpha=0.13, linewidth=1), span.text)
            up = axes.get_xaxis_transform()
            axes.text(low, 1.01, span.name, transform=up, fontsize=11, color=COLOR["soft"])
    add_legend(figure, columns)
    return figure


def _draw(axes: Axes, series: Series, color: str, marker: str) -> None:
    points = [point for point in series.points if math.isfinite(point.x)]
    if series.marked:
        points = [point for point in points if math.isfinite(point.y)]
        held = [p for p in points if math.isfinite(p.low) and math.isfinite(p.high)]
        axes.vlines([p.x for p in held], [p.low for p in held], [p.high for p in held], colors=color, alpha=0.45)
    if series.joined:
        points = sorted(points, key=lambda point: point.x)
    (line,) = axes.plot(
        [point.x for point in points],
        [point.y if math.isfinite(point.y) else math.nan for point in points],
        label=series.name,
        color=color,
        linewidth=2 if series.joined else 0,
        marker=marker if series.marked else "",
        markersize=7,
    )
    if series.marked:
        set_tooltips(line, *(point.text for point in points))


def _log_ticks(low: float, high: float) -> list[float]:
    """Ticks at 1, 2 and 5 times powers of ten, from the one at or below ``low`` to the one at or above ``high``."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    places = [round(m * 10.0**power, 12) for power in powers for m in (1, 2, 5)]
    first = max((place for place in places if place <= low * (1 + 1e-9)), default=places[0])
    last = min((place for place in places if place >= high * (1 - 1e-9)), default=places[-1])
    return [place for place in places if first <= place <= last]


def new_figure(name: str, width: float, height: float, rows: int = 1) -> Figure:
    """Figure of ``rows`` axes with a shared x axis, size in pixels; ``name``: description for screen readers."""
    from matplotlib.figure import Figure

    figure = Figure((width / 72, height / 72), layout="constrained")
    figure.set_label(name)
    for axes in figure.subplots(rows, sharex=True, squeeze=False).flat:
        axes.spines[:].set_visible(False)
        axes.grid(axis="y", color=COLOR["rule"], linewidth=1)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, pad=6, labelcolor=COLOR["soft"], labelsize=12)
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set(color=COLOR["soft"], fontsize=12)
    return figure


def add_legend(figure: Figure, columns: int) -> None:
    """Add a legend below the axes, with each label once; none without labels."""
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower left",
            ncols=columns,
            frameon=False,
            fontsize=12,
            labelcolor=COLOR["soft"],
            handlelength=1.5,
        )


def set_tooltips(artist: Artist, *texts: str) -> None:
    """Set the tooltip of an artist, or one per marker of a line, in order; empty texts add none."""
    if any(texts):
        artist.set_gid(json.dumps(texts))


_SVG, _HREF = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def svg(figure: Figure) -> str:
    """Reproducible standalone SVG document. It has no references, not even internal ones, so that several can be
    inlined in one page; its colours are CSS variables, defined from ``THEME``."""
    import matplotlib
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sightline"}):
        figure.savefig(drawn, format="svg", transparent=True, metadata=_NO_METADATA)
    root = ElementTree.fromstring(drawn.getvalue())
    shapes = {each.get("id"): each.get("d", "") for each in root.iter(f"{_SVG}path")}
    for element in list(root.iter()):
        tooltips = element.attrib.pop("id", "")
        if tooltips.startswith("["):
            marks = list(element.iter(f"{_SVG}use")) or [element]
            for mark, text in zip(marks, json.loads(tooltips), strict=True):
                if text:
                    ElementTree.SubElement(mark, "title").text = text
        for child in element.findall(f"{_SVG}defs"):
            element.remove(child)
        if element.tag == f"{_SVG}use":
            place = (element.attrib.pop("x", "0"), element.attrib.pop("y", "0"))
            element.tag = f"{_SVG}path"
            element.set("d", shapes[element.attrib.pop(_HREF)[1:]])
            element.set("transform", f"translate({place[0]} {place[1]})")
        element.tag = element.tag.removeprefix(_SVG)
        element.attrib.pop("clip-path", None)
        element.tail = element.tail and element.tail.strip()
        if "style" in element.attrib:
            style = re.sub(r"(font: [^';]*px) [^;]*", r"\1 system-ui, sans-serif", element.attrib["style"])
            element.set("style", re.sub("#[0-9a-f]{6}", lambda found: _VARIABLES.get(found[0], found[0]), style))
    root.attrib = {
        "xmlns": _SVG[1:-1],
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-label": str(figure.get_label()),
        "stroke-linejoin": "round",
    }
    sheet = ElementTree.Element("style")
    sheet.text = f"svg{{{variables(0)}}}@media(prefers-color-scheme:dark){{svg{{{variables(1)}}}}}"
    root.insert(0, sheet)
    return ElementTree.tostring(root, encoding="unicode")


_VARIABLES = {light: f"var(--{name})" for name, light in COLOR.items()}


def inline(figure: Figure) -> str:
    """SVG element to inline in a page whose stylesheet defines the variables."""
    return re.sub(r' xmlns="[^"]*"|<style>.*?</style>', "", svg(figure))


def variables(dark: int) -> str:
    """``THEME`` as CSS variable declarations, for light (0) or dark (1)."""
    return "".join(f"--{name}:{values[dark]};" for name, values in THEME.items())
