"""Charts as data, and as inline SVG: no script, no network, light and dark through the page's CSS variables.

Numbers appear on hover as the browser's own titles. Coordinates are in CSS pixels.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from pipeline.report.style import CSS

WIDTH, HEIGHT = 560, 280
BAR_WIDTH, BAR_ROW = 340, 46
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 18, 44
NAME_WIDTH, NAME_HEIGHT = 6.6, 14
"""Of a letter, and of a line."""
MOST_LINEAR = 4
"""Heights whose largest is more than so many times the smallest go by powers of ten."""
MAX_POINTS = 240
"""Points of one line; more are averaged in buckets, which a screen could not tell apart anyway."""


@dataclass(frozen=True)
class Series:
    """One line: its name in the legend and its (x, y) points in order of x. `marked` draws every point."""

    name: str
    points: Sequence[tuple[float, float]]
    marked: bool = False


@dataclass(frozen=True)
class Bar:
    """One bar: what it stands for, its height, and what is written on it. `color` numbers the page's palette."""

    name: str
    value: float
    text: str
    color: int = 1


@dataclass(frozen=True)
class Lines:
    """Lines over a common axis with ticks, grid, legend and hover titles. Points that are not finite are left out."""

    layout: ClassVar[str] = "lines"
    title: str
    series: Sequence[Series]
    x_label: str
    y_label: str
    from_zero: bool = False
    doubling: bool = False
    """Both axes by powers, x of two and y of ten: of points above zero."""

    def html(self, *, alone: bool = False) -> str:
        """A figure of the page, or `alone` an SVG document of its own; empty without a point."""
        lines = self._shown()
        if not lines:
            return ""
        return (document if alone else figure)(self.title, self._parts(lines), self._legend(lines))

    def panel(self) -> str:
        """What stands alone in a document that shows several; its title stands above zero."""
        lines = self._shown()
        return _titled(self.title, self._parts(lines), self._legend(lines)) if lines else ""

    def _shown(self) -> list[Series]:
        lines = [Series(line.name, _thin(_finite(line.points)), line.marked) for line in self.series]
        return [line for line in lines if line.points]

    def _legend(self, lines: Sequence[Series]) -> list[str]:
        return [line.name for line in lines] * (len(lines) > 1)

    def _parts(self, lines: Sequence[Series]) -> list[str]:
        xs = [x for line in lines for x, _ in line.points]
        ys = [y for line in lines for _, y in line.points]
        frame, x_ticks, heights = self._frame(min(xs), max(xs), min(ys), max(ys))
        named = {frame.scaled(value): short(value) for value in heights}
        parts = [_axes(frame, x_ticks, named, self.x_label, self.y_label)]
        return parts + [_line(frame, line, color, self.x_label) for color, line in enumerate(lines, start=1)]

    def _frame(self, left: float, right: float, low: float, high: float) -> tuple["_Frame", list[float], list[float]]:
        """With the ticks of both axes."""
        if self.doubling:
            x_ticks = [2.0**power for power in range(math.floor(math.log2(left)), math.ceil(math.log2(right)) + 1)]
            heights = _powers(low, high)
            reach = (left, right) if right > left else (left, 2 * left)
            return (
                _Frame(reach, (math.log10(heights[0]), math.log10(heights[-1])), math.log10, math.log2),
                x_ticks,
                heights,
            )
        x_ticks, heights = ticks(left, right), ticks(0.0 if self.from_zero else low, high)
        reach = (left, right) if right > left else (x_ticks[0], x_ticks[-1])
        return _Frame(reach, (heights[0], heights[-1])), x_ticks, heights


@dataclass(frozen=True)
class Point:
    """One mark with its name beside it. `color` numbers the page's palette."""

    name: str
    x: float
    y: float
    color: int = 1


@dataclass(frozen=True)
class Points:
    """Named points above zero; where heights differ much, their axis goes by powers of ten.

    `front`: those of them that a line joins, as stairs, from left to right.
    """

    layout: ClassVar[str] = "lines"
    title: str
    points: Sequence[Point]
    x_label: str
    y_label: str
    front: Sequence[Point] = ()

    def html(self, *, alone: bool = False) -> str:
        """A figure of the page, or `alone` an SVG document of its own; empty without a point."""
        points = [point for point in self.points if math.isfinite(point.x) and 0 < point.y < math.inf]
        if not points:
            return ""
        xs, ys = [point.x for point in points], [point.y for point in points]
        x_ticks, low, high = ticks(min(xs), max(xs)), min(ys), max(ys)
        is_wide = high > MOST_LINEAR * low
        heights = _powers(low, high) if is_wide else ticks(low, high)
        scaled = math.log10 if is_wide else float
        y_ticks = {scaled(height): short(height) for height in heights}
        frame = _Frame((x_ticks[0], x_ticks[-1]), (min(y_ticks), max(y_ticks)), scaled)
        axes = _axes(frame, x_ticks, y_ticks, self.x_label, self.y_label)
        parts = [axes, *_stairs(frame, self.front), *_named(frame, points)]
        return (document if alone else figure)(self.title, parts)


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from zero, each under its name and its value."""

    layout: ClassVar[str] = "bars"
    title: str
    bars: Sequence[Bar]

    def html(self) -> str:
        """A figure of the page; empty without a bar that is finite."""
        bars = [bar for bar in self.bars if math.isfinite(bar.value)]
        if not bars:
            return ""
        longest = max(bar.value for bar in bars) or 1.0
        parts = [_bar(bar, 14 + index * BAR_ROW, BAR_WIDTH * bar.value / longest) for index, bar in enumerate(bars)]
        return figure(self.title, parts, box=(BAR_WIDTH, len(bars) * BAR_ROW - 12))


def _bar(bar: Bar, y: int, length: float) -> str:
    return (
        f"<g><title>{escape(bar.name)}: {escape(bar.text)}</title>"
        f'<text class="name" x="0" y="{y}">{escape(bar.name)}</text>'
        f'<text class="value" x="{BAR_WIDTH}" y="{y}" text-anchor="end">{escape(bar.text)}</text>'
        f'<rect class="rail" x="0" y="{y + 7}" width="{BAR_WIDTH}" height="12" rx="3"/>'
        f'<rect class="bar c{bar.color}" x="0" y="{y + 7}" width="{max(length, 2.0):.1f}" height="12" rx="3"/></g>'
    )


@dataclass(frozen=True)
class Grid:
    """A square for each number of a table, coloured by it: equal numbers in a row belong together."""

    layout: ClassVar[str] = "bars"
    title: str
    rows: Sequence[Sequence[int]]
    row_name: str
    column_name: str

    def html(self) -> str:
        """A figure of the page; empty without a row."""
        if not self.rows:
            return ""
        row_name, column_name = escape(self.row_name), escape(self.column_name)
        columns = max(len(row) for row in self.rows)
        cell = min(22.0, (BAR_WIDTH - LEFT - RIGHT) / columns)
        parts = []
        for y, row in enumerate(self.rows):
            for x, number in enumerate(row):
                box = f'x="{LEFT + x * cell:.1f}" y="{TOP + y * 9}" width="{cell - 2:.1f}" height="7" rx="1.5"'
                shade = f'style="fill: hsl({number * 137.5 % 360:.0f} 55% 55%)"'
                title = f"<title>{row_name} {y}, {column_name} {x}: group {number}</title>"
                parts.append(f"<g>{title}<rect {box} {shade}/></g>")
        last = TOP + len(self.rows) * 9 - 2
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{TOP + 8}" text-anchor="end">{row_name} 0</text>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{last}" text-anchor="end">{len(self.rows) - 1}</text>')
        parts.append(f'<text class="label" x="{LEFT}" y="{last + 24}">{column_name} 0 … {columns - 1}</text>')
        return figure(self.title, parts, box=(BAR_WIDTH, len(self.rows) * 9 + TOP + BOTTOM))


@dataclass(frozen=True)
class TokenMap:
    """A text, each token darker the more layers select it, above a map of layers and tokens."""

    layout: ClassVar[str] = ""
    title: str
    tokens: Sequence[str]
    layers: Sequence[int]
    selected: Sequence[str]
    """For each of these layers a 0 or a 1 a token."""
    note: str = ""

    def html(self) -> str:
        """A card with the text and a figure with the map."""
        count = len(self.layers)
        times = [sum(row[index] == "1" for row in self.selected) for index in range(len(self.tokens))]
        text = "".join(
            f'<span style="background: hsl(210 80% 50% / {0.6 * chosen / count:.2f})" '
            f'title="{chosen} of {count} routed layers">{escape(token)}</span>'
            for token, chosen in zip(self.tokens, times, strict=True)
        )
        width, height = WIDTH / max(len(self.tokens), 1), 9
        marks = [
            f'<rect x="{index * width:.2f}" y="{number * height}" width="{width:.2f}" height="{height - 1}" '
            f'fill="hsl(210 80% 50%)"><title>layer {layer}: {escape(repr(self.tokens[index]))}</title></rect>'
            for number, (layer, row) in enumerate(zip(self.layers, self.selected, strict=True))
            for index, chosen in enumerate(row)
            if chosen == "1"
        ]
        return (
            f'<div class="card"><pre style="white-space: pre-wrap">{text}</pre><p class="note">{escape(self.note)}</p>'
            f'</div><div class="charts">{figure(self.title, marks, box=(WIDTH, count * height))}</div>'
        )


Chart = Lines | Points | Bars | Grid | TokenMap


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that enclose [low, high]."""
    if not high > low:
        low, high = low - (abs(low) * 0.1 or 0.5), low + (abs(low) * 0.1 or 0.5)
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten that enclose [low, high], both above zero; at least two."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    first = max(index for index, step in enumerate(steps) if step <= low)
    last = min(index for index, step in enumerate(steps) if step >= high)
    return steps[first : max(last, first + 1) + 1]


def short(value: float) -> str:
    """A number for an axis: 150k, 0.25, 1e-05."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:g}{unit}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class _Frame:
    """Maps data to pixels."""

    xs: tuple[float, float]
    ys: tuple[float, float]
    scaled: Callable[[float], float] = float
    """Of heights, before they are mapped."""
    across: Callable[[float], float] = float
    """The same of what lies on the axis below; `xs` are as they come."""

    def x(self, value: float) -> float:
        left, right = map(self.across, self.xs)
        return LEFT + (self.across(value) - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.ys[0]) / (self.ys[1] - self.ys[0]) * (HEIGHT - TOP - BOTTOM)


class _Box(NamedTuple):
    """A rectangle of the page."""

    x: float
    y: float
    width: float
    height: float

    @property
    def is_inside(self) -> bool:
        """Whether it lies where axes leave room."""
        across = self.x >= LEFT and self.x + self.width <= WIDTH
        return across and self.y >= 0 and self.y + self.height <= HEIGHT - BOTTOM

    def meets(self, other: "_Box") -> bool:
        across = self.x < other.x + other.width and other.x < self.x + self.width
        return across and self.y < other.y + other.height and other.y < self.y + self.height


def _axes(frame: _Frame, x_ticks: list[float], y_ticks: Mapping[float, str], x_label: str, y_label: str) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value, text in y_ticks.items():
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for value in x_ticks:
        if frame.xs[0] <= value <= frame.xs[1]:
            x = frame.x(value)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{short(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle_x, middle_y = (LEFT + right) / 2, (TOP + bottom) / 2
    parts.append(f'<text class="label" x="{middle_x}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text class="label" x="14" y="{middle_y}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle_y})">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _line(frame: _Frame, line: Series, color: int, x_label: str) -> str:
    path = " ".join(f"{frame.x(x):.1f},{frame.y(frame.scaled(y)):.1f}" for x, y in line.points)
    radius = 3.5 if line.marked or len(line.points) == 1 else 0
    dots = []
    for x, y in line.points:
        place = f'cx="{frame.x(x):.1f}" cy="{frame.y(frame.scaled(y)):.1f}"'
        title = f"<title>{escape(line.name)}: {y:.5g} at {x:,.6g} {escape(x_label)}</title>"
        shown = f'<circle class="dot c{color}" {place} r="{radius}"/>' if radius else ""
        dots.append(f'<g class="point">{title}<circle class="hit" {place} r="8"/>{shown}'
                    f'<circle class="hover c{color}" {place} r="4"/></g>')  # fmt: skip
    return f'<polyline class="line c{color}" points="{path}"/>{"".join(dots)}'


def _stairs(frame: _Frame, points: Sequence[Point]) -> Iterator[str]:
    """What is at least as good as one of the points lies above and to the right."""
    if len(points) < 2:
        return
    steps = [(frame.x(point.x), frame.y(frame.scaled(point.y))) for point in points]
    corners = [steps[0], *(place for (_, y), (x, below) in pairwise(steps) for place in ((x, y), (x, below)))]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    yield f'<polyline class="line c1" points="{path}"/>'


def _named(frame: _Frame, points: Sequence[Point]) -> Iterator[str]:
    """Dots, and their names: as near as nothing else is, within the frame."""
    places = {point: (frame.x(point.x), frame.y(frame.scaled(point.y))) for point in points}
    taken = [_Box(x - 5, y - 5, 10, 10) for x, y in places.values()]
    for point, (x, y) in sorted(places.items(), key=lambda place: place[1][1]):
        width = NAME_WIDTH * len(point.name)
        steps = sorted(range(-40, 41), key=lambda step: abs(step + 1))  # rather above, where no line of a front is
        beside = x + 12, x - 12 - width, max(LEFT, min(x, WIDTH - width))  # the last: a long one above or below
        boxes = [_Box(start, y + 5 * step - 9, width, NAME_HEIGHT) for step in steps for start in beside]
        free = (box for box in boxes if box.is_inside and not any(box.meets(other) for other in taken))
        box = next(free, None) or next((box for box in boxes if box.is_inside), boxes[0])
        taken.append(box)
        left = box.x + width > x
        near, line = min(max(x, box.x - 3), box.x + width + 3), box.y + 11
        yield (
            f"<g><title>{escape(point.name)}: {point.y:.5g} at {point.x:,.6g}</title>"
            f'<circle class="dot c{point.color}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
            f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{near:.1f}" y2="{line - 4:.1f}"/>'
            f'<text class="name" x="{box.x if left else box.x + width:.1f}" y="{line:.1f}" '
            f'text-anchor="{"start" if left else "end"}">{escape(point.name)}</text></g>'
        )


def figure(title: str, parts: Sequence[str], legend: Sequence[str] = (), box: tuple[int, int] = (WIDTH, HEIGHT)) -> str:
    """SVG elements under a title, in a box of that width and height."""
    keys = "".join(f'<span class="key"><i class="c{n}"></i>{escape(name)}</span>' for n, name in enumerate(legend, 1))
    return (
        f'<figure><figcaption>{escape(title)}<span class="legend">{keys}</span></figcaption>'
        f'<svg viewBox="0 0 {box[0]} {box[1]}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def document(title: str, parts: Sequence[str], legend: Sequence[str] = ()) -> str:
    """The same as an SVG document, which brings the page's style along."""
    return _document(_titled(title, parts, legend), (0, -_head(legend), WIDTH, HEIGHT + _head(legend)))


def sheet(charts: Sequence[Lines], columns: int = 2) -> str:
    """Several of them as one SVG document, side by side and below one another."""
    width, height = WIDTH + RIGHT, max(HEIGHT + _head(chart.series) for chart in charts) + RIGHT
    places = [((number % columns) * width, (number // columns) * height) for number in range(len(charts))]
    parts = [
        f'<g transform="translate({x} {y + height - HEIGHT - RIGHT})">{chart.panel()}</g>'
        for chart, (x, y) in zip(charts, places, strict=True)
    ]
    return _document("".join(parts), (0, 0, columns * width, -(-len(charts) // columns) * height))


def _head(legend: Sequence[Any]) -> int:
    """Height of a title and its legend, above zero."""
    return 30 + 18 * len(legend)


def _titled(title: str, parts: Sequence[str], legend: Sequence[str]) -> str:
    """SVG elements below a title and a legend that stand above zero."""
    head = _head(legend)
    keys = "".join(
        f'<line class="line c{n}" x1="{LEFT}" x2="{LEFT + 16}" y1="{18 * n - head + 10}" y2="{18 * n - head + 10}"/>'
        f'<text x="{LEFT + 24}" y="{18 * n - head + 14}">{escape(name)}</text>'
        for n, name in enumerate(legend, 1)
    )
    return f'<text class="value" x="{LEFT}" y="{16 - head}">{escape(title)}</text>{keys}{"".join(parts)}'


def _document(inner: str, box: tuple[int, int, int, int]) -> str:
    x, y, width, height = box
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{x} {y} {width} {height}"><style>{CSS}</style>'
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" style="fill: var(--card)"/>{inner}</svg>\n'
    )


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS points; the first and the last stay, the others are means of neighbours."""
    if len(points) <= MAX_POINTS:
        return points
    inner, buckets = points[1:-1], MAX_POINTS - 2
    edges = [round(index * len(inner) / buckets) for index in range(buckets + 1)]
    groups = [inner[start:end] for start, end in pairwise(edges)]
    means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    return [points[0], *means, points[-1]]
